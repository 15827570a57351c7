import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, out, warn
from peagle.cli.load_pair import load_with_progress
from peagle.cli.measurement.bench_output import progress_bar
from peagle.cli.measurement.lists import parse_lengths, parse_numbers, split_words
from peagle.cli.measurement.options import (
    DEFAULT_SETS,
    DataFolder,
    OutFile,
    SetNames,
    TaskLimit,
)
from peagle.cli.options import (
    Device,
    Drafter,
    DrafterWindow,
    Dtype,
    Exact,
    Int8,
    Json,
    MaxTokens,
    Method,
    Target,
    Tree,
)
from peagle.core import DRAFTER_METHODS, check_k, parse_method
from peagle.draft_shape import check_window
from peagle.errors import UserError
from peagle.paths import write_json

if TYPE_CHECKING:
    from peagle.core import Method as MethodName
    from peagle.data.bench import Task
    from peagle.evaluate.context_curve import ContextCurve
    from peagle.evaluate.evaluate import EvaluateSettings, Evaluation
    from peagle.loaded import LoadedPair

PairName = Annotated[str, typer.Argument(help="The pair.")]
DraftLengths = Annotated[
    str | None,
    typer.Option(
        "-k", "--k", help="One or more K: 3,5,7. Default: the pair's.", show_default=False
    ),
]
Temperatures = Annotated[
    str, typer.Option("--temperature", help="One or more: 0 is greedy, 0,1 is both.")
]
Jump = Annotated[
    bool,
    typer.Option(
        "--jump", help="Without decoding: answers in batches, then a walk along the matches."
    ),
]
AsVllm = Annotated[
    bool,
    typer.Option(
        "--as-vllm", help="The drafter as vLLM runs it, without what vLLM does not support."
    ),
]
Contexts = Annotated[
    str | None,
    typer.Option(
        "--context",
        help="Lengths of a prompt and its answer, 512,1k,2k: texts of the sets are joined into"
        " prompts of these lengths, --limit of each (8).",
        show_default=False,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Maximum number of tokens of a prompt and its answer. Default: the target's.",
        show_default=False,
    ),
]
Card = Annotated[
    Path | None,
    typer.Option(
        "--card",
        help="Folder of a drafter whose card gets the table and the figure of --context.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(help="The seed of the first task; each next task adds 1.")]


@app.command()
def evaluate(
    pair: PairName = DEFAULT_PAIR,
    sets: SetNames = DEFAULT_SETS,
    k: DraftLengths = None,
    tree: Tree = 0,
    limit: TaskLimit = None,
    data: DataFolder = None,
    method: Method = None,
    drafter: Drafter = None,
    temperature: Temperatures = "0",
    max_tokens: MaxTokens = 256,
    target: Target = None,
    drafter_window: DrafterWindow = None,
    context: Contexts = None,
    card: Card = None,
    max_model_len: MaxModelLen = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    exact: Exact = None,
    int8: Int8 = False,
    jump: Jump = False,
    as_vllm: AsVllm = False,
    seed: Seed = 0,
    as_json: Json = False,
    out_file: OutFile = None,
) -> None:
    """Measure the acceptance length of a pair on benchmark sets, by decoding them (--jump: faster).

    Example: peagle evaluate smollm2-135m --set mt_bench,gsm8k -k 3,5,7 --limit 20 --data bench/
    """
    from peagle.data.bench import read_sets
    from peagle.evaluate.evaluate import EvaluateSettings

    ks = () if k is None else tuple(map(check_k, parse_numbers(k, int, "-k 3,5,7")))
    temperatures = parse_numbers(temperature, float, "--temperature 0,1")
    chosen = parse_method(method or "p-eagle")
    settings = EvaluateSettings(ks, temperatures, chosen, max_tokens, seed, exact, int8, tree)
    lengths = () if context is None else parse_lengths(context)
    refuse_contradictions(jump, exact, int8, out_file)
    check_curve_files(card, out_file, bool(lengths))
    tasks = read_sets(split_words(sets), data, None if lengths else limit, warn)
    loaded = load_with_progress(pair, target, drafter, device, dtype, max_model_len, quiet=as_json)
    if method is None:
        chosen = loaded.pair.method  # a drafter's folder brings its own method
    if chosen == "ngram" and (jump or as_vllm):
        raise UserError("method ngram has no drafter: leave out --jump and --as-vllm")
    if drafter_window is not None:
        loaded = with_drafter_window(loaded, chosen, drafter_window)
    if as_vllm:
        loaded = as_vllm_runs_it(loaded, chosen)
    settings = replace(settings, ks=ks or (loaded.pair.k,), method=chosen)
    if lengths:
        curve = run_context_curve(loaded, tasks, lengths, limit, settings, jump)
        show_context_curve(replace(curve, as_vllm=as_vllm), as_json, out_file, card)
    else:
        show_evaluation(run_evaluation(loaded, tasks, settings, jump), as_vllm, as_json, out_file)


def refuse_contradictions(
    jump: bool, exact: bool | None, int8: bool, out_file: Path | None
) -> None:
    if jump and exact is not None:
        raise UserError("--jump decodes nothing, so nothing can be exact: leave out one of the two")
    if jump and int8:
        raise UserError("--jump runs the target as it is: leave out one of --jump and --int8")
    if out_file is not None and out_file.expanduser().is_dir():
        raise UserError(f"{out_file} is a folder: give --out a file")


def check_curve_files(card: Path | None, out_file: Path | None, has_lengths: bool) -> None:
    if has_lengths and out_file is not None and out_file.suffix.lower() == ".png":
        raise UserError(f"the figure would replace {out_file}: give --out a name like curve.json")
    if card is not None and not has_lengths:
        raise UserError("--card shows the curve of --context: give both")
    if card is not None and not (card.expanduser() / "README.md").is_file():
        raise UserError(f"{card} has no README.md: give --card the folder of a drafter")


def as_vllm_runs_it(loaded: "LoadedPair", method: "MethodName") -> "LoadedPair":
    """The pair with its drafter as vLLM runs it."""
    from peagle.export.vllm_subset import subset_notice, vllm_subset
    from peagle.loaded import LoadedPair

    drafter = loaded.drafter(method)
    warn(
        subset_notice(drafter.config)
        or "vLLM runs this drafter as it is: --as-vllm changes nothing"
    )
    return LoadedPair(loaded.pair, loaded.target, {method: vllm_subset(drafter)})


def with_drafter_window(loaded: "LoadedPair", method: "MethodName", window: int) -> "LoadedPair":
    """The pair with another sliding window in its drafter; 0: without one."""
    from peagle.loaded import LoadedPair

    if method not in DRAFTER_METHODS:
        raise UserError(f"method {method} has no drafter: leave out --drafter-window")
    check_window(window or None, "drafter_window")
    drafter = loaded.drafter(method).with_window(window or None)
    return LoadedPair(loaded.pair, loaded.target, {method: drafter})


def run_evaluation(
    loaded: "LoadedPair", tasks: "dict[str, list[Task]]", settings: "EvaluateSettings", jump: bool
) -> "Evaluation":
    """Evaluate with a progress bar on stderr."""
    from peagle.evaluate.evaluate import evaluate as decode_all

    if settings.method in DRAFTER_METHODS:
        loaded.drafter(settings.method)  # an error in loading comes before the bar is drawn
    with progress_bar() as bar:
        total = sum(map(len, tasks.values())) * len(settings.ks) * len(settings.temperatures)
        if jump:
            total = 2 * len(tasks) * len(settings.temperatures)
        task = bar.add_task("decoding", total=total)

        def advance(activity: str) -> None:
            bar.update(task, advance=1, description=escape(activity))

        if jump:
            from peagle.evaluate.offline_acceptance import offline_acceptance

            return offline_acceptance(loaded, tasks, settings, advance)
        return decode_all(loaded, tasks, settings, warn, advance)


def run_context_curve(
    loaded: "LoadedPair",
    sets: "dict[str, list[Task]]",
    lengths: tuple[int, ...],
    limit: int | None,
    settings: "EvaluateSettings",
    jump: bool,
) -> "ContextCurve":
    """Measure prompts of these lengths with a progress bar on stderr."""
    from peagle.evaluate.context_curve import DEFAULT_PROMPTS, build_prompts, measure_contexts

    count = DEFAULT_PROMPTS if limit is None else limit
    prompts = build_prompts(loaded, sets, lengths, count, settings)
    with progress_bar() as bar:
        task = bar.add_task("decoding", total=sum(map(len, prompts.values())))

        def advance(activity: str) -> None:
            bar.update(task, advance=1, description=escape(activity))

        return measure_contexts(loaded, prompts, settings, jump, advance)


def show_context_curve(
    curve: "ContextCurve", as_json: bool, out_file: Path | None, card: Path | None
) -> None:
    """Print the table; write the record with a figure beside it, and the section of the card."""
    from peagle.evaluate.context_card import add_to_card, draw_context_curve, print_context_table

    warn_untrained(curve.trained, curve.settings.method)
    content = curve.as_dict()
    if as_json:
        print(json.dumps(content, ensure_ascii=False))
    else:
        print_context_table(curve, out)
    if out_file is not None:
        record = out_file.expanduser()
        write_json(record, content)
        if not draw_context_curve(curve, record.with_suffix(".png")):
            warn("matplotlib is not installed: no figure was drawn")
    if card is not None:
        add_to_card(curve, card.expanduser())


def warn_untrained(trained: bool, method: "MethodName") -> None:
    if not trained:
        warn(f"the {method} drafter of this pair is untrained: its drafts are noise")


def show_evaluation(
    evaluation: "Evaluation", as_vllm: bool, as_json: bool, out_file: Path | None
) -> None:
    warn_untrained(evaluation.trained, evaluation.settings.method)
    content = evaluation.as_dict() | ({"as_vllm": True} if as_vllm else {})
    if as_json:
        print(json.dumps(content, ensure_ascii=False))
    else:
        print_tables(evaluation, out)
    if out_file is not None:
        write_json(out_file.expanduser(), content)


def print_tables(evaluation: "Evaluation", console: Console) -> None:
    """For each temperature a table of sets and K, then the acceptance by position."""
    settings = evaluation.settings
    trees = f" tree {settings.tree}" if settings.tree else ""
    for temperature in settings.temperatures:
        sampling = f"temperature {temperature:g}" if temperature else "greedy"
        console.print(
            f"acceptance length, {settings.method}{trees}, {sampling}, {evaluation.dtype}:",
            highlight=False,
        )
        console.print(length_table(evaluation, temperature))
        for result in (result for k in settings.ks for result in evaluation.of(k, temperature)):
            rates = " ".join(f"{rate:.2f}" for rate in result.accepted_per_position)
            line = f"{result.set} K={result.k}, accepted by position: {rates}"
            console.print(
                f"{escape(line)} ({result.drafts} drafts, {result.tokens} tokens)",
                highlight=False,
                soft_wrap=True,
            )


def length_table(evaluation: "Evaluation", temperature: float) -> Table:
    """Acceptance lengths: a row for each set and for the mean, a column for each K."""
    ks = evaluation.settings.ks
    table = Table("set", *(f"K={k}" for k in ks))
    rows = {result.set: [""] * len(ks) for result in evaluation.results}
    for column, k in enumerate(ks):
        for result in evaluation.of(k, temperature):
            rows[result.set][column] = f"{result.acceptance_length:.2f}"
    for name, cells in rows.items():
        table.add_row(escape(name), *cells, end_section=name == list(rows)[-1])
    table.add_row("mean", *(f"{evaluation.mean(k, temperature):.2f}" for k in ks))
    return table
