"""An end-to-end test of `peagle deploy sagemaker` on the local machine.

The drafter of the default pair is exported, and vLLM starts with exactly the environment that the
dry run prints, by the container's documented mapping, with local folders. Requests are those of
SageMaker. The answers must equal the native engine's, and the acceptance length that of `peagle
evaluate`.

Run with `make test-vllm`. Needs humaneval.jsonl (PEAGLE_DATA). About three minutes.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: run `make test-vllm`")

import httpx

from peagle.data.bench import Task, read_sets
from peagle.deploy.options import DeployOptions
from peagle.deploy.plan import plan
from peagle.deploy.sagemaker.plan.artifact import drafter_artifact, target_artifact
from peagle.errors import UserError
from peagle.evaluate.evaluate import EvaluateSettings, SetResult, answer, summarize
from peagle.export.vllm_subset import vllm_subset
from peagle.loaded import LoadedPair, load
from tests.vllm.starting import wait_until_ready

pytestmark = pytest.mark.vllm
PAIR = "smollm2-135m"
K = 7
TASKS = 8
TOKENS = 128
ROLE = "arn:aws:iam::123456789012:role/SageMaker"
FOLDERS = {"/opt/ml/model": "target", "/opt/ml/additional-model-data-sources/eagle": "drafter"}
ON_THIS_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
COUNTERS = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")


def environment() -> dict[str, str]:
    """The container's environment, as the dry run prints it.

    With float32 and eager mode, greedy answers of this CPU can be compared.
    """
    words = ["deploy", "sagemaker", PAIR, "--role", ROLE, "--region", "us-west-2"]
    words += ["-k", str(K), "--context", "2048"]
    ours = ["--env", "SM_VLLM_DTYPE=float32", "--env", "SM_VLLM_ENFORCE_EAGER=true", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "peagle", *words, *ours], capture_output=True, text=True, check=True
    )
    (model,) = [step for step in json.loads(done.stdout) if step.get("operation") == "CreateModel"]
    variables: dict[str, str] = model["parameters"]["PrimaryContainer"]["Environment"]
    return variables


def arguments(variables: dict[str, str]) -> list[str]:
    """The container's mapping of variables to options.

    SM_VLLM_X_Y becomes --x-y. With the value true or an empty value the option has no value, with
    false it is left out, and each element of an array is a separate word.
    """
    words: list[str] = []
    for name, value in variables.items():
        if name.startswith("SM_VLLM_") and value != "false":
            words.append("--" + name.removeprefix("SM_VLLM_").lower().replace("_", "-"))
            if value.startswith("["):
                words += json.loads(value)
            elif value not in ("true", ""):
                words.append(value)
    return words


@contextmanager
def served(variables: dict[str, str], folders: dict[str, Path], log: Path) -> Iterator[str]:
    """Start vLLM as the container does: the model is in /opt/ml/model."""
    words = arguments(variables)
    for place, kind in FOLDERS.items():
        words = [word.replace(place, str(folders[kind])) for word in words]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--model", str(folders["target"]), "--host", "127.0.0.1", "--port", str(port)]
    others = {name: value for name, value in variables.items() if not name.startswith("SM_VLLM_")}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *address, *words],
            env=os.environ | others | ON_THIS_CPU,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
        )
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/ping", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def invoke(url: str, task: Task) -> str:
    body = {
        "messages": [{"role": "user", "content": task.turns[0]}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    response = httpx.post(f"{url}/invocations", json=body, timeout=300).raise_for_status()
    answer: dict[str, Any] = response.json()
    return str(answer["choices"][0]["message"]["content"])


def counters(url: str) -> list[float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in COUNTERS
    ]


def test_the_deployed_model_equals_the_native_engine(tmp_path: Path, figures: list[str]) -> None:
    try:
        tasks = read_sets(["humaneval"], None, TASKS)["humaneval"]
    except UserError as error:
        pytest.skip(str(error))
    planned = plan(PAIR, "sagemaker", DeployOptions(k=K))
    target = target_artifact(planned.pair, fetch=True)
    folders = {
        "target": target.folder,
        "drafter": drafter_artifact(planned, target, fetch=True).folder,
    }
    with served(environment(), folders, tmp_path / "vllm.log") as url:  # type: ignore[arg-type]
        theirs = [invoke(url, task) for task in tasks]
        drafts, accepted = counters(url)
    ours, measured = evaluated(tasks)
    length = 1 + accepted / drafts
    equal = sum(a == b for a, b in zip(theirs, ours, strict=True))
    figures.append(
        f"deploy sagemaker, {PAIR}, K={K}, {TASKS} humaneval prompts, {TOKENS} tokens:"
        f" {equal}/{TASKS} answers equal, acceptance length {length:.4f} in vLLM"
        f" ({drafts:.0f} drafts, {accepted:.0f} accepted), {measured.acceptance_length:.4f} by"
        f" evaluate ({measured.drafts} drafts, {measured.accepted} accepted)"
    )
    assert theirs == ours
    assert accepted > 0
    assert abs(length / measured.acceptance_length - 1) < 0.02


def evaluated(tasks: list[Task]) -> tuple[list[str], SetResult]:
    """The texts of `peagle evaluate --as-vllm`, and its result."""
    whole = load(PAIR, dtype="float32", device="cpu")
    settings = EvaluateSettings((K,), max_tokens=TOKENS)
    loaded = LoadedPair(
        whole.pair, whole.target, {"p-eagle": vllm_subset(whole.drafter("p-eagle"))}
    )
    generations = [
        generation for task in tasks for generation in answer(loaded, task, K, 0.0, 0, settings)
    ]
    steps = (step for generation in generations for step in generation.steps)
    return [generation.text for generation in generations], summarize(steps, K)
