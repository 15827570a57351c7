"""Offer: what a method costs at one concurrency, what it saves, and how many GPUs a load takes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peagle.cost.terms import Terms
from peagle.report.grid import Grid
from peagle.results.cell import BenchCell


@dataclass(frozen=True)
class Offer:
    cell: BenchCell
    per_gpu: float  # tokens per second
    per_user: float | None  # tokens per second
    tpot_ms: float | None
    per_million: float
    saving: float | None  # against `none` at the same concurrency; negative if it costs more
    within: bool  # whether TPOT keeps the limit of the terms
    gpus: int | None  # for the load of the terms
    per_hour: float | None  # of these GPUs
    assumed: bool = False  # a what-if, not a measurement

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.cell.variant,
            "k": self.cell.k,
            "concurrency": self.cell.concurrency,
            "acceptance_length": self.cell.spec_decode_acceptance_length,
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "cell"},
        }


def make_offer(
    cell: BenchCell, none: BenchCell | None, terms: Terms, assumed: bool = False
) -> Offer:
    """`none`: the cell without drafts at the same concurrency."""
    rate = cell.throughput
    assert rate is not None
    per_user = cell.user_throughput
    tpot = cell.mean_tpot_ms or (1000 / per_user if per_user else None)
    per_million = terms.cost_per_million(rate)
    saving = None
    if none is not None and none.throughput and cell is not none:
        saving = 1 - per_million / terms.cost_per_million(none.throughput)
    replicas = terms.replicas(rate, cell.concurrency)
    gpus = None if replicas is None else replicas * terms.gpus
    return Offer(
        cell=cell,
        per_gpu=rate / terms.gpus,
        per_user=per_user,
        tpot_ms=tpot,
        per_million=per_million,
        saving=saving,
        within=terms.tpot_ms is None or (tpot is not None and tpot <= terms.tpot_ms),
        gpus=gpus,
        per_hour=None if gpus is None else gpus * terms.price,
        assumed=assumed,
    )


def measured_offers(grid: Grid, terms: Terms) -> list[Offer]:
    """An offer for every measured cell, by concurrency, then method and K."""
    cells = sorted(grid.measured, key=lambda cell: cell.concurrency)  # stable: methods keep order
    return [make_offer(cell, grid.none(cell.concurrency), terms) for cell in cells]


def best_ks(offers: Iterable[Offer]) -> list[Offer]:
    """The cheapest K of each method at each concurrency."""
    best: dict[tuple[int, str], Offer] = {}
    for offer in offers:
        key = offer.cell.concurrency, offer.cell.variant
        if key not in best or offer.per_million < best[key].per_million:
            best[key] = offer
    return list(best.values())


def cheapest_by_method(offers: Iterable[Offer]) -> dict[str, Offer]:
    """The cheapest offer of each method that keeps the limit.

    With a load or users to serve, the one that takes the fewest GPUs.
    """
    best: dict[str, Offer] = {}
    for offer in offers:
        if not offer.within or offer.assumed:
            continue
        method = offer.cell.variant
        if method not in best or cost_rank(offer) < cost_rank(best[method]):
            best[method] = offer
    return best


def cost_rank(offer: Offer) -> tuple[float, float]:
    return offer.per_hour or 0.0, offer.per_million


def pareto_front(offers: Iterable[Offer]) -> list[Offer]:
    """The offers that no other beats in both cost and speed for a user, by falling speed."""
    front: list[Offer] = []
    candidates = [offer for offer in offers if offer.per_user]
    for offer in sorted(candidates, key=lambda o: (-(o.per_user or 0.0), o.per_million)):
        if not front or offer.per_million < front[-1].per_million:
            front.append(offer)
    return front
