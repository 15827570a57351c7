"""Prepares and runs the session of `peagle bench`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from peagle.cli.application import err, warn
from peagle.cli.measurement.bench_output import (
    follow_session,
    print_line,
    progress_bar,
    show_result,
)
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.bench.load.endpoint import EndpointRunner
    from peagle.bench.load.native import NativeRunner
    from peagle.bench.prepare import BenchCommand
    from peagle.bench.quality.output_check import Margin
    from peagle.bench.session import Session
    from peagle.loaded import LoadedPair
    from peagle.results.answers import Answers


@dataclass(frozen=True)
class PreparedBench:
    session: "Session"
    runner: "NativeRunner | EndpointRunner"
    loaded: "LoadedPair | None" = None  # None for an endpoint


def prepare_native(
    command: "BenchCommand",
    pair: str,
    target: str | None,
    drafter: str | None,
    device: str,
    dtype: str,
) -> PreparedBench:
    from peagle.bench.load.native import NativeRunner
    from peagle.bench.prepare import native_session
    from peagle.engine.gc_tuning import freeze_live_objects
    from peagle.loaded import load_with_drafters
    from peagle.progress import progress_bars

    tasks = command.read_tasks(warn)  # a missing set is reported before anything is loaded
    with progress_bars(err) as progress:
        loaded = load_with_drafters(pair, target, drafter, device, dtype, progress=progress)
    freeze_live_objects()
    session = native_session(command, tasks, loaded, warn)
    settings = session.settings
    runner = NativeRunner(
        loaded,
        [job for jobs in session.jobs.values() for job in jobs],
        max(settings.concurrency),
        settings.temperature,
        settings.exact,
        settings.warmup,
        settings.ngram,
    )
    return PreparedBench(session, runner, loaded)


def prepare_endpoint(
    command: "BenchCommand", url: str, model: str | None, api_key: str | None, pair: str | None
) -> PreparedBench:
    from peagle.bench.load.endpoint import EndpointRunner
    from peagle.bench.prepare import endpoint_session

    tasks = command.read_tasks(warn)
    settings = command.settings
    runner = EndpointRunner(
        url,
        model,
        api_key,
        settings.temperature,
        settings.warmup,
        clients=settings.clients,
    )
    return PreparedBench(endpoint_session(command, tasks, runner, url, pair, warn), runner)


def run_session(prepared: PreparedBench, score: bool, baseline: str | None) -> None:
    session = prepared.session
    writer = session.writer
    complete = not session.pending
    other_answers = read_other_answers(writer.path, baseline) if baseline is not None else None
    writer.path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(writer.path), progress_bar() as bar:
        writer.require_unchanged()
        follow_session(session, bar)
        try:
            if score:
                session.require_scoring()
            session.measure(prepared.runner)
            session.check(margins_by_set(session, prepared.loaded), other_answers)
            if score:
                session.score()
        except KeyboardInterrupt:
            print_line(
                f"stopped; the measured cells are in {writer.path},"
                " and the same command resumes the run"
            )
            raise
        finally:
            prepared.runner.close()
    if uncounted := getattr(prepared.runner, "uncounted_answers", 0):
        warn(
            f"{uncounted} answers came without usage: their chunks were counted,"
            " which is too low where a chunk holds several tokens"
        )
    if complete:
        print_line(f"{writer.path} is complete: give another --name to measure again")
    show_result(writer.result)


def read_other_answers(path: Path, name: str) -> "Answers":
    """The answers of another run in the same folder."""
    from peagle.results.answers import AnswerFile
    from peagle.results.run_file import read_result

    other = path.with_name(f"{name.removesuffix('.json')}.json")
    if not other.exists():
        raise UserError(f"there is no run {other}: --baseline names a run in --out")
    read_result(other)
    return AnswerFile(other).read()


def margins_by_set(session: "Session", loaded: "LoadedPair | None") -> "dict[str, Margin] | None":
    if loaded is None:
        return None
    from peagle.bench.quality.output_check import target_margin

    return {name: target_margin(loaded, jobs) for name, jobs in session.jobs.items()}


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Allow one process for each result file."""
    lock = FileLock(path.with_name(f".{path.stem}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{path} is being written by another peagle bench: wait for it, or use another --name"
        ) from error
    try:
        yield
    finally:
        lock.release()
