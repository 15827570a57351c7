import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from peagle.cli.application import app, err, out, warn
from peagle.cli.measurement.options import OnlySet
from peagle.cli.options import Json
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.cost.offers import Offer
    from peagle.cost.terms import Terms
    from peagle.report.grid import Grid

Price = Annotated[
    float, typer.Option("--price", help="What an hour of one GPU costs, in any currency.")
]
Results = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="What `peagle bench --out` wrote; or one result file."),
]
Gpus = Annotated[int, typer.Option("--gpus", help="GPUs of the replica that was measured.")]
Busy = Annotated[float, typer.Option("--busy", help="The share of an hour in which it is loaded.")]
MaxTpot = Annotated[
    float | None,
    typer.Option("--tpot-ms", help="No user may wait longer for a token.", show_default=False),
]
Load = Annotated[
    float | None, typer.Option("--load", help="Tokens per second to serve.", show_default=False)
]
Users = Annotated[int | None, typer.Option("--users", help="Users at a time.", show_default=False)]
Acceptance = Annotated[
    float | None,
    typer.Option(
        "--acceptance", help="What if the acceptance length were this?", show_default=False
    ),
]
DraftLength = Annotated[
    int | None, typer.Option("-k", "--k", help="What if K were this?", show_default=False)
]
WhatIfMethod = Annotated[
    str, typer.Option("--method", help="The method that --acceptance or -k is for.")
]
StepMs = Annotated[
    float | None,
    typer.Option("--step-ms", help="By hand: milliseconds of a step.", show_default=False),
]
Speed = Annotated[
    float | None,
    typer.Option("--tokens-per-second", help="By hand: of all users.", show_default=False),
]
Concurrency = Annotated[int, typer.Option("--concurrency", help="By hand: users at a time.")]
EveryK = Annotated[bool, typer.Option("--all", help="Every K, not only the cheapest.")]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw cost against a user's speed: a PNG.", show_default=False),
]


@dataclass(frozen=True)
class CostData:
    """The cells whose cost is asked for, and where they come from."""

    grid: "Grid"
    set: str
    pair: str = ""
    machine: str = ""

    def origin(self) -> dict[str, str]:
        return {"pair": self.pair, "machine": self.machine, "set": self.set}


@app.command()
def cost(
    price: Price,
    results: Results = None,
    gpus: Gpus = 1,
    busy: Busy = 1.0,
    tpot_ms: MaxTpot = None,
    load: Load = None,
    users: Users = None,
    acceptance: Acceptance = None,
    k: DraftLength = None,
    method: WhatIfMethod = "p-eagle",
    step_ms: StepMs = None,
    speed: Speed = None,
    concurrency: Concurrency = 1,
    only: OnlySet = None,
    every: EveryK = False,
    plot: PlotFile = None,
    as_json: Json = False,
) -> None:
    """What a million output tokens cost, method by method, and how many GPUs a load takes.

    Examples: peagle cost results/ --price 4.5 --users 200 --tpot-ms 20
    peagle cost --price 4.5 --acceptance 3.2 --step-ms 14 --concurrency 8
    """
    from peagle.cost.offers import best_ks, measured_offers
    from peagle.cost.terms import Terms

    terms = Terms(price, gpus, busy, tpot_ms, load, users)
    assumed: list[Offer] = []
    if results is None:
        data = data_by_hand(speed, acceptance, step_ms, concurrency)
        offers = measured_offers(data.grid, terms)
    else:
        refuse_numbers_by_hand(speed, step_ms)
        data = read_measured(results, only)
        offers = require_offers(measured_offers(data.grid, terms), results)
        assumed = what_if_offers(data.grid, terms, method, k, acceptance)
    shown = [*(offers if every else best_ks(offers)), *assumed]
    shown.sort(key=lambda offer: offer.cell.concurrency)
    if plot is not None:
        draw_costs(offers, plot, data)
    if as_json:
        print_json(data, terms, shown, offers)
    else:
        out.print(offer_table(shown))
        print_cheapest(offers, terms)


def refuse_numbers_by_hand(speed: float | None, step_ms: float | None) -> None:
    if speed is not None or step_ms is not None:
        raise UserError(
            "--tokens-per-second and --step-ms are numbers by hand: leave them out, or DIR"
        )


def require_offers(offers: "list[Offer]", results: Path) -> "list[Offer]":
    if not offers:
        raise UserError(
            f"nothing was answered in {results}: no cell has a throughput; run `peagle bench` again"
        )
    return offers


def read_measured(folder: Path, only: str | None) -> CostData:
    from peagle.report.grid import OVERALL, grids_by_set, set_names
    from peagle.report.machines import group_by_machine
    from peagle.results.run_folder import read_results

    machines = group_by_machine(read_results(folder, warn))
    if len(machines) > 1:
        labels = "; ".join(machine.label for machine in machines)
        raise UserError(
            f"these results are of several machines ({labels}), but --price is of one:"
            " give one file"
        )
    [machine] = machines
    names = set_names(machine.cells)
    if only is not None and only not in names:
        raise UserError(f"no set {only!r} in these results: use one of {', '.join(names)}")
    grids = grids_by_set(machine.cells, names)
    chosen = only or (OVERALL if OVERALL in grids else names[0])
    return CostData(grids[chosen], chosen, machine.results[0].info.pair_name, machine.label)


