"""A model of throughput, from what a step does:

    tokens/s = b * a / s        b: requests in a step, a: acceptance length, s: seconds of a step

With the mean of b, this leaves out only the time that a run spends between its steps: prefills.
With b = concurrency it is the upper bound of a load that never leaves a slot empty; a run with few
requests ends with a half-empty batch.
"""

from collections.abc import Mapping
from dataclasses import replace

from peagle.errors import UserError
from peagle.report.grid import Grid
from peagle.report.words import cell_label
from peagle.results.cell import BenchCell


def tokens_per_second(batch: float, acceptance: float, step_ms: float) -> float:
    return 1000 * batch * acceptance / step_ms


def acceptance_length(cell: BenchCell) -> float | None:
    return 1.0 if cell.variant == "none" else cell.spec_decode_acceptance_length


def mean_batch(cell: BenchCell) -> float:
    """The mean number of requests in a step; the concurrency where steps were not counted."""
    steps = float(sum(cell.k_steps.values()))
    tokens = cell.total_output_tokens
    acceptance = acceptance_length(cell)
    if tokens and acceptance and steps:
        return tokens / (acceptance * steps)
    return float(cell.concurrency)


def modeled_throughput(cell: BenchCell) -> float | None:
    """What the model predicts for a cell that was measured."""
    acceptance = acceptance_length(cell)
    if not acceptance or not cell.step_ms:
        return None
    return tokens_per_second(mean_batch(cell), acceptance, cell.step_ms)


def what_if(grid: Grid, cell: BenchCell, k: int, acceptance: float | None = None) -> BenchCell:
    """The cell with another K, acceptance length, or both.

    The batch and the time between steps stay as they are.
    """
    measured = cell.throughput
    modeled = modeled_throughput(cell)
    if measured is None or modeled is None:
        raise UserError(
            f"{cell_label(cell)}, {cell.concurrency} at a time: no step was timed there,"
            " so nothing can be predicted"
        )
    step_ms = predict_step_ms(grid, cell, k)
    length = acceptance if acceptance is not None else predict_acceptance(grid, cell, k)
    modeled_after = tokens_per_second(mean_batch(cell), length, step_ms)
    seconds_between_steps = max(0.0, 1 / measured - 1 / modeled)  # for each token
    predicted = 1 / (1 / modeled_after + seconds_between_steps)
    tpot = cell.mean_tpot_ms
    per_user = cell.user_throughput
    return BenchCell(
        key=replace(cell.key, k=k),
        output_throughput=predicted,
        step_ms=step_ms,
        spec_decode_acceptance_length=length,
        mean_tpot_ms=tpot * modeled / modeled_after if tpot else None,
        per_user_throughput=per_user * predicted / measured if per_user else None,
    )


def cells_by_k(grid: Grid, cell: BenchCell) -> dict[int, BenchCell]:
    """The cells of the same method and concurrency, by their fixed K."""
    cells = {
        k: grid.at(cell.variant, k, cell.concurrency)
        for k in grid.ks(cell.variant)
        if isinstance(k, int)
    }
    return {k: other for k, other in cells.items() if other is not None}


def predict_step_ms(grid: Grid, cell: BenchCell, k: int) -> float:
    """As measured with that K, else on the line through the two nearest K."""
    timed: Mapping[int, float] = {
        other_k: other.step_ms for other_k, other in cells_by_k(grid, cell).items() if other.step_ms
    }
    if k in timed:
        return timed[k]
    if len(timed) < 2:
        raise UserError(
            f"{cell.variant} at {cell.concurrency} at a time was timed with one K only:"
            f" use `k` {cell.k}"
        )
    from peagle.interpolation import fit_line

    return fit_line(timed, k)


def predict_acceptance(grid: Grid, cell: BenchCell, k: int) -> float:
    """As measured with that K, else 1 + a_1 + ... + a_K with the rates of the next larger K.

    Not of the largest: long drafts skip the easy tokens, so the rates fall a little as K grows.
    """
    by_k = cells_by_k(grid, cell)
    next_k = next((other_k for other_k in by_k if other_k >= k), None)
    source = None if next_k is None else by_k[next_k]
    if source is not None and next_k == k and source.spec_decode_acceptance_length:
        return source.spec_decode_acceptance_length
    rates = source.spec_decode_per_position_acceptance_rates if source is not None else None
    if rates is None or len(rates) < k:
        raise UserError(
            f"no run drafted {k} tokens, so their acceptance is not known: give `acceptance` too"
        )
    return 1 + sum(rates[:k])
