"""vLLM's own server as a process, with a pair's target and its exported P-EAGLE drafter."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server.process import POLL_SECONDS, READY_SECONDS, is_healthy, stop

KV_CACHE_BYTES = 20 << 30
CONTEXT = 2048
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class VllmLaunch:
    packages: Path  # vLLM and what its server imports: comes first on PYTHONPATH.
    target: Path
    drafter: Path
    k: int
    max_batch: int

    def command(self, port: int) -> list[str]:
        speculative = {
            "method": "eagle3",
            "model": str(self.drafter),
            "num_speculative_tokens": self.k,
            "parallel_drafting": True,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.target), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "bfloat16"]
        command += ["--max-num-seqs", str(self.max_batch), "--max-model-len", str(CONTEXT)]
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--generation-config", "vllm"]
        command += ["--disable-uvicorn-access-log"]
        return [*command, "--speculative-config", json.dumps(speculative)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving_vllm(launch: VllmLaunch, log: Path) -> Iterator[tuple[str, float]]:
    """Its URL once it is healthy, and the seconds until then."""
    port = free_port()
    path = os.pathsep.join(filter(None, (str(launch.packages), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(launch.command(port), env=variables, stdout=file, stderr=file)
    try:
        while not is_healthy(url):
            if process.poll() is not None or time.perf_counter() - started > READY_SECONDS:
                raise RuntimeError(f"vLLM is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(POLL_SECONDS)
        yield url, time.perf_counter() - started
    finally:
        stop(process)
