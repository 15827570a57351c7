"""What `peagle cost` prints: the table of offers, and the cheapest of each method."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from peagle.cli.application import out

if TYPE_CHECKING:
    from peagle.cost.offers import Offer
    from peagle.cost.terms import Terms


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
