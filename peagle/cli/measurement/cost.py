import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from peagle.cli.application import app, err, out, warn
from peagle.cli.options import Json
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.cost.offers import Offer
    from peagle.cost.terms import Terms
    from peagle.report.grid import Grid


@app.command()
def cost(
    price: Annotated[
        float, typer.Option("--price", help="What an hour of one GPU costs, in any currency.")
    ],
    results: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="What `peagle bench --out` wrote; or one result file."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the replica that was measured.")] = 1,
    busy: Annotated[
        float, typer.Option("--busy", help="The share of an hour in which it is loaded.")
    ] = 1.0,
    tpot_ms: Annotated[
        float | None,
        typer.Option("--tpot-ms", help="No user may wait longer for a token.", show_default=False),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option("--load", help="Tokens a second to be served.", show_default=False),
    ] = None,
    users: Annotated[
        int | None, typer.Option("--users", help="Users at a time.", show_default=False)
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            "--acceptance", help="What if the acceptance length were this?", show_default=False
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option("-k", "--k", help="What if K were this?", show_default=False)
    ] = None,
    method: Annotated[
        str, typer.Option("--method", help="Whose acceptance or K that is.")
    ] = "p-eagle",
    step_ms: Annotated[
        float | None,
        typer.Option("--step-ms", help="By hand: milliseconds of a step.", show_default=False),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option("--tokens-per-second", help="By hand: of all users.", show_default=False),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", help="By hand: users at a time.")
    ] = 1,
    only: Annotated[
        str | None,
        typer.Option("--set", help="This set. Default: the mean of all.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every K, not the cheapest.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw cost against a user's speed: a PNG.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """What a million output tokens cost, method by method, and how many GPUs a load takes.

    Examples: peagle cost results/ --price 4.5 --users 200 --tpot-ms 20
    peagle cost --price 4.5 --acceptance 3.2 --step-ms 14 --concurrency 8
    """
    from peagle.cost.offers import best_k, offers
    from peagle.cost.terms import Terms

    terms = Terms(price, gpus, busy, tpot_ms, load, users)
    if results is None:
        about, grid = by_hand(speed, acceptance, step_ms, concurrency)
    elif speed is not None or step_ms is not None:
        raise UserError(
            "--tokens-per-second and --step-ms are for numbers by hand: leave DIR out, or them"
        )
    else:
        about, grid = measured(results, only)
    found = offers(grid, terms)
    if not found:
        raise UserError(
            f"nothing was answered in {results}: no cell has a throughput; run `peagle bench` again"
        )
    assumed = supposed(grid, terms, method, k, acceptance) if results is not None else []
    shown = sorted(
        [*(found if every else best_k(found)), *assumed], key=lambda one: one.cell.concurrency
    )
    if plot is not None:
        draw(found, plot, about)
    if as_json:
        tell_json(about, terms, shown, found)
    else:
        out.print(table(shown))
        tell(found, terms)


def measured(folder: Path, only: str | None) -> "tuple[dict[str, str], Grid]":
    from peagle.report.grid import OVERALL, grids, sets_of
    from peagle.report.machines import machines
    from peagle.results.runs import read_runs

    found = machines(read_runs(folder, warn))
    if len(found) > 1:
        told = "; ".join(one.label for one in found)
        raise UserError(
            f"these results are of several machines ({told}), --price is of one: give one file"
        )
    names = sets_of(found[0].cells)
    if only is not None and only not in names:
        raise UserError(f"no set {only!r} in these results: use one of {', '.join(names)}")
    made = grids(found[0].cells, names)
    chosen = only or (OVERALL if OVERALL in made else names[0])
    return {"pair": found[0].runs[0].pair, "machine": found[0].label, "set": chosen}, made[chosen]


def by_hand(
    speed: float | None, acceptance: float | None, step_ms: float | None, concurrency: int
) -> "tuple[dict[str, str], Grid]":
    from peagle.cost.model import LENGTH, tokens_per_second
    from peagle.report.grid import Grid
    from peagle.results.runs import ResultCell

    if (speed is None) == (step_ms is None):
        raise UserError("give results (DIR), or --tokens-per-second, or --step-ms and --acceptance")
    for option, value in {
        "--tokens-per-second": speed,
        "--step-ms": step_ms,
        "--concurrency": concurrency,
    }.items():
        if value is not None and not value > 0:
            raise UserError(f"{option} is {value:g}: give a number above 0")
    check_acceptance(acceptance)
    told = (
        speed
        if speed is not None
        else tokens_per_second(concurrency, acceptance or 1.0, step_ms or 0.0)
    )
    raw = {"output_throughput": told, "per_user_throughput": told / concurrency, LENGTH: acceptance}
    return {"pair": "", "machine": "", "set": "by hand"}, Grid(
        [ResultCell("by hand", "given", 0, concurrency, raw)]
    )


def check_acceptance(acceptance: float | None, k: int | None = None) -> None:
    if acceptance is not None and not 1 <= acceptance < float("inf"):
        raise UserError(
            f"--acceptance is {acceptance:g}: a step yields one token at least, so it is 1 or more"
        )
    if acceptance is not None and k is not None and acceptance > k + 1:
        raise UserError(
            f"--acceptance {acceptance:g} cannot be had with K={k}: a step yields {k + 1} tokens at most"
        )


def supposed(
    grid: "Grid", terms: "Terms", method: str, k: int | None, acceptance: float | None
) -> "list[Offer]":
    """The what-if at every concurrency, from the method's fastest cell there."""
    from peagle.cost.model import what_if
    from peagle.cost.offers import offer
    from peagle.report.grid import Grid

    if k is None and acceptance is None:
        return []
    if method not in grid.drafting:
        raise UserError(
            f"{method} drafts nothing in these results: use --method {' or '.join(grid.drafting)}"
        )
    if k is not None and k < 1:
        raise UserError(f"-k is {k}: give 1 or more")
    fixed = Grid(cell for cell in grid.cells if cell.k != "auto")
    made = []
    for cell in filter(
        None, (fixed.best(concurrency, method) for concurrency in fixed.concurrencies)
    ):
        chosen = k or int(cell.k)
        check_acceptance(acceptance, chosen)
        made.append(
            offer(
                what_if(fixed, cell, chosen, acceptance),
                grid.none(cell.concurrency),
                terms,
                assumed=True,
            )
        )
    return made


def table(found: "list[Offer]") -> Table:
    from peagle.report.words import amount, label, share

    shown = Table(
        "c", "method", "tokens/s/GPU", "a user's", "TPOT ms", "per million", "saving", box=None
    )
    for column in shown.columns:
        column.justify = "left" if column.header == "method" else "right"
    if found and found[0].gpus is not None:
        shown.add_column("GPUs", justify="right")
    for one in found:
        name = escape(label(one.cell)) + (" if" if one.assumed else "")
        row = [
            str(one.cell.concurrency),
            name,
            amount(one.per_gpu),
            amount(one.per_user),
            amount(one.tpot_ms),
        ]
        row += [money(one.per_million), share(one.saving) if one.saving is not None else ""]
        row += [f"{one.gpus:,}"] if one.gpus is not None else []
        shown.add_row(*row, style="dim" if not one.within else "bold" if one.assumed else "")
    return shown


def money(value: float) -> str:
    """Three digits that matter, also of cents."""
    return f"{value:,.2f}" if value >= 1 else f"{value:#.3g}"


def tell(found: "list[Offer]", terms: "Terms") -> None:
    """Of each method, the cheapest way to serve within the limit."""
    from peagle.cost.offers import cheapest
    from peagle.report.words import label, method_label

    kept = cheapest(found)
    limit = "" if terms.tpot_ms is None else f" within {terms.tpot_ms:g} ms a token"
    for method in dict.fromkeys(one.cell.method for one in found):
        one = kept.get(method)
        if one is None:
            text = f"{method_label(method)}: at no measured concurrency{limit}"
        else:
            most = max(o.cell.concurrency for o in found if o.cell.method == method and o.within)
            text = f"{label(one.cell)}, {one.cell.concurrency} at a time: {money(one.per_million)} per million{limit}"
            text += f" (kept up to {most} at a time)" if limit else ""
            text += (
                f"; {one.gpus:,} GPUs, {money(one.per_hour)} an hour"
                if one.gpus and one.per_hour
                else ""
            )
        out.print(escape(text), highlight=False, soft_wrap=True)


def tell_json(
    about: dict[str, str], terms: "Terms", shown: "list[Offer]", found: "list[Offer]"
) -> None:
    from peagle.cost.offers import cheapest

    best = {method: one.as_dict() for method, one in cheapest(found).items()}
    print(
        json.dumps(
            about
            | {"terms": asdict(terms), "offers": [one.as_dict() for one in shown], "cheapest": best}
        )
    )


def draw(found: "list[Offer]", path: Path, about: dict[str, str]) -> None:
    from peagle.cost.figure import figure
    from peagle.paths import write_bytes
    from peagle.report import charts

    _, png = charts.draw(figure(found), ", ".join(filter(None, about.values())))
    write_bytes(path, png)
    err.print(f"drawn: {escape(str(path))}", highlight=False)
