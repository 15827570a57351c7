"""FuzzCase: an engine, its requests and their timing; everything that a run depends on."""

import subprocess
import sys
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class FuzzRequest:
    prompt: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)  # Options of Engine.add.
    arrival: int = 0  # The request is added before this step of the engine.
    abort_after: int | None = None  # It is aborted so many steps later; 0: before its first step.
    abort_at_piece: int | None = None  # A listener aborts it at this piece.


@dataclass(frozen=True)
class FuzzCase:
    target: str  # A name in targets.py.
    engine: dict[str, Any]  # Options of EngineConfig.
    requests: tuple[FuzzRequest, ...]
    lookahead: int = 0  # Passes in flight while the next one is planned.
    # With K "auto": choose a random shape for every step, instead of by measured times.
    shape_seed: int | None = None
    # Replace the drafts by random ones with a part of the right answer.
    draft_seed: int | None = None

    @property
    def reproducible(self) -> bool:
        """Whether every run has the same steps; adaptive drafting depends on measured times."""
        return self.engine.get("k") != "auto" or self.shape_seed is not None


def as_test(case: FuzzCase, name: str) -> str:
    """The source of a test that runs the case, with its imports."""
    grammar = "from peagle.grammar import Grammar\n" if "Grammar(" in repr(case) else ""
    return formatted(
        f"{grammar}"
        "from tests.support.fuzzing.case import FuzzCase, FuzzRequest\n"
        "from tests.support.fuzzing.run import run_case\n\n\n"
        f"def test_{name}() -> None:\n"
        f"    run_case({source(case)})\n"
    )


def source(value: Any) -> str:
    """The value as a Python expression, without dataclass fields that have their default."""
    if isinstance(value, tuple):
        return f"({''.join(f'{source(item)}, ' for item in value)})"
    if not isinstance(value, FuzzCase | FuzzRequest):
        return repr(value)
    given = {f.name: getattr(value, f.name) for f in fields(value)}
    changed = [f.name for f in fields(value) if given[f.name] != f.default]
    arguments = ", ".join(f"{name}={source(given[name])}" for name in changed)
    return f"{type(value).__name__}({arguments})"


def formatted(code: str) -> str:
    """The code, formatted by ruff if it is installed."""
    command = [sys.executable, "-m", "ruff", "format", "-"]
    run = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else code
