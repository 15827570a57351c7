import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from filelock import FileLock, Timeout
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, out, warn
from peagle.cli.options import Device, Dtype, Target
from peagle.core import parse_method
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.bench.prepare import Asked
    from peagle.bench.session import Runner, Session
    from peagle.loaded import LoadedPair

SETS = "humaneval,mt_bench,gsm8k"

Sets = Annotated[
    str | None,
    typer.Option(
        "--set",
        help=f"Names (NAME:CATEGORY is a part) or JSONL files, by commas. Default: {SETS}; none with --profile.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="The folder with NAME.jsonl. Default: PEAGLE_DATA, else data in PEAGLE_HOME.",
        show_default=False,
    ),
]
Drafters = Annotated[
    str | None,
    typer.Option(
        "--drafter", help="Drafters' folders instead of the pair's, by commas.", show_default=False
    ),
]


@app.command()
def bench(
    pair: Annotated[
        str | None, typer.Argument(help=f"The pair. Default: {DEFAULT_PAIR}.", show_default=False)
    ] = None,
    sets: Sets = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="none, eagle3, p-eagle. Default: none and all that the pair has.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "-k", "--k", help="How many tokens to draft: 3,5,7,11 or auto.", show_default="3,5,7,11"
        ),
    ] = None,
    tree: Annotated[
        str,
        typer.Option(
            "--tree",
            help="Nodes of P-EAGLE's trees: 32, or 0,16,32 (0: chains). With -k auto: at most so many.",
        ),
    ] = "0",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Users at a time.")
    ] = "1,2,4,8,16,32,64",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="The longest answer.")] = 512,
    to: Annotated[Path, typer.Option("--out", help="The folder for NAME.json.")] = Path(
        "bench-results"
    ),
    name: Annotated[
        str | None,
        typer.Option("--name", help="The run's name. Default: pair and date.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", help="Only the first N tasks of each set.", show_default=False),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Runs of each cell; medians are told.")
    ] = 3,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            help="Answers of given lengths: reasoning, or median=3900,p90=10800,prompt=512,count=64.",
            show_default=False,
        ),
    ] = None,
    score: Annotated[
        bool, typer.Option("--score", help="humaneval's pass@1 and gsm8k's accuracy, too.")
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            help="An OpenAI-compatible server instead of our engine.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="The model's name there. Default: the first.", show_default=False
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help="Its key.",
            envvar="OPENAI_API_KEY",
            show_envvar=True,
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            help="Check answers against `none` of this run in --out.",
            show_default=False,
        ),
    ] = None,
    data: Data = None,
    target: Target = None,
    drafter: Drafters = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option("--seed", help="Of the first task; the next have the numbers after it.")
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer has --max-tokens.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Bit-equal with and without drafts; slower.")
    ] = False,
    warmup: Annotated[
        int, typer.Option("--warmup", help="Tokens that each user asks for before a run.")
    ] = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure throughput, latency and acceptance of every method, K and load. Resumes where it was stopped.

    The table: c users at a time; tokens/s of all and of one user; TTFT and TPOT in ms, medians; AL: acceptance length;
    same: answers equal to those of `none`.

    Example: peagle bench smollm2-135m --set humaneval,mt_bench -k 3,5,7 --concurrency 1,8,64 --out results
    """
    from peagle.bench.settings import BenchSettings, parse_counts, parse_ks, parse_trees

    chosen = (
        tuple(dict.fromkeys(parse_method(word.strip()) for word in methods.split(",")))
        if methods
        else ()
    )
    if endpoint is not None and (len(chosen) > 1 or (k is not None and "," in k)):
        raise UserError(
            "an endpoint runs one method with one K: say which with --methods and -k, one of each, or neither"
        )
    trees = parse_trees(tree)
    if endpoint is not None and any(trees):
        raise UserError("--tree is for our own engine: leave it out with --endpoint")
    if endpoint is not None and exact:
        raise UserError("--exact is for our own engine: leave it out with --endpoint")
    ks = parse_ks(k or "3,5,7,11") if endpoint is None or k is not None else (0,)
    settings = BenchSettings(
        (),
        chosen,
        ks,
        parse_counts(concurrency),
        max_tokens,
        repeats,
        limit,
        temperature,
        seed,
        ignore_eos,
        exact,
        profile,
        warmup,
        trees,
    )
    words = tuple(
        word.strip() for word in (sets or ("" if profile else SETS)).split(",") if word.strip()
    )

    from peagle.bench.prepare import Asked

    asked = Asked(settings, words, data, to, name, command())
    if endpoint is None:
        run(
            *prepare_native(asked, pair or DEFAULT_PAIR, target, drafter, device, dtype),
            score,
            against,
        )
    else:
        run(*prepare_endpoint(asked, endpoint, model, api_key, pair), score, against)


def prepare_native(
    asked: "Asked", pair: str, target: str | None, drafter: str | None, device: str, dtype: str
) -> "tuple[Session, Runner, LoadedPair]":
    from peagle.bench.load.native import NativeRunner
    from peagle.bench.prepare import native_session
    from peagle.engine.gc_tuning import freeze_live_objects
    from peagle.loaded import load_with_drafters
    from peagle.progress import progress_bars

    tasks = asked.tasks(warn)  # what cannot be found is told before anything is loaded
    with progress_bars(err) as progress:
        loaded = load_with_drafters(pair, target, drafter, device, dtype, progress)
    freeze_live_objects()
    session = native_session(asked, tasks, loaded, warn)
    jobs, how = [job for found in session.jobs.values() for job in found], session.settings
    return (
        session,
        NativeRunner(loaded, jobs, max(how.concurrency), how.temperature, how.exact, how.warmup),
        loaded,
    )


def prepare_endpoint(
    asked: "Asked", url: str, model: str | None, key: str | None, pair: str | None
) -> "tuple[Session, Runner, None]":
    from peagle.bench.load.endpoint import EndpointDown, EndpointRunner
    from peagle.bench.prepare import endpoint_session

    tasks = asked.tasks(warn)
    try:
        runner = EndpointRunner(url, model, key, asked.settings.temperature, asked.settings.warmup)
    except EndpointDown as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    return endpoint_session(asked, tasks, runner, url, pair, warn), runner, None


def command() -> str:
    """As it was typed, but for a secret."""
    words = sys.argv[1:]
    told = [
        "***" if before == "--api-key" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    told = ["--api-key=***" if word.startswith("--api-key=") else word for word in told]
    return shlex.join(["peagle", *(re.sub(r"//[^/@\s]+@", "//***@", word) for word in told)])


def run(
    session: "Session",
    runner: "Runner",
    loaded: "LoadedPair | None",
    score: bool,
    against: str | None,
) -> None:
    results, left = session.results, session.left
    base = answers_of(results.path, against) if against is not None else None
    results.path.parent.mkdir(parents=True, exist_ok=True)
    with hold(results.path), bar() as shown:
        results.require_current()
        watch(session, shown)
        try:
            session.measure(runner)
            session.check(margins_of(session, loaded), base)
            if score:
                session.score()
        except KeyboardInterrupt:
            tell(f"stopped; what is measured lies in {results.path}, the same command goes on")
            raise
        finally:
            runner.close()
    if guessed := getattr(runner, "guessed", 0):
        warn(
            f"{guessed} answers told no usage: chunks were counted, too few where one holds several tokens"
        )
    if not left:
        tell(f"{results.path} is complete: give another --name to measure again")
    show(results.content, str(results.path))


def watch(session: "Session", shown: Progress) -> None:
    from peagle.bench.session import Watch

    task = shown.add_task("starting", total=session.requests(session.left))
    session.watch = Watch(
        begins=lambda what: shown.update(task, description=escape(what)),
        seen=lambda: shown.advance(task),
        measured=tell_failures,
    )


def answers_of(path: Path, name: str) -> Any:
    """Of another run in the same folder."""
    from peagle.bench.results import Results, read

    other = path.with_name(f"{name.removesuffix('.json')}.json")
    if not other.exists():
        raise UserError(f"no run {other}: --baseline names a run in --out")
    return Results(other, read(other)).answers()


def margins_of(session: "Session", loaded: "LoadedPair | None") -> Any:
    if loaded is None:
        return None
    from peagle.bench.quality.output_check import target_margin

    known = {name: target_margin(loaded, jobs) for name, jobs in session.jobs.items()}
    return lambda name: known[name]


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """One process a file."""
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


def bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, transient=True)


def tell(text: str) -> None:
    err.print(escape(text), highlight=False, soft_wrap=True)


def show(content: dict[str, Any], path: str) -> None:
    """The table, the scores, where it lies; exit code 1 if nothing was answered."""
    from peagle.bench.session import all_failed

    out.print(table(content))
    tell_scores(content)
    out.print(escape(path), highlight=False, soft_wrap=True)
    if (error := all_failed(content["cells"])) is not None:
        text = f"every request failed, the first with: {error}"
        err.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def tell_failures(cell: dict[str, Any]) -> None:
    if cell["failed"]:
        name = f"{cell['set']} {method_of(cell)} c={cell['concurrency']}"
        warn(
            f"{name}: {cell['failed']} of {cell['requests']} requests failed, the first with: {cell['first_error']}"
        )


def table(content: dict[str, Any]) -> Table:
    names = ("set", "method", "K", "c", "tokens/s", "spread", "user", "TTFT", "TPOT", "AL", "same")
    shown = Table(
        *(Column(name, no_wrap=True) for name in names), box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for cell in content["cells"]:
        low, high = cell["output_throughput_spread"]
        middle = cell["output_throughput"]
        numbers = (cell["per_user_throughput"], cell["median_ttft_ms"], cell["median_tpot_ms"])
        length, check = cell["spec_decode_acceptance_length"], cell["check"]
        shown.add_row(
            escape(cell["set"]),
            method_of(cell),
            str(cell["k"] or ""),
            str(cell["concurrency"]),
            f"{middle:,.1f}",
            f"{(high - low) / middle:.0%}" if middle else "-",
            *(f"{x:,.1f}" if x is not None else "-" for x in numbers),
            f"{length:.2f}" if length is not None else "",
            f"{check['identical']}/{check['compared']}" if check else "",
        )
    return shown


def method_of(cell: dict[str, Any]) -> str:
    """Files written before there were trees do not name them."""
    from peagle.results.runs import with_tree

    return with_tree(str(cell["method"]), cell.get("tree") or 0)


def tell_scores(content: dict[str, Any]) -> None:
    from peagle.results.cell import label

    for one in content["scores"]:
        title = f"{one['set']} {label(one['method'], one['k'], one.get('tree', 0))}"
        out.print(
            escape(f"{title}: {one['metric']} {one['value']:.1%} of {one['of']}"), highlight=False
        )
