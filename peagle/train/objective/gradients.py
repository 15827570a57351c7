"""The gradients of one pack: depth 0 once, chains in segments, then the backward pass of depth 0.

A segment reads the depth-0 keys and values of the context rows it may see (with a convolution also
the outputs of their layers) as autograd leaves: their gradients add up over the segments and enter
the context's backward pass at the end. The sum over segments is the gradient of the single pass,
and no depth-0 row runs twice.

A frozen drafter runs without gradients: only its refinement, its dependency and its confidence
output are trained. The rows of a refinement (refinement.py) have one state for each of its passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from peagle.train.data.attention_mask import Mask, build_mask
from peagle.train.data.pack import Batch, ChainLevel, Segment
from peagle.train.features.teacher import PackFeatures, Teacher
from peagle.train.objective.confidence_loss import ConfidenceLoss
from peagle.train.objective.length_objective import LengthObjective
from peagle.train.objective.loss import Loss, LossOutput, LossSums
from peagle.train.objective.on_policy import landing_weights
from peagle.train.objective.passes import DrafterPasses, PassCache, rows_before_in_chain
from peagle.train.objective.refinement import ChainRefinement, pass_shares


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
    refinement: ChainRefinement | None


@dataclass(frozen=True, slots=True)
class LevelOutput:
    """The rows of a level after each pass of a refinement; one pass without one."""

    states: list[Tensor]  # [R, d] each
    losses: list[LossOutput]  # of all passes but the last, without weights
    teacher: Teacher  # of the rows without padding


def pack_gradients(
    passes: DrafterPasses,
    batch: Batch,
    features: PackFeatures,
    loss: Loss,
    scale: float,
    flex: bool = False,
) -> LossSums:
    """Add the gradients of scale * (sum of the rows' losses) to the drafter's parameters."""
    states, feedback, cache = _run_context(passes, batch, features, flex)
    feedback_leaf = _leaf(feedback)
    cache_leaves = cache.map(_leaf)
    rows = batch.supervised
    depth = torch.zeros_like(rows)
    outputs = [state.detach()[rows] for state in states]
    teacher = features.teacher[rows + 1]
    lengths = LengthObjective(loss, len(batch.ids), rows.device)
    confidence = ConfidenceLoss(passes)
    lengths.add_rows(outputs[-1], teacher, rows, depth)
    results = [loss(output, teacher, depth, scale) for output in outputs]
    if loss.on_policy:
        lengths.anchor_weights = landing_weights(
            loss.on_policy, rows, results[-1].matches, len(batch.ids)
        )
    refinement = None
    if len(states) > 1:
        refinement = ChainRefinement(passes, batch, loss, results, scale, flex)
    sums = LossSums.zeros(loss.k, features.teacher.device)
    context = PackContext(
        passes, batch, features.teacher, loss, lengths, confidence, scale, flex, refinement
    )
    for segment in batch.segments:
        sums += segment_gradients(context, segment, cache_leaves, feedback_leaf)
    confidence.add_rows(outputs[-1], rows, depth, results[-1])
    confidence.backward(len(batch.ids), loss.k, scale)
    sums += results[-1].sums
    weights = lengths.weights(rows, depth)
    gradients: list[Tensor | None] = [
        torch.zeros_like(state).index_copy_(
            0, rows.long(), result.weighted(share * weights).gradient
        )
        for state, result, share in zip(states, results, pass_shares(passes.drafter), strict=True)
    ]
    gradients += [leaf.grad for leaf in (feedback_leaf, *cache_leaves.tensors)]
    _backward([*states, feedback, *cache.tensors], gradients)
    return sums


def _run_context(
    passes: DrafterPasses, batch: Batch, features: PackFeatures, flex: bool
) -> tuple[list[Tensor], Tensor, PassCache]:
    """Depth 0: its rows [T, d], also refined ones if there is a refinement, feedback and cache."""
    mask = build_mask(batch.context, batch.context, flex, batch.drafter_block_lists)
    with torch.set_grad_enabled(passes.trains_drafter):
        normed, feedback, cache = passes(
            "context", batch.next_ids, features.taps, batch.positions, mask
        )
    if passes.drafter.refinement is None:
        return [normed], feedback, cache
    refined, cache = passes("refine_context", normed, batch.next_ids, cache)
    return [normed, refined], feedback, cache


def _backward(tensors: list[Tensor], gradients: list[Tensor | None]) -> None:
    """The backward pass from the tensors that are trained and have a gradient."""
    roots: list[Tensor] = []
    root_gradients: list[Tensor] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if tensor.requires_grad and gradient is not None:
            roots.append(tensor)
            root_gradients.append(gradient)
    if roots:
        torch.autograd.backward(roots, root_gradients)


def segment_gradients(
    context: PackContext, segment: Segment, cache: PassCache, feedback: Tensor
) -> LossSums:
    """Add the gradients of the chains of a segment.

    All levels run before the first loss: the length objective weighs a row by its whole chain.
    """
    outputs = _run_segment(context, segment, cache, feedback)
    loss = context.loss
    sums = LossSums.zeros(loss.k, context.teacher.device)
    states: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for level, output in zip(segment.levels, outputs, strict=True):
        rows = level.rows[: level.num_unpadded]
        normed = output.states[-1].detach()[: len(rows)]
        weights = context.lengths.weights(rows.anchor, rows.depth)
        result = loss(normed, output.teacher, rows.depth, context.scale * weights)
        context.confidence.add_rows(normed, rows.anchor, rows.depth, result)
        sums += result.sums
        results = [*(earlier.weighted(weights) for earlier in output.losses), result]
        if context.refinement is not None:
            results = context.refinement.weigh(rows, results)
        states += output.states
        gradients += [pad(x.gradient, (0, 0, 0, len(level.rows) - len(rows))) for x in results]
    _backward(states, gradients)
    return sums


def _run_segment(
    context: PackContext, segment: Segment, cache: PassCache, feedback: Tensor
) -> list[LevelOutput]:
    """The rows of each level."""
    passes = context.passes
    keys = context.batch.context[: segment.context_length]
    cache = cache.map(lambda x: x[: segment.context_length])
    outputs = []
    for level in segment.levels:
        keys = keys + level.rows
        mask = build_mask(level.rows, keys, context.flex, level.block_lists)
        with torch.set_grad_enabled(passes.trains_drafter):
            normed, feedback, cache = run_level(passes, level, feedback, cache, mask)
        rows = level.rows[: level.num_unpadded]
        teacher = context.teacher[rows.anchor + rows.depth + 1]
        output = LevelOutput([normed], [], teacher)
        if context.refinement is not None:
            refined = context.refinement.run(level, normed, teacher, keys, cache)
            output = LevelOutput(*refined, teacher)
        if passes.drafter.dependency is not None:
            output.states[-1] = passes("apply_dependency", output.states[-1], level.previous_ids)
        context.lengths.add_rows(
            output.states[-1].detach()[: len(rows)], teacher, rows.anchor, rows.depth
        )
        outputs.append(output)
    return outputs


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
