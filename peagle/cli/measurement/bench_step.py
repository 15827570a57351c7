import json
import math
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from peagle.cli.application import app, err, out, warn
from peagle.cli.measurement.lists import parse_counts, parse_ks, parse_sequence, parse_trees
from peagle.cli.measurement.options import DataFolder, OutFile
from peagle.cli.options import Device, Dtype, Int8, Json
from peagle.core import parse_method
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError
from peagle.paths import write_json

if TYPE_CHECKING:
    from peagle.bench.step_cost import StepCell
    from peagle.core import Method
    from peagle.loaded import LoadedPair

DEFAULT_PROFILE = ".78,.59,.43,.29,.18,.10,.05"
ANY_METHOD = "any"

Shape = Annotated[
    str | None,
    typer.Argument(
        help="gpt-oss-20b, gpt-oss-120b, qwen3-30b-a3b, qwen3-8b, llama-3.1-8b, llama-3.2-3b,"
        " smollm2-135m, tiny, tiny-qwen3-moe, tiny-gpt-oss, a transformers config.json or its"
        " folder; with --set, a pair.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A transformers config.json or its folder: the shape.", show_default=False
    ),
]
Experts = Annotated[
    str | None,
    typer.Option(
        "--experts",
        help="Format of random experts: bf16 (as the other weights) or mxfp4.",
        show_default="that of the config; gpt-oss-120b: mxfp4",
    ),
]
Methods = Annotated[str, typer.Option("--methods", help="none, eagle3, p-eagle.")]
DraftLengths = Annotated[
    str, typer.Option("-k", "--k", help="Numbers, or auto: adaptive drafting.")
]
TreeSizes = Annotated[
    str | None,
    typer.Option(
        "--tree",
        help="Nodes of P-EAGLE's trees: 31, or 0,15,31 (0: chains). With -k auto: the maximum.",
        show_default="0; with --set as in serving",
    ),
]
Concurrency = Annotated[str, typer.Option("--concurrency", help="Requests at a time.")]
PromptTokens = Annotated[int, typer.Option("--prompt", help="Tokens of a random prompt.")]
OutputTokens = Annotated[int, typer.Option("--output", help="Tokens of an answer.")]
AcceptanceProfiles = Annotated[
    list[str],
    typer.Option(
        "--profile",
        help="The share of a chain's drafts accepted at each position, from which that of trees"
        " follows; of one method: p-eagle=.8,.6,.4.",
    ),
]
Repeats = Annotated[
    int,
    typer.Option("--repeats", help="Runs. tokens/s and ms are of the best one, AL is of all."),
]
Bandwidth = Annotated[float, typer.Option("--bandwidth", help="TB/s of the device's memory.")]
PromptSet = Annotated[
    str | None,
    typer.Option("--set", help="Real prompts of this set, a real pair.", show_default=False),
]
PromptLimit = Annotated[int, typer.Option("--limit", help="Only the first N prompts of the set.")]


