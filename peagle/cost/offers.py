"""Offers: what each method costs at each concurrency, what it saves, and how many GPUs a load takes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peagle.cost.terms import Terms
from peagle.report.grid import Grid, per_user
from peagle.results.runs import ResultCell


@dataclass(frozen=True)
class Offer:
    cell: ResultCell
    per_gpu: float  # tokens a second
    per_user: float | None
    tpot_ms: float | None
    per_million: float
    saving: float | None  # against `none` at the same concurrency; below 0: it costs more
    within: bool  # the limit of --tpot-ms
    gpus: int | None  # for the load
    per_hour: float | None  # of so many
    assumed: bool = False  # a what-if, not a measurement

    def as_dict(self) -> dict[str, Any]:
        named = {"method": self.cell.method, "k": self.cell.k, "concurrency": self.cell.concurrency}
        told = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "cell"}
        return (
            named | {"acceptance_length": self.cell.number("spec_decode_acceptance_length")} | told
        )


def offer(cell: ResultCell, base: ResultCell | None, terms: Terms, assumed: bool = False) -> Offer:
    speed = cell.throughput
    assert speed is not None
    pace = per_user(cell)
    tpot = cell.number("mean_tpot_ms") or (1000 / pace if pace else None)
    per_million = terms.per_million(speed)
    saving = (
        1 - per_million / terms.per_million(base.throughput)
        if base is not None and base.throughput
        else None
    )
    within = terms.tpot_ms is None or (tpot is not None and tpot <= terms.tpot_ms)
    replicas = terms.replicas(speed, cell.concurrency)
    gpus = None if replicas is None else replicas * terms.gpus
    per_hour = None if gpus is None else gpus * terms.price
    return Offer(
        cell,
        speed / terms.gpus,
        pace,
        tpot,
        per_million,
        saving if cell is not base else None,
        within,
        gpus,
        per_hour,
        assumed,
    )


def offers(grid: Grid, terms: Terms) -> list[Offer]:
    """Of every measured cell, by concurrency, then method and K."""
    cells = sorted(
        grid.measured, key=lambda cell: cell.concurrency
    )  # methods and K keep their order
    return [offer(cell, grid.none(cell.concurrency), terms) for cell in cells]


def best_k(found: Iterable[Offer]) -> list[Offer]:
    """Of each method and concurrency the cheapest K."""
    kept: dict[tuple[int, str], Offer] = {}
    for one in found:
        key = one.cell.concurrency, one.cell.method
        if key not in kept or one.per_million < kept[key].per_million:
            kept[key] = one
    return list(kept.values())


def cheapest(found: Iterable[Offer]) -> dict[str, Offer]:
    """Of each method the cheapest that keeps the limit; where a load is given, the one that takes the fewest GPUs."""
    kept: dict[str, Offer] = {}
    for one in (one for one in found if one.within and not one.assumed):
        name = one.cell.method
        if name not in kept or rank(one) < rank(kept[name]):
            kept[name] = one
    return kept


def rank(one: Offer) -> tuple[float, float]:
    return one.per_hour or 0.0, one.per_million


def front(found: Iterable[Offer]) -> list[Offer]:
    """Those that no other beats in both price and speed for a user, by falling speed."""
    kept: list[Offer] = []
    for one in sorted(
        (o for o in found if o.per_user), key=lambda o: (-(o.per_user or 0.0), o.per_million)
    ):
        if not kept or one.per_million < kept[-1].per_million:
            kept.append(one)
    return kept
