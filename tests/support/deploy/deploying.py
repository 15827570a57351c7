"""Rendered files of `peagle deploy`, and their content according to their parsers."""

import json
import shlex
from typing import Any

import yaml

from peagle.deploy.options import DeployOptions
from peagle.deploy.plan import plan
from peagle.deploy.render import render
from peagle.deploy.spec import Deployment

KINDS = ("vllm", "compose", "kubernetes", "helm", "kserve", "ray", "skypilot")
PAIRS = (
    "gpt-oss-120b",
    "gpt-oss-20b",
    "qwen3-coder-30b",
    "gemma-4-31b",
    "qwen3-8b",
    "smollm2-135m",
)
KEYS = {"method", "model", "num_speculative_tokens", "parallel_drafting"}


def planned(kind: str, pair: str = "gpt-oss-20b", **options: Any) -> Deployment:
    return plan(pair, kind, DeployOptions(**options)).deployment


def rendered(kind: str, pair: str = "gpt-oss-20b", **options: Any) -> dict[str, str]:
    return render(kind, planned(kind, pair, **options))


def documents(files: dict[str, str]) -> dict[str, Any]:
    """The parsed YAML files, by name."""
    return {
        name: yaml.safe_load(text)
        for name, text in files.items()
        if name.endswith((".yaml", ".yml"))
    }


def vllm_arguments(kind: str, files: dict[str, str]) -> list[str]:
    """The arguments of `vllm serve`, as the platform would pass them."""
    parsed = documents(files)
    if kind == "vllm":
        script = files["serve.sh"]
        return split_shell(script[script.index("exec vllm serve") + len("exec vllm serve") :])
    if kind == "compose":
        server = next(iter(parsed["compose.yaml"]["services"].values()))
        assert server["entrypoint"] == ["vllm", "serve"]
        return server["command"]
    if kind in ("kubernetes", "kserve"):
        container = container_spec(kind, parsed)
        assert container["command"] == ["vllm", "serve"]
        return container["args"]
    if kind == "helm":
        model = parsed["values.yaml"]["servingEngineSpec"]["modelSpec"][0]
        sizes = model["vllmConfig"]
        fields = {"tensor-parallel-size": "tensorParallelSize", "max-model-len": "maxModelLen"}
        filled = [f"--{flag}={sizes[field]}" for flag, field in fields.items() if field in sizes]
        return [model["modelURL"], *filled, *sizes["extraArgs"]]
    run = parsed["service.yaml"]["run"]
    return split_shell(run[run.index("vllm serve") + len("vllm serve") :])


def container_spec(kind: str, parsed: dict[str, Any]) -> dict[str, Any]:
    if kind == "kserve":
        return parsed["inferenceservice.yaml"]["spec"]["predictor"]["containers"][0]
    return parsed["deployment.yaml"]["spec"]["template"]["spec"]["containers"][0]


def split_shell(text: str) -> list[str]:
    for variable, value in {
        "\\\n": " ",
        '"$HOST"': "127.0.0.1",
        '"$PORT"': "8000",
        '"$@"': "",
    }.items():
        text = text.replace(variable, value)
    return shlex.split(text)


def speculative_config(kind: str, files: dict[str, str]) -> dict[str, Any]:
    if kind == "ray":
        args = documents(files)["serve.yaml"]["applications"][0]["args"]
        return args["llm_configs"][0]["engine_kwargs"]["speculative_config"]
    flag = "--speculative-config="
    return json.loads(
        next(word for word in vllm_arguments(kind, files) if word.startswith(flag)).removeprefix(
            flag
        )
    )