@app.command("bench-step")
def bench_step(
    shape: Shape = None,
    config: ConfigFile = None,
    experts: Experts = None,
    methods: Methods = "none,eagle3,p-eagle",
    k: DraftLengths = "auto",
    tree: TreeSizes = None,
    concurrency: Concurrency = "1,8,64",
    prompt: PromptTokens = 128,
    output: OutputTokens = 256,
    profile: AcceptanceProfiles = [DEFAULT_PROFILE],  # noqa: B006
    repeats: Repeats = 3,
    bandwidth: Bandwidth = 4.3,
    set_name: PromptSet = None,
    data: DataFolder = None,
    limit: PromptLimit = 164,
    device: Device = "auto",
    dtype: Dtype = "auto",
    int8: Int8 = False,
    as_json: Json = False,
    out_file: OutFile = None,
) -> None:
    """Measure what a step costs: with random weights and a given acceptance, or with a real pair.

    c: requests at a time; AL: acceptance length; ms: of a step, and of its parts; floor: the share
    of a step that reading every weight once would take, of experts those that a pass touches; all
    of them in layers that run through transformers. Trees accept what a trained drafter with this
    profile would (docs/moe.md).
    """
    check_count("limit", limit)
    shape = chosen_shape(shape, config)
    names = [parse_method(name) for name in methods.split(",")]
    ks = parse_ks(k)
    trees = parse_tree_sizes(tree, names, ks)
    counts = parse_counts(concurrency)
    measurement = StepMeasurement(
        parse_profiles(profile), prompt, output, repeats, bandwidth * 1e12, int8
    )
    pair, prompts = load_pair(shape, set_name, data, limit, device, dtype, experts, names)
    cells = []
    for count, (method, length, nodes) in product(counts, draft_forms(names, ks, trees)):
        form = f"{method}, K={length}" + f", trees of {nodes}" * bool(nodes)
        err.print(f"{shape}, {form}, {count} at a time ...", highlight=False)
        cells.append(measurement.run(pair, method, length, count, prompts, nodes))
        if out_file is not None:  # After each cell, so that an interrupted run loses nothing.
            write_json(out_file, {"cells": [cell.to_json() for cell in cells]})
    show_cells(cells, as_json)


@dataclass(frozen=True)
class StepMeasurement:
    """What every cell of a command has in common."""

    profiles: dict[str, tuple[float, ...]]  # by method, ANY_METHOD for the others
    prompt: int
    output: int
    repeats: int
    bytes_per_second: float
    int8: bool

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "repeats"):
            check_count(name, getattr(self, name))
        check_bandwidth(self.bytes_per_second / 1e12)

    def run(
        self,
        pair: "LoadedPair",
        method: "Method",
        k: int | str,
        concurrency: int,
        prompts: list[list[int]],
        tree: int | None,
    ) -> "StepCell":
        """Real prompts where there are some, else random ones, with chains unless `tree`."""
        from peagle.bench.step_cost import measure_prompts, measure_random

        common = (self.output, self.repeats, self.bytes_per_second, self.int8)
        if prompts:
            return measure_prompts(pair, method, k, concurrency, prompts, *common, tree)
        profile = self.profiles.get(method, self.profiles[ANY_METHOD])
        load = (profile, self.prompt, *common, tree or 0)
        return measure_random(pair, method, k, concurrency, *load)


def chosen_shape(shape: str | None, config: Path | None) -> str:
    if (shape is None) == (config is None):
        raise UserError("give a shape or --config FILE, and not both")
    return str(config) if shape is None else shape


def check_count(name: str, number: int) -> None:
    if number < 1:
        raise UserError(f"`{name}` is {number}: use 1 or more")


def check_bandwidth(bandwidth: float) -> None:
    if not 0 < bandwidth < math.inf:
        raise UserError(f"`bandwidth` is {bandwidth:g} TB/s: use a number above 0, such as 4.3")


def parse_tree_sizes(
    text: str | None, methods: "list[Method]", ks: tuple[int | str, ...]
) -> tuple[int | None, ...]:
    """As in `peagle bench`; None: no size was given."""
    if text is None:
        return (None,)
    trees = parse_trees(text)
    if any(trees) and "p-eagle" not in methods:
        raise UserError("--tree needs a p-eagle drafter: add p-eagle to --methods")
    return tuple(check_tree_nodes(nodes, ks) for nodes in trees)


def draft_forms(
    methods: "list[Method]", ks: tuple[int | str, ...], trees: tuple[int | None, ...]
) -> "list[tuple[Method, int | str, int | None]]":
    """Method, K and nodes of every cell. `none` has one, and only P-EAGLE drafts trees."""
    forms: list[tuple[Method, int | str, int | None]] = []
    for method in methods:
        own_ks = ks if method != "none" else ks[:1]
        own_trees = trees if method == "p-eagle" else (None,)
        forms += [(method, k, nodes) for nodes in own_trees for k in own_ks]
    return forms


