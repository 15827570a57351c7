"""The gradients of one pack: depth 0 once, chains in segments, then the backward pass of depth 0.

A segment reads the depth-0 keys and values of the context rows it may see (with a convolution also
the outputs of their layers) as autograd leaves: their gradients add up over the segments and enter
the context's backward pass at the end. The sum over segments is the gradient of the single pass,
and no depth-0 row runs twice.

A frozen drafter runs without gradients: only its dependency and confidence heads are trained.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.train.data.attention_mask import Mask, build_mask
from peagle.train.data.pack import Batch, ChainLevel, Segment
from peagle.train.features.teacher import PackFeatures, Teacher
from peagle.train.objective.confidence_loss import ConfidenceLoss
from peagle.train.objective.length_objective import LengthObjective
from peagle.train.objective.loss import Loss, LossSums
from peagle.train.objective.on_policy import landing_weights
from peagle.train.objective.passes import DrafterPasses, PassCache, rows_before_in_chain


@dataclass(frozen=True, slots=True)
class PackContext:
    """What all segments of a pack share."""

    passes: DrafterPasses
    batch: Batch
    teacher: Teacher  # at every token
    loss: Loss
    lengths: LengthObjective
    confidence: ConfidenceLoss
    scale: float
    flex: bool


def pack_gradients(
    passes: DrafterPasses,
    batch: Batch,
    features: PackFeatures,
    loss: Loss,
    scale: float,
    flex: bool = False,
) -> LossSums:
    """Add the gradients of scale * (sum of the rows' losses) to the drafter's parameters."""
    mask = build_mask(batch.context, batch.context, flex, batch.drafter_block_lists)
    with torch.set_grad_enabled(passes.trains_drafter):
        normed, feedback, cache = passes(
            "context", batch.next_ids, features.taps, batch.positions, mask
        )
    feedback_leaf = _leaf(feedback)
    cache_leaves = cache.map(_leaf)
    rows = batch.supervised
    depth = torch.zeros_like(rows)
    outputs = normed.detach()[rows]
    teacher = features.teacher[rows + 1]
    lengths = LengthObjective(loss, len(batch.ids), normed.device)
    confidence = ConfidenceLoss(passes)
    lengths.add_rows(outputs, teacher, rows, depth)
    result = None
    if loss.on_policy:
        result = loss(outputs, teacher, depth, scale)
        lengths.anchor_weights = landing_weights(
            loss.on_policy, rows, result.matches, len(batch.ids)
        )
    sums = LossSums.zeros(loss.k, features.teacher.device)
    context = PackContext(passes, batch, features.teacher, loss, lengths, confidence, scale, flex)
    for segment in batch.segments:
        sums += segment_gradients(context, segment, cache_leaves, feedback_leaf)
    weights = lengths.weights(rows, depth)
    if result is not None:
        result = result.weighted(weights)
    else:
        result = loss(outputs, teacher, depth, scale * weights)
    confidence.add_rows(outputs, rows, depth, result)
    confidence.backward(len(batch.ids), loss.k, scale)
    sums += result.sums
    if passes.trains_drafter:
        gradient = torch.zeros_like(normed).index_copy_(0, rows.long(), result.gradient)
        leaves = [feedback_leaf, *cache_leaves.tensors]
        _context_backward(normed, gradient, [feedback, *cache.tensors], leaves)
    return sums


def _context_backward(
    normed: Tensor, gradient: Tensor, tensors: list[Tensor], leaves: list[Tensor]
) -> None:
    """The backward pass of depth 0; the leaves hold the gradients that the segments added."""
    outputs = [normed]
    gradients = [gradient]
    for tensor, leaf in zip(tensors, leaves, strict=True):
        if leaf.grad is not None:
            outputs.append(tensor)
            gradients.append(leaf.grad)
    torch.autograd.backward(outputs, gradients)


def segment_gradients(
    context: PackContext, segment: Segment, cache: PassCache, feedback: Tensor
) -> LossSums:
    """Add the gradients of the chains of a segment.

    All levels run before the first loss: the length objective weighs a row by its whole chain.
    """
    outputs, teachers = _run_segment(context, segment, cache, feedback)
    loss = context.loss
    sums = LossSums.zeros(loss.k, context.teacher.device)
    gradients = []
    for level, normed, teacher in zip(segment.levels, outputs, teachers, strict=True):
        count = level.num_unpadded
        rows = level.rows[:count]
        gradient = torch.zeros_like(normed)
        weight = context.scale * context.lengths.weights(rows.anchor, rows.depth)
        result = loss(normed.detach()[:count], teacher, rows.depth, weight)
        gradient[:count] = result.gradient
        context.confidence.add_rows(normed.detach()[:count], rows.anchor, rows.depth, result)
        sums += result.sums
        gradients.append(gradient)
    if outputs and outputs[0].requires_grad:
        torch.autograd.backward(outputs, gradients)
    return sums


def _run_segment(
    context: PackContext, segment: Segment, cache: PassCache, feedback: Tensor
) -> tuple[list[Tensor], list[Teacher]]:
    """The normed rows [R, d] of each level and the teachers of its rows without padding."""
    passes = context.passes
    keys = context.batch.context[: segment.context_length]
    cache = cache.map(lambda x: x[: segment.context_length])
    outputs = []
    teachers = []
    for level in segment.levels:
        keys = keys + level.rows
        mask = build_mask(level.rows, keys, context.flex, level.block_lists)
        with torch.set_grad_enabled(passes.trains_drafter):
            normed, feedback, cache = run_level(passes, level, feedback, cache, mask)
        if passes.drafter.dependency is not None:
            normed = passes("apply_dependency", normed, level.previous_ids)
        rows = level.rows[: level.num_unpadded]
        teacher = context.teacher[rows.anchor + rows.depth + 1]
        context.lengths.add_rows(
            normed.detach()[: level.num_unpadded], teacher, rows.anchor, rows.depth
        )
        outputs.append(normed)
        teachers.append(teacher)
    return outputs, teachers


def run_level(
    passes: DrafterPasses,
    level: ChainLevel,
    feedback: Tensor,
    cache: PassCache,
    mask: Mask,
    previous_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, PassCache]:
    """Run the rows of a level: (normed, feedback, keys and values with this level's rows added).

    `previous_ids` replaces those of the level: in evaluation EAGLE-3 is fed its own drafts.
    """
    if passes.drafter.config.method == "p-eagle":
        before = None
        if cache.outputs:
            before = rows_before_in_chain(level.rows, len(cache.outputs[0]))
        return passes("parallel", level.positions, cache, mask, before), feedback, cache
    ids = level.previous_ids if previous_ids is None else previous_ids
    normed, feedback, new = passes(
        "chain", ids, feedback[level.parent], level.positions, cache, mask
    )
    return (
        normed,
        feedback,
        PassCache(*(tuple(map(_join, *part)) for part in zip(cache, new, strict=True))),
    )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _join(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b])
