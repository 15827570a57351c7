"""Wait until a process of vLLM answers."""

import subprocess
import time
from pathlib import Path

import httpx

START_SECONDS = 400


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """`url`: the address of its health check."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"vLLM ended:\n{log.read_text()[-4000:]}"
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise AssertionError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
