import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from filelock import FileLock, Timeout
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from peagle.catalog import DEFAULT_PAIR
from peagle.cli import app, err, out, warn
from peagle.cli.options import Device, Dtype, Target
from peagle.core import parse_method
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.bench.session import Jobs, Runner, Session
    from peagle.bench.settings import Settings
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
        "--data", help="The folder with NAME.jsonl. Default: PEAGLE_DATA, else data in PEAGLE_HOME.", show_default=False
    ),
]
Drafters = Annotated[
    str | None,
    typer.Option("--drafter", help="Drafters' folders instead of the pair's, by commas.", show_default=False),
]


@app.command()
def bench(
    pair: Annotated[str | None, typer.Argument(help=f"The pair. Default: {DEFAULT_PAIR}.", show_default=False)] = None,
    sets: Sets = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="none, eagle3, p-eagle. Default: none and all that the pair has.", show_default=False
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option("-k", "--k", help="How many tokens to draft: 3,5,7,11 or auto.", show_default="3,5,7,11"),
    ] = None,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Users at a time.")] = "1,2,4,8,16,32,64",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="The longest answer.")] = 512,
    to: Annotated[Path, typer.Option("--out", help="The folder for NAME.json.")] = Path("bench-results"),
    name: Annotated[
        str | None, typer.Option("--name", help="The run's name. Default: pair and date.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Only the first N tasks of each set.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each cell; medians are told.")] = 3,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            help="Answers of given lengths: reasoning, or median=3900,p90=10800,prompt=512,count=64.",
            show_default=False,
        ),
    ] = None,
    score: Annotated[bool, typer.Option("--score", help="humaneval's pass@1 and gsm8k's accuracy, too.")] = False,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="An OpenAI-compatible server instead of our engine.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model's name there. Default: the first.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Its key.", envvar="OPENAI_API_KEY", show_envvar=True, show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--baseline", help="Check answers against `none` of this run in --out.", show_default=False),
    ] = None,
    data: Data = None,
    target: Target = None,
    drafter: Drafters = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the first task; the next have the numbers after it.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer has --max-tokens.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Bit-equal with and without drafts; slower.")] = False,
    warmup: Annotated[int, typer.Option("--warmup", help="Tokens that each user asks for before a run.")] = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure throughput, latency and acceptance of every method, K and load. Resumes where it was stopped.

    Example: peagle bench smollm2-135m --set humaneval,mt_bench -k 3,5,7 --concurrency 1,8,64 --out results
    """
    from peagle.bench.settings import parse_counts, parse_ks

    chosen = [parse_method(word.strip()) for word in methods.split(",")] if methods is not None else None
    if endpoint is not None and (len(chosen or []) > 1 or (k is not None and "," in k)):
        raise UserError(
            "an endpoint runs one method with one K: say which with --methods and -k, one of each, or neither"
        )
    how: dict[str, Any] = {
        "k": parse_ks(k or "3,5,7,11"), "concurrency": parse_counts(concurrency), "max_tokens": max_tokens,
        "repeats": repeats, "limit": limit, "temperature": temperature, "seed": seed, "ignore_eos": ignore_eos,
        "exact": exact, "profile": profile, "warmup": warmup,
    }  # fmt: skip
    if endpoint is not None:
        session, runner, loaded = prepare_endpoint(endpoint, model, api_key, pair, chosen, k, how, sets, data, to, name)
    else:
        session, runner, loaded = prepare_native(
            pair or DEFAULT_PAIR, target, drafter, device, dtype, chosen, how, sets, data, to, name
        )
    run(session, runner, loaded, score, against)


def prepare_native(
    pair: str, target: str | None, drafter: str | None, device: str, dtype: str, methods: list[Any] | None,
    how: dict[str, Any], sets: str | None, data: Path | None, to: Path, name: str | None,
) -> tuple["Session", "Runner", "LoadedPair"]:  # fmt: skip
    from peagle.bench.environment import drafter_of, environment, target_of
    from peagle.bench.native import Native
    from peagle.bench.settings import Settings

    Settings(("",), ("none",), **how)  # refused before anything is loaded
    tasks = find_tasks(sets, how, data)
    loaded = load_pair(pair, target, drafter, device, dtype)
    used = list(dict.fromkeys(methods or ["none", *sorted(loaded.pair.drafters)]))
    drafters = {method: drafter_of(loaded, method) for method in used if method != "none"}
    jobs = make_jobs(tasks, how, loaded)
    settings = Settings(tuple(jobs), tuple(used), **how)
    for method, told in drafters.items():
        if not told["trained"]:
            warn(f"the {method} drafter of this pair is untrained: its drafts are noise")
    head = {
        "pair": pair_name(loaded.pair.name),
        "target": target_of(loaded.target),
        "engine": "native",
        "endpoint": None,
        "drafters": drafters,
        "environment": environment(loaded.target.device),
    }
    session = make_session(settings, jobs, head, to, name)
    every = [job for one in jobs.values() for job in one]
    runner = Native(loaded, every, max(settings.concurrency), settings.temperature, settings.exact, settings.warmup)
    return session, runner, loaded


def prepare_endpoint(
    url: str, model: str | None, key: str | None, pair: str | None, methods: list[Any] | None, k: str | None,
    how: dict[str, Any], sets: str | None, data: Path | None, to: Path, name: str | None,
) -> tuple["Session", "Runner", None]:  # fmt: skip
    from peagle.bench.endpoint import Endpoint, EndpointDown
    from peagle.bench.environment import environment
    from peagle.bench.settings import Settings

    if how["exact"]:
        raise UserError("--exact is for our own engine: leave it out with --endpoint")
    method = methods[0] if methods else "endpoint"
    how = how | {"k": how["k"][:1] if k is not None else (0,)}
    Settings(("",), (method,), **how)
    jobs = make_jobs(find_tasks(sets, how, data), how, None)
    try:
        runner = Endpoint(url, model, key, how["temperature"], how["warmup"])
    except EndpointDown as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    settings = Settings(tuple(jobs), (method,), **how)
    head = {
        "pair": pair_name(pair or runner.model or "endpoint"),
        "target": {"name": runner.model or pair, "revision": None, "dtype": None, "sha": None},
        "engine": "endpoint",
        "endpoint": url,
        "drafters": {},
        "environment": environment(),
    }
    return make_session(settings, jobs, head, to, name), runner, None


def find_tasks(sets: str | None, how: dict[str, Any], data: Path | None) -> dict[str, Any]:
    from peagle.bench.profile import parse_profile
    from peagle.data.bench import read_sets

    if how["profile"] is not None:
        parse_profile(how["profile"])
    words = [word.strip() for word in (sets or ("" if how["profile"] else SETS)).split(",") if word.strip()]
    return dict(read_sets(words, data, how["limit"], warn)) if words or not how["profile"] else {}


def make_jobs(tasks: dict[str, Any], how: dict[str, Any], loaded: "LoadedPair | None") -> "Jobs":
    from peagle.bench.load import jobs_of
    from peagle.bench.profile import fit, parse_profile

    jobs = {name: jobs_of(found, how["max_tokens"], how["seed"], how["ignore_eos"]) for name, found in tasks.items()}
    if how["profile"] is not None:
        wanted = parse_profile(how["profile"])
        tokenizer = loaded.target.tokenizer if loaded is not None else None
        size = (lambda text: len(tokenizer(text)["input_ids"])) if tokenizer is not None else None
        made, lengths = wanted.tasks(how["seed"], size), wanted.lengths(how["seed"])
        if loaded is not None:
            longest = max(len(loaded.encode(task.turns[0])) for task in made)
            lengths = fit(lengths, loaded.target.context - longest - 1, warn)
        count = how["limit"] or len(made)
        jobs[wanted.name] = jobs_of(made[:count], how["max_tokens"], how["seed"], lengths=lengths[:count])
    most = max(how["concurrency"])
    for name, found in jobs.items():
        if len(found) < most:
            warn(f"{name} has {len(found)} tasks: at --concurrency {most} no more than {len(found)} run at a time")
    return jobs


def load_pair(pair: str, target: str | None, drafters: str | None, device: str, dtype: str) -> "LoadedPair":
    from dataclasses import replace

    from peagle.core import DrafterSource
    from peagle.drafter import checkpoint
    from peagle.loaded import LoadedPair, load
    from peagle.pull.progress import shown

    with shown(err) as progress:
        loaded = load(pair, target=target, device=device, dtype=dtype, progress=progress)
    if drafters is None:
        return loaded
    sources, models = {}, {}
    for folder in (Path(word.strip()).expanduser() for word in drafters.split(",")):
        found = checkpoint.load(folder, loaded.target, loaded.target.dtype)
        if found.config.method in models:
            raise UserError(f"two {found.config.method} drafters are given: measure them in two runs (--name)")
        models[found.config.method], sources[found.config.method] = found, DrafterSource(folder=folder)
    return LoadedPair(replace(loaded.pair, drafters=sources), loaded.target, models)


def pair_name(pair: str) -> str:
    return Path(pair).name if Path(pair).is_dir() else pair


def make_session(settings: "Settings", jobs: "Jobs", head: dict[str, Any], to: Path, name: str | None) -> "Session":
    from peagle.bench.results import FORMAT, Results, path_of
    from peagle.bench.session import Session, digest

    words = [
        "peagle",
        *("***" if before == "--api-key" else word for before, word in zip(sys.argv, sys.argv[1:], strict=False)),
    ]
    whole = {
        "format": FORMAT,
        "command": shlex.join("--api-key=***" if word.startswith("--api-key=") else word for word in words),
        **head,
        "settings": settings.as_dict(),
        "tasks": {set_name: digest(found) for set_name, found in jobs.items()},
    }
    path = path_of(to, name, head["pair"], whole)
    return Session(settings, jobs, Results(path, whole))


def run(session: "Session", runner: "Runner", loaded: "LoadedPair | None", score: bool, against: str | None) -> None:
    from peagle.bench.results import Results, read
    from peagle.bench.session import Watch, all_failed

    results = session.results
    base = None
    if against is not None:
        other = results.path.with_name(f"{against.removesuffix('.json')}.json")
        if not other.exists():
            raise UserError(f"no run {other}: --baseline names a run in --out")
        base = Results(other, read(other)).answers()
    results.path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(results.path.with_name(f".{results.path.stem}.lock"))
    with hold(lock, results.path), bar() as shown:
        left = session.left
        task = shown.add_task("starting", total=session.requests(left))
        session.watch = Watch(
            begins=lambda what: shown.update(task, description=escape(what)),
            seen=lambda: shown.advance(task),
            measured=lambda cell: tell_failures(cell),
        )
        try:
            session.measure(runner)
            session.check(margins_of(session, loaded), base)
            if score:
                session.score()
        except KeyboardInterrupt:
            text = f"stopped; what is measured lies in {results.path}, the same command goes on"
            err.print(escape(text), highlight=False, soft_wrap=True)
            raise
        finally:
            runner.close()
    if not left:
        text = f"{results.path} is complete: give another --name to measure again"
        err.print(escape(text), highlight=False, soft_wrap=True)
    out.print(table(results.content))
    tell_scores(results.content)
    out.print(f"{escape(str(results.path))}", highlight=False, soft_wrap=True)
    if (error := all_failed(results.cells)) is not None:
        err.print(
            f"[bold red]error:[/] every request failed, the first with: {escape(error)}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


def margins_of(session: "Session", loaded: "LoadedPair | None") -> Any:
    if loaded is None:
        return None
    from peagle.bench.check import target_margin

    known = {name: target_margin(loaded, jobs) for name, jobs in session.jobs.items()}
    return lambda name: known[name]


def hold(lock: FileLock, path: Path) -> Any:
    try:
        return lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{path} is being written by another peagle bench: wait for it, or use another --name"
        ) from error


def bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True)


def tell_failures(cell: dict[str, Any]) -> None:
    if cell["failed"]:
        name = f"{cell['set']} {cell['method']} c={cell['concurrency']}"
        warn(f"{name}: {cell['failed']} of {cell['requests']} requests failed, the first with: {cell['first_error']}")


def table(content: dict[str, Any]) -> Table:
    shown = Table("set", "method", "K", "c", "tokens/s", "spread", "per user", "TTFT ms", "TPOT ms", "AL", "same")
    for column in shown.columns:
        column.no_wrap = True
    for cell in content["cells"]:
        low, high = cell["output_throughput_spread"]
        middle = cell["output_throughput"]
        numbers = (cell["per_user_throughput"], cell["median_ttft_ms"], cell["median_tpot_ms"])
        length, check = cell["spec_decode_acceptance_length"], cell["check"]
        shown.add_row(
            escape(cell["set"]), cell["method"], str(cell["k"] or ""), str(cell["concurrency"]),
            f"{middle:,.1f}", f"{(high - low) / middle:.0%}" if middle else "-",
            *(f"{x:,.1f}" if x is not None else "-" for x in numbers), f"{length:.2f}" if length is not None else "",
            f"{check['identical']}/{check['compared']}" if check else "",
        )  # fmt: skip
    return shown


def tell_scores(content: dict[str, Any]) -> None:
    for one in content["scores"]:
        title = f"{one['set']} {one['method']}" + (f" K={one['k']}" if one["k"] else "")
        out.print(escape(f"{title}: {one['metric']} {one['value']:.1%} of {one['of']}"), highlight=False)
