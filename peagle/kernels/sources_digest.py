"""A digest of the Triton kernels' sources and of their compiler, without importing either."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

KERNELS = Path(__file__).with_name("triton")
PACKAGES = ("torch", "triton")  # Each torch has its Triton, which may have another name.


@cache
def marker_prefix() -> str:
    """Of the files that compiled_marker.py writes, if these sources and this compiler did."""
    return f"peagle-{sources_digest()[:16]}-"


def sources_digest() -> str:
    digest = hashlib.sha256()
    for package in PACKAGES:
        digest.update(f"{installed_version(package)} ".encode())
    for file in sorted(KERNELS.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