def data_by_hand(
    speed: float | None, acceptance: float | None, step_ms: float | None, concurrency: int
) -> CostData:
    from peagle.cost.model import tokens_per_second
    from peagle.report.grid import Grid
    from peagle.results.cell import BenchCell
    from peagle.results.key import CellKey

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
    if speed is None:
        speed = tokens_per_second(concurrency, acceptance or 1.0, step_ms or 0.0)
    cell = BenchCell(
        key=CellKey("by hand", "given", 0, concurrency),
        output_throughput=speed,
        per_user_throughput=speed / concurrency,
        spec_decode_acceptance_length=acceptance,
    )
    return CostData(Grid([cell]), "by hand")


def check_acceptance(acceptance: float | None, k: int | None = None) -> None:
    if acceptance is None:
        return
    if not 1 <= acceptance < float("inf"):
        raise UserError(
            f"--acceptance is {acceptance:g}: a step yields at least one token, so give 1 or more"
        )
    if k is not None and acceptance > k + 1:
        raise UserError(
            f"--acceptance {acceptance:g} is not possible with K={k}:"
            f" a step yields {k + 1} tokens at most"
        )


def what_if_offers(
    grid: "Grid", terms: "Terms", method: str, k: int | None, acceptance: float | None
) -> "list[Offer]":
    """The what-if at every concurrency, from the method's fastest cell there."""
    from peagle.cost.model import what_if
    from peagle.cost.offers import make_offer
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
    offers = []
    for concurrency in fixed.concurrencies:
        cell = fixed.best(concurrency, method)
        if cell is None:
            continue
        chosen_k = k or int(cell.k)
        check_acceptance(acceptance, chosen_k)
        assumed = what_if(fixed, cell, chosen_k, acceptance)
        offers.append(make_offer(assumed, grid.none(concurrency), terms, assumed=True))
    return offers


def offer_table(offers: "Sequence[Offer]") -> Table:
    from peagle.report.words import amount, cell_label, share

    table = Table(
        "c", "method", "tokens/s/GPU", "a user's", "TPOT ms", "per million", "saving", box=None
    )
    for column in table.columns:
        column.justify = "left" if column.header == "method" else "right"
    if offers and offers[0].gpus is not None:
        table.add_column("GPUs", justify="right")
    for offer in offers:
        row = [
            str(offer.cell.concurrency),
            escape(cell_label(offer.cell)) + (" if" if offer.assumed else ""),
            amount(offer.per_gpu),
            amount(offer.per_user),
            amount(offer.tpot_ms),
            money(offer.per_million),
            share(offer.saving) if offer.saving is not None else "",
        ]
        row += [f"{offer.gpus:,}"] if offer.gpus is not None else []
        table.add_row(*row, style="dim" if not offer.within else "bold" if offer.assumed else "")
    return table


def money(value: float) -> str:
    """Three significant digits, also of cents."""
    return f"{value:,.2f}" if value >= 1 else f"{value:#.3g}"


def print_cheapest(offers: "Sequence[Offer]", terms: "Terms") -> None:
    """Print the cheapest way of each method to serve within the limit."""
    from peagle.cost.offers import cheapest_by_method
    from peagle.report.words import method_label

    cheapest = cheapest_by_method(offers)
    limit = "" if terms.tpot_ms is None else f" within {terms.tpot_ms:g} ms a token"
    for method in dict.fromkeys(offer.cell.variant for offer in offers):
        if method in cheapest:
            text = cheapest_text(cheapest[method], offers, limit)
        else:
            text = f"{method_label(method)}: at no measured concurrency{limit}"
        out.print(escape(text), highlight=False, soft_wrap=True)


def cheapest_text(offer: "Offer", offers: "Sequence[Offer]", limit: str) -> str:
    from peagle.report.words import cell_label

    cell = offer.cell
    text = f"{cell_label(cell)}, {cell.concurrency} at a time:"
    text += f" {money(offer.per_million)} per million{limit}"
    if limit:
        max_users = max(
            other.cell.concurrency
            for other in offers
            if other.cell.variant == cell.variant and other.within
        )
        text += f" (kept up to {max_users} at a time)"
    if offer.gpus and offer.per_hour:
        text += f"; {offer.gpus:,} GPUs, {money(offer.per_hour)} an hour"
    return text


def print_json(
    data: CostData, terms: "Terms", shown: "Sequence[Offer]", offers: "Sequence[Offer]"
) -> None:
    from peagle.cost.offers import cheapest_by_method

    cheapest = cheapest_by_method(offers)
    content = data.origin() | {
        "terms": asdict(terms),
        "offers": [offer.to_json() for offer in shown],
        "cheapest": {method: offer.to_json() for method, offer in cheapest.items()},
    }
    print(json.dumps(content))


def draw_costs(offers: "Sequence[Offer]", path: Path, data: CostData) -> None:
    from peagle.cost.figure import cost_figure
    from peagle.paths import write_bytes
    from peagle.report.charts import draw

    _, png = draw(cost_figure(offers), ", ".join(filter(None, data.origin().values())))
    write_bytes(path, png)
    err.print(f"drawn: {escape(str(path))}", highlight=False)
