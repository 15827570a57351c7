"""`peagle deploy --learn`: `peagle serve --learn` with a volume, instead of vLLM."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from click import Context

from peagle.cli.serving.server_settings import build_settings
from peagle.deploy.options import DeployOptions
from peagle.deploy.plan import plan
from peagle.deploy.render import next_steps
from peagle.deploy.sagemaker.plan.choices import LEARN_FOLDER
from peagle.errors import UserError
from peagle.server.sagemaker import serve_arguments
from tests.support.command_line import run
from tests.support.deploy.deploying import container_spec, documents, planned, rendered

SHIPPED = str(Path(__file__).parents[2] / "peagle" / "drafters" / "smollm2-135m" / "p-eagle")
LEARN: dict[str, Any] = {"pair": "smollm2-135m", "learn": True, "image": "registry/peagle:cuda"}
VOLUME = "/var/lib/peagle"


def serve_settings(words: list[str]) -> Any:
    """The settings of `peagle serve` for these arguments; UserError or exit if they are invalid."""
    from typer.main import get_command

    from peagle.cli import app

    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    context: Context = command.make_context("serve", list(words))
    return build_settings(context.params)


def test_compose_file_with_learning() -> None:
    files = rendered("compose", **LEARN)
    parsed = documents(files)["compose.yaml"]
    server = parsed["services"]["peagle-smollm2-135m-0"]
    assert server["entrypoint"] == ["peagle", "serve"]
    settings = serve_settings(server["command"])
    assert (settings.pair, settings.learn) == ("smollm2-135m", f"{VOLUME}/learn")
    assert (settings.method, settings.host, settings.port) == ("p-eagle", "0.0.0.0", 8000)
    assert server["volumes"] == [f"models:{VOLUME}"] and "models" in parsed["volumes"]
    assert "PEAGLE_API_KEY" in server["environment"]
    assert "VLLM_API_KEY" not in "".join(files.values())
    assert "$PEAGLE_API_KEY" in next_steps("compose", planned("compose", **LEARN), Path("out"))


def test_kubernetes_files_with_learning() -> None:
    parsed = documents(rendered("kubernetes", **LEARN, drafter=SHIPPED))
    for name in ("deployment", "storage", "loader"):
        kubernetes_validate.validate(parsed[f"{name}.yaml"], "1.32", strict=True)
    container = container_spec("kubernetes", parsed)
    assert container["command"] == ["peagle", "serve"]
    settings = serve_settings(container["args"])
    assert settings.learn == f"{VOLUME}/learn" and settings.drafter == f"{VOLUME}/drafter"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["models"] == VOLUME
    loader = parsed["loader.yaml"]["spec"]["containers"][0]
    assert loader["volumeMounts"][0]["mountPath"] == VOLUME
    assert "PEAGLE_API_KEY" in [variable["name"] for variable in container["env"]]
    plain = documents(rendered("kubernetes", "smollm2-135m"))
    sizes = [d["storage.yaml"]["spec"]["resources"]["requests"]["storage"] for d in (parsed, plain)]
    assert int(sizes[0].removesuffix("Gi")) == int(sizes[1].removesuffix("Gi")) + 10


def test_the_drafter_is_copied_unchanged(tmp_path: Path) -> None:
    """An export for vLLM would leave out parts of the drafter."""
    words = ["deploy", "compose", "smollm2-135m", "--learn", "--image", "peagle:cuda"]
    words += ["--drafter", SHIPPED, "--out", str(tmp_path), "--json"]
    report = json.loads(run(*words))
    assert str(tmp_path / "drafter") in report["written"]
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "drafter" / name).read_bytes() == (Path(SHIPPED) / name).read_bytes()
    assert json.loads(run(*words))["written"] == []


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("compose", {"image": None}, "`learn` needs an image with `peagle serve`"),
        ("compose", {"gpus": 2}, "set `gpus` to 1"),
        ("kubernetes", {"replicas": 2}, "use `replicas` 1"),
        ("ray", {}, "not supported by ray: use compose or kubernetes"),
        ("compose", {"drafter": "org/drafter"}, "must be a folder with `learn`"),
    ],
)
def test_mistakes_are_reported(kind: str, options: dict[str, Any], message: str) -> None:
    values = {key: value for key, value in (LEARN | options).items() if key != "pair"}
    with pytest.raises(UserError, match=message):
        plan("smollm2-135m", kind, DeployOptions(**values))


def test_sagemaker_container_with_learning(tmp_path: Path) -> None:
    """The environment of the container turns learning on in `peagle serve`."""
    role = "arn:aws:iam::123456789012:role/SageMaker"
    words = ["deploy", "sagemaker", "smollm2-135m", "--role", role, "--region", "us-west-2"]
    words += ["--instance", "ml.g5.xlarge", "--dry-run", "--learn"]
    refused = run(*words, code=2)
    assert "needs an image with `peagle serve`" in " ".join(refused.split())
    printed = run(*words, "--image", "1.dkr.ecr.us-west-2.amazonaws.com/peagle:cuda")
    models = [step for step in json.loads(printed) if step.get("operation") == "CreateModel"]
    environment = models[0]["parameters"]["PrimaryContainer"]["Environment"]
    assert environment["SM_VLLM_LEARN"] == LEARN_FOLDER
    arguments = serve_arguments({"SM_VLLM_LEARN": LEARN_FOLDER}, tmp_path)
    assert serve_settings(arguments).learn == LEARN_FOLDER