def parse_profiles(words: list[str]) -> dict[str, tuple[float, ...]]:
    """By method; without a method, a profile is for all that have none of their own."""
    profiles = {ANY_METHOD: parse_profile(DEFAULT_PROFILE)}
    for word in words:
        method, _, numbers = word.rpartition("=")
        name = parse_method(method) if method else ANY_METHOD
        profiles[name] = parse_profile(numbers)
    return profiles


def parse_profile(numbers: str) -> tuple[float, ...]:
    """Shares from 0 to 1 that do not rise: a draft counts only if those before it are accepted."""
    profile = parse_sequence(numbers, float, ".8,.6,.4")
    falling = all(earlier >= share for earlier, share in pairwise((1.0, *profile, 0.0)))
    if not falling:
        raise UserError(
            f"the shares of `profile` {numbers} must be 0 to 1 and must not rise: write it like"
            " .8,.6,.4"
        )
    return profile


def load_pair(
    shape: str,
    set_name: str | None,
    data: Path | None,
    limit: int,
    device: str,
    dtype: str,
    experts: str | None,
    methods: "list[Method]",
) -> "tuple[LoadedPair, list[list[int]]]":
    """A pair with random weights and no prompts, or with a set a real pair and its prompts."""
    if set_name is None:
        return load_random_pair(shape, device, dtype, experts, methods), []
    if experts is not None:
        raise UserError("--experts is for random weights: leave it out with --set")
    from peagle.data.bench import read_sets
    from peagle.loaded import load

    pair = load(shape, device=device, dtype=dtype)
    tasks = [task for tasks in read_sets([set_name], data, limit).values() for task in tasks]
    return pair, [pair.encode([{"role": "user", "content": task.turns[0]}]) for task in tasks]


def load_random_pair(
    shape: str, device: str, dtype: str, experts: str | None, methods: "list[Method]"
) -> "LoadedPair":
    from peagle.bench.random_models import parse_experts, random_pair
    from peagle.bench.shapes import quantization_method
    from peagle.model_pair import choose_device
    from peagle.target.precision import choose_dtype

    expert_format = parse_experts(experts, shape)
    stored = quantization_method(shape)
    if stored not in (None, "mxfp4"):
        warn(f"random weights do not follow the format of {shape}, {stored}: they are as --dtype")
    chosen = choose_device(device)
    return random_pair(
        shape, chosen, choose_dtype(dtype, chosen), experts=expert_format, methods=methods
    )


def show_cells(cells: list["StepCell"], as_json: bool) -> None:
    if as_json:
        print(json.dumps([cell.to_json() for cell in cells]))
    else:
        out.print(cell_table(cells))
        if any(cell.experts is not None and cell.experts_touched is None for cell in cells):
            warn(
                "the experts that a pass touches are not counted in layers that run through"
                " transformers: the floor counts all experts"
            )


def cell_table(cells: list["StepCell"]) -> Table:
    columns = ["tokens/s", "AL", "ms", "target", "draft", "rest", "floor", "K used"]
    mixture = any(cell.experts is not None for cell in cells)
    trees = any(cell.tree for cell in cells)
    names = ["K", *["tree"] * trees, "c", *columns, *["experts"] * mixture]
    method = Column("method", no_wrap=True)
    table = Table(method, *names, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for cell in cells:
        parts = (cell.target_ms, cell.drafter_ms, cell.rest_ms)
        usual_k = max(cell.k_steps, key=lambda k: cell.k_steps[k])
        table.add_row(
            cell.method,
            cell.k if cell.method != "none" else "-",
            *[str(cell.tree or "-")] * trees,
            str(cell.concurrency),
            f"{cell.tokens_per_second:,.0f}",
            f"{cell.acceptance_length:.2f}",
            f"{cell.step_ms:.2f}",
            *(f"{part:.2f}" if part is not None else "-" for part in parts),
            f"{cell.floor_ms / cell.step_ms:.0%}",
            str(usual_k),
            *[touched_experts(cell)] * mixture,
        )
    return table


def touched_experts(cell: "StepCell") -> str:
    if cell.experts is None:
        return "-"
    touched = cell.experts_touched
    return f"{'-' if touched is None else f'{touched:.1f}'} / {cell.experts}"
