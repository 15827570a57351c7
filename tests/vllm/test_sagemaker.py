"""The whole path of `peagle deploy sagemaker` on this machine: the shipped drafter exported, vLLM started with exactly
the environment the dry run prints (by the container's documented mapping, its folders replaced by ours), asked as
SageMaker asks. Its answers are the native engine's, its acceptance length that of `peagle evaluate`.

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
PAIR, K, TASKS, TOKENS = "smollm2-135m", 7, 8, 128
ROLE = "arn:aws:iam::123456789012:role/SageMaker"
FOLDERS = {"/opt/ml/model": "target", "/opt/ml/additional-model-data-sources/eagle": "drafter"}
ON_THIS_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
COUNTERS = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")


def environment() -> dict[str, str]:
    """What the dry run gives the container. float32 and eager: this CPU's, and greedy answers that can be compared."""
    words = [
        "deploy",
        "sagemaker",
        PAIR,
        "--role",
        ROLE,
        "--region",
        "us-west-2",
        "-k",
        str(K),
        "--context",
        "2048",
    ]
    ours = ["--env", "SM_VLLM_DTYPE=float32", "--env", "SM_VLLM_ENFORCE_EAGER=true", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "peagle", *words, *ours], capture_output=True, text=True, check=True
    )
    (model,) = [step for step in json.loads(done.stdout) if step.get("operation") == "CreateModel"]
    return model["parameters"]["PrimaryContainer"]["Environment"]


def arguments(variables: dict[str, str]) -> list[str]:
    """The container's mapping: SM_VLLM_X_Y -> --x-y; true or empty: bare; false: nothing; an array: word by word."""
    words = []
    for name, value in variables.items():
        if name.startswith("SM_VLLM_") and value != "false":
            words.append("--" + name.removeprefix("SM_VLLM_").lower().replace("_", "-"))
            words += (
                json.loads(value)
                if value.startswith("[")
                else [value]
                if value not in ("true", "")
                else []
            )
    return words


@contextmanager
def served(variables: dict[str, str], folders: dict[str, Path], log: Path) -> Iterator[str]:
    """vLLM as the container starts it: the model is what lies in /opt/ml/model."""
    words = arguments(variables)
    for place, kind in FOLDERS.items():
        words = [word.replace(place, str(folders[kind])) for word in words]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    there = ["--model", str(folders["target"]), "--host", "127.0.0.1", "--port", str(port)]
    others = {name: value for name, value in variables.items() if not name.startswith("SM_VLLM_")}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *there, *words],
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


def asked(url: str, task: Task) -> str:
    body = {
        "messages": [{"role": "user", "content": task.turns[0]}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    told: dict[str, Any] = (
        httpx.post(f"{url}/invocations", json=body, timeout=300).raise_for_status().json()
    )
    return str(told["choices"][0]["message"]["content"])


def counters(url: str) -> list[float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in COUNTERS
    ]


def test_what_is_deployed_answers_as_the_native_engine_does(
    tmp_path: Path, figures: list[str]
) -> None:
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
        theirs = [asked(url, task) for task in tasks]
        drafts, accepted = counters(url)
    ours, measured = evaluated(tasks)
    length = 1 + accepted / drafts
    equal = sum(one == other for one, other in zip(theirs, ours, strict=True))
    figures.append(
        f"deploy sagemaker, {PAIR}, K={K}, {TASKS} humaneval prompts, {TOKENS} tokens: {equal}/{TASKS} answers equal,"
        f" acceptance length {length:.4f} in vLLM ({drafts:.0f} drafts, {accepted:.0f} accepted),"
        f" {measured.acceptance_length:.4f} by evaluate ({measured.drafts} drafts, {measured.accepted} accepted)"
    )
    assert theirs == ours
    assert accepted > 0
    assert abs(length / measured.acceptance_length - 1) < 0.02


def evaluated(tasks: list[Task]) -> tuple[list[str], SetResult]:
    """What `peagle evaluate --as-vllm` decodes and counts, and the texts it throws away."""
    whole, settings = (
        load(PAIR, dtype="float32", device="cpu"),
        EvaluateSettings((K,), max_tokens=TOKENS),
    )
    loaded = LoadedPair(
        whole.pair, whole.target, {"p-eagle": vllm_subset(whole.drafter("p-eagle"))}
    )
    answers = [one for task in tasks for one in answer(loaded, task, K, 0.0, 0, settings)]
    return [one.text for one in answers], summarize(
        (step for one in answers for step in one.steps), K
    )
