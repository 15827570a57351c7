"""Run vLLM's worker on a target and an exported drafter, and read its report."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.drafter import Drafter
from peagle.drafter.formats.speculators import VerifierConfig
from peagle.export.export import ExportFormat, export
from peagle.target import Target

WORKER = Path(__file__).parent / "worker.py"
TIMEOUT_SECONDS = 600  # A tiny case takes 12 to 50 s; the first one takes the longest.


@dataclass(frozen=True, slots=True)
class Pass:
    """One target pass of a request."""

    tokens: list[int]  # the accepted drafts and one token of the target
    drafts: list[int]  # the drafts proposed after the pass


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    max_tokens: int
    output: list[int]
    passes: list[Pass]
    chunk_ends: list[int]  # positions where its prompt was cut into chunks


@dataclass(frozen=True, slots=True)
class Report:
    requests: list[Request]
    counters: dict[str, Any] = field(default_factory=dict)  # metrics of vLLM


@dataclass(frozen=True, slots=True)
class Work:
    """A job for vLLM."""

    target: Target
    drafter: Drafter
    k: int
    to: ExportFormat
    prompts: list[list[int]]
    max_tokens: list[int]
    engine: dict[str, Any] = field(default_factory=dict)


def run_vllm(work: Work, folder: Path) -> Report:
    """Export the drafter to `folder`, and serve it with vLLM."""
    verifier = VerifierConfig(work.target.name, work.target.config.architectures)
    export(work.drafter, folder / "drafter", work.to, work.k, verifier)
    job = {
        "engine": engine_arguments(work, folder / "drafter") | work.engine,
        "prompts": work.prompts,
        "max_tokens": work.max_tokens,
    }
    result = call_worker(job, folder)
    requests = [
        Request(
            prompt,
            limit,
            seen["output"],
            [Pass(**fields) for fields in seen["passes"]],
            seen["chunk_ends"],
        )
        for prompt, limit, seen in zip(
            work.prompts, work.max_tokens, result["requests"], strict=True
        )
    ]
    return Report(requests, result["counters"])


def engine_arguments(work: Work, drafter: Path) -> dict[str, Any]:
    """A speculators folder is the only model argument: it specifies target, method and K."""
    if work.to == "speculators":
        return {"model": str(drafter)}
    speculative = {
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": work.k,
        "parallel_drafting": work.drafter.config.method == "p-eagle",
    }
    return {"model": work.target.name, "speculative_config": speculative}


def call_worker(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    job_file = folder / "job.json"
    result_file = folder / "result.json"
    job_file.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(WORKER), str(job_file), str(result_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, f"vLLM failed ({done.returncode}):\n{done.stdout[-6000:]}"
    result: dict[str, Any] = json.loads(result_file.read_text())
    return result
