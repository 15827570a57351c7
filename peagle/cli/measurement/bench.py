import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from filelock import FileLock, Timeout

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, warn
from peagle.cli.measurement.bench_options import (
    DEFAULT_KS,
    ApiKey,
    BaselineRun,
    DraftLengths,
    EndpointUrl,
    ExactMode,
    IgnoreEos,
    LengthProfile,
    MaxAnswerTokens,
    Methods,
    OutFolder,
    PairName,
    Repeats,
    RunName,
    Seed,
    ServedModel,
    Sets,
    Temperature,
    TreeSizes,
    WarmupTokens,
    WithScores,
)
from peagle.cli.measurement.bench_output import (
    follow_session,
    print_error,
    print_line,
    progress_bar,
    show_result,
)
from peagle.cli.measurement.lists import parse_counts, parse_ks, parse_trees, split_words
from peagle.cli.measurement.options import (
    DEFAULT_SETS,
    DataFolder,
    Drafters,
    TaskLimit,
    UserCounts,
)
from peagle.cli.options import Device, Dtype, Target
from peagle.core import parse_method
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.bench.load.endpoint import EndpointRunner
    from peagle.bench.load.native import NativeRunner
    from peagle.bench.prepare import BenchCommand
    from peagle.bench.quality.output_check import Margin
    from peagle.bench.session import Session
    from peagle.bench.settings import BenchSettings
    from peagle.loaded import LoadedPair
    from peagle.results.answers import Answers


@app.command()
def bench(
    pair: PairName = None,
    sets: Sets = None,
    methods: Methods = None,
    k: DraftLengths = None,
    tree: TreeSizes = "0",
    concurrency: UserCounts = "1,2,4,8,16,32,64",
    max_tokens: MaxAnswerTokens = 512,
    out_folder: OutFolder = Path("bench-results"),
    name: RunName = None,
    limit: TaskLimit = None,
    repeats: Repeats = 3,
    profile: LengthProfile = None,
    score: WithScores = False,
    endpoint: EndpointUrl = None,
    model: ServedModel = None,
    api_key: ApiKey = None,
    baseline: BaselineRun = None,
    data: DataFolder = None,
    target: Target = None,
    drafter: Drafters = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    exact: ExactMode = False,
    warmup: WarmupTokens = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure throughput, latency and acceptance of every method, K and load; resume a stopped run.

    The table: c users at a time; tokens/s of all and of one user; TTFT and TPOT in ms, medians;
    AL: acceptance length; same: answers equal to those of `none`.

    Example: peagle bench smollm2-135m --set humaneval -k 3,5,7 --concurrency 1,8,64 --out results
    """
    settings = parse_cells(methods, k, tree, concurrency, endpoint, exact)
    settings = replace(
        settings, max_tokens=max_tokens, repeats=repeats, limit=limit, profile=profile
    )
    settings = replace(
        settings, temperature=temperature, seed=seed, ignore_eos=ignore_eos, warmup=warmup
    )
    command = bench_command(settings, sets, data, out_folder, name)
    if endpoint is None:
        prepared = prepare_native(command, pair or DEFAULT_PAIR, target, drafter, device, dtype)
    else:
        prepared = prepare_endpoint(command, endpoint, model, api_key, pair)
    run_session(prepared, score, baseline)


def parse_cells(
    methods: str | None,
    k: str | None,
    tree: str,
    concurrency: str,
    endpoint: str | None,
    exact: bool,
) -> "BenchSettings":
    """The settings that decide which cells there are; the sets are looked up later."""
    from peagle.bench.settings import BenchSettings

    names = methods.split(",") if methods else []
    chosen = tuple(dict.fromkeys(parse_method(word.strip()) for word in names))
    trees = parse_trees(tree)
    if endpoint is not None:
        if len(chosen) > 1 or (k is not None and "," in k):
            raise UserError(
                "an endpoint runs one method with one K:"
                " give --methods and -k one of each, or leave both out"
            )
        if any(trees):
            raise UserError("--tree is for peagle's own engine: leave it out with --endpoint")
        if exact:
            raise UserError("--exact is for peagle's own engine: leave it out with --endpoint")
    ks = (0,) if endpoint is not None and k is None else parse_ks(k or DEFAULT_KS)
    return BenchSettings((), chosen, ks, parse_counts(concurrency), exact=exact, tree=trees)


def bench_command(
    settings: "BenchSettings", sets: str | None, data: Path | None, out: Path, name: str | None
) -> "BenchCommand":
    from peagle.bench.prepare import BenchCommand

    default_sets = "" if settings.profile else DEFAULT_SETS
    words = tuple(split_words(sets or default_sets))
    return BenchCommand(settings, words, data, out, name, typed_command())


def typed_command() -> str:
    """The command line without its secrets."""
    words = sys.argv[1:]
    shown = [
        "***" if before == "--api-key" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    shown = ["--api-key=***" if word.startswith("--api-key=") else word for word in shown]
    return shlex.join(["peagle", *(re.sub(r"//[^/@\s]+@", "//***@", word) for word in shown)])


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
    from peagle.progress import shown

    tasks = command.read_tasks(warn)  # a missing set is reported before anything is loaded
    with shown(err) as progress:
        loaded = load_with_drafters(pair, target, drafter, device, dtype, progress)
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
    )
    return PreparedBench(session, runner, loaded)


def prepare_endpoint(
    command: "BenchCommand", url: str, model: str | None, api_key: str | None, pair: str | None
) -> PreparedBench:
    from peagle.bench.load.endpoint import EndpointDown, EndpointRunner
    from peagle.bench.prepare import endpoint_session

    tasks = command.read_tasks(warn)
    settings = command.settings
    try:
        runner = EndpointRunner(url, model, api_key, settings.temperature, settings.warmup)
    except EndpointDown as error:
        print_error(str(error).replace("`endpoint`", "--endpoint"))
        raise typer.Exit(1) from error
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
