"""vLLM as a process: until it answers."""

import subprocess
import time
from pathlib import Path

import httpx

START = 400  # seconds


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """`url`: of its health."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        assert process.poll() is None, f"vLLM ended:\n{log.read_text()[-4000:]}"
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise AssertionError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
