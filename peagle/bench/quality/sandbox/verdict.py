"""Whether a submission passes its test in the sandbox of this machine."""

from peagle.bench.quality.programs import Submission
from peagle.bench.quality.sandbox.child.wire import UnsupportedValue
from peagle.bench.quality.sandbox.launch import find_sandbox
from peagle.bench.quality.sandbox.run import TIMEOUT_SECONDS, run_submission
from peagle.bench.quality.sandbox.sandbox import Sandbox, SandboxError


def passes(
    submission: Submission, seconds: float = TIMEOUT_SECONDS, sandbox: Sandbox | None = None
) -> bool:
    """Raises SandboxError rather than to call a run wrong that was not confined, or never ran."""
    try:
        verdict = run_submission(sandbox or find_sandbox(), submission, seconds)
    except UnsupportedValue:  # a program of more than 8 MiB
        return False
    kind, _, reason = verdict.partition(" ")
    if kind == "refused":
        raise SandboxError(f"a program cannot be scored safely: {reason}")
    if kind == "unsupported":
        raise SandboxError(
            f"the function {submission.entry_point} cannot be scored: {reason}; only plain data"
            " (numbers, text, lists, tuples, dicts, sets) is supported: leave this set out"
        )
    return kind == "pass"
