import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from peagle.cli.application import app, err, out
from peagle.cli.measurement.evaluate import numbers
from peagle.cli.options import Device, Dtype, Int8, Json
from peagle.core import parse_method
from peagle.paths import write_json

if TYPE_CHECKING:
    from peagle.bench.step_cost import StepCell


@app.command("bench-step")
def bench_step(
    shape: Annotated[
        str, typer.Argument(help="smollm2-135m, llama-3.1-8b or tiny; with --set, a pair.")
    ],
    methods: Annotated[
        str, typer.Option("--methods", help="none, eagle3, p-eagle.")
    ] = "none,eagle3,p-eagle",
    k: Annotated[
        str, typer.Option("-k", "--k", help="A number, or auto: what is fastest now.")
    ] = "auto",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at a time.")
    ] = "1,8,64",
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of a random prompt.")] = 128,
    output: Annotated[int, typer.Option("--output", help="Tokens of an answer.")] = 256,
    profile: Annotated[
        str, typer.Option("--profile", help="The share of drafts accepted at each position.")
    ] = ".78,.59,.43,.29,.18,.10,.05",
    repeats: Annotated[int, typer.Option("--repeats", help="The best of so many runs counts.")] = 3,
    bandwidth: Annotated[
        float, typer.Option("--bandwidth", help="TB/s of the device's memory.")
    ] = 4.3,
    set_: Annotated[
        str | None,
        typer.Option("--set", help="Real prompts of this set, a real pair.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder with NAME.jsonl.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="So many prompts of the set.")] = 164,
    device: Device = "auto",
    dtype: Dtype = "auto",
    int8: Int8 = False,
    as_json: Json = False,
    to: Annotated[
        Path | None, typer.Option("--out", help="Write the JSON here as well.", show_default=False)
    ] = None,
) -> None:
    """What a step costs: a shape with random weights and a given acceptance, or a real pair on real prompts.

    c: requests at a time; AL: acceptance length; ms: of a step, and of its parts; floor: the share of a step that
    reading every weight once would take.
    """
    from peagle.bench.step_cost import measure, measure_prompts, shape_pair
    from peagle.loaded import load
    from peagle.model_pair import choose_device
    from peagle.target.precision import choose_dtype

    names = [parse_method(name) for name in methods.split(",")]
    counts, shares = numbers(concurrency, int, "1,8,64"), numbers(profile, float, ".8,.6,.4")
    ks: int | str = "auto" if k == "auto" else numbers(k, int, "7")[0]
    prompts: list[list[int]] = []
    if set_ is None:
        where = choose_device(device)
        pair = shape_pair(shape, where, choose_dtype(dtype, where))
    else:
        from peagle.data.bench import read_sets

        pair = load(shape, device=device, dtype=dtype)
        tasks = [task for found in read_sets([set_], data, limit).values() for task in found]
        prompts = [pair.encode([{"role": "user", "content": task.turns[0]}]) for task in tasks]
    cells = []
    for count in counts:
        for method in names:
            err.print(f"{shape}, {method}, {count} at a time ...", highlight=False)
            if prompts:
                cells.append(
                    measure_prompts(
                        pair, method, ks, count, prompts, output, repeats, bandwidth * 1e12, int8
                    )
                )
            else:
                cells.append(
                    measure(
                        pair,
                        method,
                        ks,
                        count,
                        shares,
                        prompt,
                        output,
                        repeats,
                        bandwidth * 1e12,
                        int8,
                    )
                )
    told = [cell.as_dict() for cell in cells]
    if to is not None:
        write_json(to, {"cells": told})
    if as_json:
        print(json.dumps(told))
    else:
        out.print(table(cells))


def table(cells: list["StepCell"]) -> Table:
    shown = Table(
        "method", "c", "tokens/s", "AL", "ms", "target", "drafter", "rest", "floor", "K mostly"
    )
    for cell in cells:
        parts = [
            f"{x:.2f}" if x is not None else "-"
            for x in (cell.target_ms, cell.drafter_ms, cell.rest_ms)
        ]
        most = max(cell.k_steps, key=lambda n: cell.k_steps[n])
        shown.add_row(
            cell.method,
            str(cell.concurrency),
            f"{cell.tokens_per_second:,.0f}",
            f"{cell.acceptance_length:.2f}",
            f"{cell.step_ms:.2f}",
            *parts,
            f"{cell.floor_ms / cell.step_ms:.0%}",
            str(most),
        )
    return shown
