"""What every test of `peagle deploy` needs: a kind's files, rendered, read by their own parsers, and what they say."""

import json
import shlex
from typing import Any

import yaml

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


def planned(kind: str, pair: str = "gpt-oss-20b", **asked: Any) -> Deployment:
    return plan(pair, kind, **asked).deployment


def rendered(kind: str, pair: str = "gpt-oss-20b", **asked: Any) -> dict[str, str]:
    return render(kind, planned(kind, pair, **asked))


def documents(files: dict[str, str]) -> dict[str, Any]:
    """Every YAML file, read."""
    return {
        name: yaml.safe_load(text)
        for name, text in files.items()
        if name.endswith((".yaml", ".yml"))
    }


def words_of(kind: str, files: dict[str, str]) -> list[str]:
    """The command line behind `vllm serve`, as the kind's runtime would start it."""
    read = documents(files)
    if kind == "vllm":
        script = files["serve.sh"]
        return shell_words(script[script.index("exec vllm serve") + len("exec vllm serve") :])
    if kind == "compose":
        server = next(iter(read["compose.yaml"]["services"].values()))
        assert server["entrypoint"] == ["vllm", "serve"]
        return server["command"]
    if kind in ("kubernetes", "kserve"):
        container = container_of(kind, read)
        assert container["command"] == ["vllm", "serve"]
        return container["args"]
    if kind == "helm":
        model = read["values.yaml"]["servingEngineSpec"]["modelSpec"][0]
        sizes = model["vllmConfig"]
        fields = {"tensor-parallel-size": "tensorParallelSize", "max-model-len": "maxModelLen"}
        filled = [f"--{flag}={sizes[field]}" for flag, field in fields.items() if field in sizes]
        return [model["modelURL"], *filled, *sizes["extraArgs"]]
    run = read["service.yaml"]["run"]
    return shell_words(run[run.index("vllm serve") + len("vllm serve") :])


def container_of(kind: str, read: dict[str, Any]) -> dict[str, Any]:
    if kind == "kserve":
        return read["inferenceservice.yaml"]["spec"]["predictor"]["containers"][0]
    return read["deployment.yaml"]["spec"]["template"]["spec"]["containers"][0]


def shell_words(text: str) -> list[str]:
    for variable, value in {
        "\\\n": " ",
        '"$HOST"': "127.0.0.1",
        '"$PORT"': "8000",
        '"$@"': "",
    }.items():
        text = text.replace(variable, value)
    return shlex.split(text)


def speculative_of(kind: str, files: dict[str, str]) -> dict[str, Any]:
    if kind == "ray":
        args = documents(files)["serve.yaml"]["applications"][0]["args"]
        return args["llm_configs"][0]["engine_kwargs"]["speculative_config"]
    flag = "--speculative-config="
    return json.loads(
        next(word for word in words_of(kind, files) if word.startswith(flag)).removeprefix(flag)
    )
