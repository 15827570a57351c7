import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from peagle.cli.application import app, err, out, warn
from peagle.cli.measurement.cost_options import (
    Acceptance,
    Busy,
    Concurrency,
    DraftLength,
    EveryK,
    Gpus,
    Load,
    MaxTpot,
    PlotFile,
    Price,
    Results,
    Speed,
    StepMs,
    Users,
    WhatIfMethod,
)
from peagle.cli.measurement.cost_output import offer_table, print_cheapest
from peagle.cli.measurement.options import OnlySet
from peagle.cli.options import Json
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.cost.offers import Offer
    from peagle.cost.terms import Terms
    from peagle.report.grid import Grid


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
    only_set: OnlySet = None,
    every_k: EveryK = False,
    plot: PlotFile = None,
    as_json: Json = False,
) -> None:
    """Compute the cost of a million output tokens for each method, and the GPUs a load takes.

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
        data = read_measured(results, only_set)
        offers = require_offers(measured_offers(data.grid, terms), results)
        assumed = what_if_offers(data.grid, terms, method, k, acceptance)
    shown = [*(offers if every_k else best_ks(offers)), *assumed]
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


def read_measured(folder: Path, only_set: str | None) -> CostData:
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
    if only_set is not None and only_set not in names:
        raise UserError(f"no set {only_set!r} in these results: use one of {', '.join(names)}")
    grids = grids_by_set(machine.cells, names)
    chosen = only_set or (OVERALL if OVERALL in grids else names[0])
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
