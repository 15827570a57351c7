"""One run in the sandbox: a timeout, an empty folder, a bounded verdict, and what is left after."""

import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import IO

from peagle.bench.quality.programs import Submission
from peagle.bench.quality.sandbox.child.wire import encode, write_frame
from peagle.bench.quality.sandbox.folder import is_too_full, remove_folder
from peagle.bench.quality.sandbox.sandbox import NOBODY_ID, Sandbox, SandboxError

TIMEOUT_SECONDS = 20.0  # wall clock; child/confine.py limits the CPU time to 10 s
FOLDER_CHECK_SECONDS = 0.1
MAX_VERDICT_BYTES = 1_000
MAX_ERROR_BYTES = 10_000  # of the tool or of Python itself; programs have no standard error


def run_submission(sandbox: Sandbox, submission: Submission, seconds: float) -> str:
    """The judge's verdict, see child/judge.py; "fail" for a run that had to be ended."""
    folder = tempfile.mkdtemp(prefix="peagle-sandbox-")
    try:
        if sandbox.as_nobody:
            os.chown(folder, NOBODY_ID, NOBODY_ID)
        with tempfile.TemporaryFile() as frames, tempfile.TemporaryFile() as errors:
            write_job(frames, sandbox, submission)
            child = start(sandbox, folder, frames, errors)
            try:
                verdict = read_verdict(child, folder, seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                child.stdout.close()  # type: ignore[union-attr]
            if errors.seek(0, os.SEEK_END) and not verdict:
                errors.seek(0)
                raise SandboxError(last_line(errors.read(MAX_ERROR_BYTES)))
    finally:
        remove_folder(folder)
    return verdict or "fail"


def last_line(errors: bytes) -> str:
    return errors.decode(errors="replace").strip().rpartition("\n")[2]


def write_job(frames: IO[bytes], sandbox: Sandbox, submission: Submission) -> None:
    job = {
        "solution": submission.solution,
        "entry_point": submission.entry_point,
        "barriers": list(sandbox.barriers),
        "read_paths": list(sandbox.read_paths),
    }
    tests = {"setup": submission.setup, "test": submission.test}
    write_frame(frames.fileno(), encode(job))
    write_frame(frames.fileno(), encode(tests))
    frames.seek(0)


def start(
    sandbox: Sandbox, folder: str, frames: IO[bytes], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    """As the user nobody if this process is root: the child never has root's rights."""
    nobody = NOBODY_ID if sandbox.as_nobody else None
    try:
        return subprocess.Popen(
            sandbox.command(folder),
            stdin=frames,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=dict(sandbox.environment),
            start_new_session=True,
            user=nobody,
            group=nobody,
            extra_groups=() if sandbox.as_nobody else None,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(str(error)) from error


def read_verdict(child: subprocess.Popen[bytes], folder: str, seconds: float) -> str:
    """Empty if the process ended without one; "fail" for a run that was too long or too large."""
    assert child.stdout is not None
    deadline = time.monotonic() + seconds
    verdict = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([child.stdout], [], [], min(left, FOLDER_CHECK_SECONDS))
        if ready:
            chunk = os.read(child.stdout.fileno(), MAX_VERDICT_BYTES)
            verdict += chunk
            if not chunk or len(verdict) > MAX_VERDICT_BYTES:
                return verdict.decode(errors="replace")[:MAX_VERDICT_BYTES]
        elif is_too_full(folder):
            return "fail"
    return "fail"
