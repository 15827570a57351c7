"""The gradients of one pack: depth 0 once, chains in segments, then the backward of depth 0.

A segment reads the depth-0 keys and values up to its right edge as leaves: their gradients add up over the segments
and enter the context's backward at the end. The sum over segments is the gradient of the single pass, and no depth-0
row is ever run twice.

A frozen drafter runs without gradients: only what corrects its rows (dependency) or judges them (confidence) learns.
"""

import torch
from torch import Tensor

from peagle.train.data.attention_mask import mask_for
from peagle.train.data.pack import Batch, Level, Segment
from peagle.train.objective.confidence_loss import ConfidenceLoss
from peagle.train.objective.length_objective import LengthObjective
from peagle.train.objective.loss import Loss, Sums
from peagle.train.objective.passes import KeysValues, Passes


def pack_gradients(
    passes: Passes,
    batch: Batch,
    g: Tensor,
    last: Tensor,
    loss: Loss,
    scale: float,
    flex: bool = False,
) -> Sums:
    """Adds the gradients of scale * (sum of the rows' losses) to the drafter's parameters.

    g [T, taps * d] and last [T, d]: the target's taps and its last hidden state at every token.
    """
    mask = mask_for(batch.context, batch.context, flex, batch.blocks)
    with torch.set_grad_enabled(passes.learns):
        normed, feedback, cache = passes("context", batch.next_ids, g, batch.position, mask)
    own, leaves = leaf(feedback), (tuple(map(leaf, cache[0])), tuple(map(leaf, cache[1])))
    rows, first = batch.supervised, torch.zeros_like(batch.supervised)
    out, wanted = normed.detach()[rows], last[rows + 1]
    lengths, judged = LengthObjective(loss, len(batch.ids), normed.device), ConfidenceLoss(passes)
    lengths.see(out, wanted, rows, first)
    sums = Sums.zeros(loss.k, last.device)
    for segment in batch.segments:
        sums += segment_gradients(
            passes, batch, segment, leaves, own, last, loss, lengths, judged, scale, flex
        )
    gradient, part = loss(out, wanted, first, scale * lengths.weights(rows, first))
    judged.see(out, rows, first, loss)
    judged.learn(len(batch.ids), loss.k, scale)
    sums += part
    if not passes.learns:
        return sums
    outputs, gradients = [normed], [torch.zeros_like(normed).index_copy_(0, rows.long(), gradient)]
    for x, grown in zip(
        [feedback, *cache[0], *cache[1]], [own, *leaves[0], *leaves[1]], strict=True
    ):
        if grown.grad is not None:
            outputs.append(x)
            gradients.append(grown.grad)
    torch.autograd.backward(outputs, gradients)
    return sums


def segment_gradients(
    passes: Passes,
    batch: Batch,
    segment: Segment,
    cache: KeysValues,
    feedback: Tensor,
    last: Tensor,
    loss: Loss,
    lengths: LengthObjective,
    judged: ConfidenceLoss,
    scale: float,
    flex: bool,
) -> Sums:
    seen, outputs, wanted, gradients = batch.context[: segment.edge], [], [], []
    cache = until(cache, segment.edge)
    for level in segment.levels:
        seen = seen + level.rows
        mask = mask_for(level.rows, seen, flex, level.blocks)
        with torch.set_grad_enabled(passes.learns):
            normed, feedback, cache = run_level(passes, level, feedback, cache, mask)
        if passes.drafter.dependency is not None:
            normed = passes("correct", normed, level.ids)
        live = level.rows[: level.live]
        wanted.append(last[live.anchor + live.depth + 1])
        lengths.see(normed.detach()[: level.live], wanted[-1], live.anchor, live.depth)
        outputs.append(normed)
    sums = Sums.zeros(loss.k, last.device)
    for level, normed, teacher in zip(segment.levels, outputs, wanted, strict=True):
        live, gradient = level.rows[: level.live], torch.zeros_like(normed)
        weight = scale * lengths.weights(live.anchor, live.depth)
        gradient[: level.live], part = loss(
            normed.detach()[: level.live], teacher, live.depth, weight
        )
        judged.see(normed.detach()[: level.live], live.anchor, live.depth, loss)
        sums += part
        gradients.append(gradient)
    if outputs and outputs[0].requires_grad:
        torch.autograd.backward(outputs, gradients)
    return sums


def run_level(
    passes: Passes,
    level: Level,
    feedback: Tensor,
    cache: KeysValues,
    mask: object,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, KeysValues]:
    """(normed, feedback, keys and values with this level's rows added)"""
    if passes.drafter.config.method == "p-eagle":
        return passes("parallel", level.positions, cache, mask), feedback, cache
    ids = level.ids if ids is None else ids
    normed, feedback, new = passes(
        "chain", ids, feedback[level.parent], level.positions, cache, mask
    )
    keys, values = (tuple(map(joined, part, more)) for part, more in zip(cache, new, strict=True))
    return normed, feedback, (keys, values)


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def until(cache: KeysValues, edge: int) -> KeysValues:
    keys, values = (tuple(x[:edge] for x in part) for part in cache)
    return keys, values


def joined(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b])
