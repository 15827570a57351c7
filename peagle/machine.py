"""The name of this machine's CPU, for records of measurements."""

import platform
from contextlib import suppress
from pathlib import Path


def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
