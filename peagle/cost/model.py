"""Tokens a second, from what a step does:

    tokens/s = b * a / s        b: requests in a step, a: acceptance length, s: seconds of a step

With b as it was on average, this leaves out only what a run spends between its steps: prompts. With b = concurrency it
is the ceiling of a load that never lets a place go empty; a run with few requests ends with a half-empty batch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peagle.errors import UserError
from peagle.interpolation import fit_line
from peagle.report.grid import Grid, per_user
from peagle.report.words import label
from peagle.results.runs import ResultCell, mapping, number, sequence

LENGTH, POSITIONS = "spec_decode_acceptance_length", "spec_decode_per_position_acceptance_rates"


def tokens_per_second(batch: float, acceptance: float, step_ms: float) -> float:
    return 1000 * batch * acceptance / step_ms


def acceptance_of(cell: ResultCell) -> float | None:
    return 1.0 if cell.method == "none" else cell.number(LENGTH)


def batch_of(cell: ResultCell) -> float:
    """Requests in a step, on average; the concurrency where nobody counted."""
    steps = sum(number(count) or 0.0 for count in mapping(cell.raw.get("k_steps")).values())
    tokens, acceptance = cell.number("total_output_tokens"), acceptance_of(cell)
    return (
        tokens / (acceptance * steps)
        if tokens and acceptance and steps
        else float(cell.concurrency)
    )


def modeled(cell: ResultCell) -> float | None:
    """What the model says of a cell that was measured."""
    acceptance, step = acceptance_of(cell), cell.number("step_ms")
    return tokens_per_second(batch_of(cell), acceptance, step) if acceptance and step else None


def what_if(grid: Grid, cell: ResultCell, k: int, acceptance: float | None = None) -> ResultCell:
    """The cell with another K, acceptance length, or both; the batch, and the time between steps, stay as they were."""
    speed, before = cell.throughput, modeled(cell)
    tpot, seen = cell.number("mean_tpot_ms"), per_user(cell)
    if speed is None or before is None:
        raise UserError(
            f"{label(cell)}, {cell.concurrency} at a time: no step was timed there, so nothing follows"
        )
    step = step_ms(grid, cell, k)
    length = acceptance if acceptance is not None else acceptance_at(grid, cell, k)
    after = tokens_per_second(batch_of(cell), length, step)
    between = max(0.0, 1 / speed - 1 / before)  # seconds a token outside of steps
    told = 1 / (1 / after + between)
    raw: dict[str, Any] = {"output_throughput": told, "step_ms": step, LENGTH: length}
    raw |= {"mean_tpot_ms": tpot * before / after} if tpot else {}
    raw |= {"per_user_throughput": seen * told / speed} if seen else {}
    return replace(cell, k=k, raw=raw)


def step_ms(grid: Grid, cell: ResultCell, k: int) -> float:
    """As measured with that K; else on the line through the nearest two."""
    found = [
        grid.at(cell.method, at, cell.concurrency)
        for at in grid.ks(cell.method)
        if isinstance(at, int)
    ]
    known: Mapping[int, float] = {
        int(c.k): step for c in found if c is not None and (step := c.number("step_ms"))
    }
    if k in known:
        return known[k]
    if len(known) < 2:
        raise UserError(
            f"{cell.method} at {cell.concurrency} at a time was timed with one K: use -k {cell.k}"
        )
    return fit_line(known, k)


def acceptance_at(grid: Grid, cell: ResultCell, k: int) -> float:
    """As measured with that K; else 1 + a_1 + ... + a_K with the shares of the next larger K.

    The next, not the largest: long drafts jump over what is easy, so the shares fall a little as K grows.
    """
    found = [
        grid.at(cell.method, at, cell.concurrency)
        for at in grid.ks(cell.method)
        if isinstance(at, int)
    ]
    near = next(
        (one for one in found if one is not None and isinstance(one.k, int) and one.k >= k), None
    )
    if near is not None and near.k == k and (length := near.number(LENGTH)):
        return length
    shares = [number(rate) for rate in sequence(near.raw.get(POSITIONS) if near else None)[:k]]
    if len(shares) < k or None in shares:
        raise UserError(
            f"no run drafted {k} tokens, so what they would yield is not known: give --acceptance too"
        )
    return 1 + sum(share for share in shares if share is not None)
