"""The online softmax over one block of keys, for batch-invariant attention (paged_attention.py)."""

from typing import Any, NamedTuple

from peagle.kernels.triton.attention.attention_plan import UNSEEN_SCORE

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

WEIGHT_UNIT = float(1 << 24)  # of the fixed-point sum of up to 64 weights, none above 1


class HeadKeys(NamedTuple):
    """The keys and values of one head, and the pages of one request; in a kernel."""

    keys_ptr: Any
    values_ptr: Any
    stride_k_slot: Any
    stride_v_slot: Any
    table_ptr: Any
    end: Any  # No row sees positions from here on.


class QueryRows(NamedTuple):
    """The row of each query; in a kernel."""

    place: Any  # in its block
    position: Any
    window: Any


class KeySizes(NamedTuple):
    """Constants of the kernel."""

    D: Any
    PAGE_SIZE: Any
    BLOCK_KEYS: Any
    BLOCK_D: Any
    ONE_PAGE: Any  # A block of keys lies in one page.


if triton is not None:
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)
    _WEIGHT_UNIT = tl.constexpr(WEIGHT_UNIT)

    @triton.jit
    def merge_split(  # type: ignore[no-untyped-def]
        acc, max_score, total, split_acc, split_max, split_total
    ):
        """Add a split to those before it."""
        new_max = tl.maximum(max_score, split_max)
        rescale = tl.exp2(max_score - new_max)
        weight = tl.exp2(split_max - new_max)
        total = total * rescale + split_total * weight
        acc = acc * rescale[:, None] + split_acc * weight[:, None]
        return acc, new_max, total

    @triton.jit
    def load_splits(  # type: ignore[no-untyped-def]
        part_ptr,
        max_ptr,
        sum_ptr,
        part,
        used_splits,
        row_mask,
        query_mask,
        acc,
        max_score,
        total,
        D: tl.constexpr,
        SPLITS: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        """Add the stored splits in their order. The loop is unrolled: loads wait for no sum.

        A split that is not used changes no bit: the others are scaled by exactly 1.
        """
        dims = tl.arange(0, BLOCK_D)
        for i in tl.static_range(SPLITS):
            used = row_mask & (i < used_splits)
            split_max = tl.load(
                max_ptr + part + i, mask=used, other=_UNSEEN_SCORE, cache_modifier=".cg"
            )
            split_sum = tl.load(sum_ptr + part + i, mask=used, other=0.0, cache_modifier=".cg")
            split_acc = tl.load(
                part_ptr + (part + i)[:, None] * D + dims[None, :],
                mask=query_mask & (i < used_splits),
                other=0.0,
                cache_modifier=".cg",
            )
            acc, max_score, total = merge_split(
                acc, max_score, total, split_acc, split_max, split_sum
            )
        return acc, max_score, total

    @triton.jit
    def _fixed_sum(weights):  # type: ignore[no-untyped-def]
        """The sum of weights in fixed point: integers have the same sum in any order."""
        return tl.sum((weights.to(tl.float32) * _WEIGHT_UNIT).to(tl.int32), 1)

    @triton.jit
    def load_slots(keys, start, sizes):  # type: ignore[no-untyped-def]
        """[keys]: where the keys from `start` on are stored."""
        key = tl.arange(0, sizes.BLOCK_KEYS)
        if sizes.ONE_PAGE:
            page_ptr = keys.table_ptr + start // sizes.PAGE_SIZE
            page = tl.load(page_ptr, mask=start < keys.end, other=0)
            slot = page.to(tl.int64) * sizes.PAGE_SIZE + start % sizes.PAGE_SIZE + key
        else:
            position = start + key
            in_range = position < keys.end
            page = tl.load(keys.table_ptr + position // sizes.PAGE_SIZE, mask=in_range, other=0)
            slot = page.to(tl.int64) * sizes.PAGE_SIZE + position % sizes.PAGE_SIZE
        return slot

    @triton.jit
    def _load_keys(head_ptr, stride_slot, slot, in_range, sizes):  # type: ignore[no-untyped-def]
        """[keys, d]: keys or values of one head."""
        dims = tl.arange(0, sizes.BLOCK_D)
        return tl.load(
            head_ptr + slot[:, None] * stride_slot + dims[None, :],
            mask=in_range[:, None] & (dims < sizes.D)[None, :],
            other=0.0,
        )

    @triton.jit
    def _visible_scores(q, k, scale, visible):  # type: ignore[no-untyped-def]
        """[queries, keys], as powers of 2."""
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        return tl.where(visible, scores, _UNSEEN_SCORE)

    @triton.jit
    def attend_block(  # type: ignore[no-untyped-def]
        q, keys, start, slot, rows, scale, acc, max_score, total, sizes, EARLY_VALUES: tl.constexpr
    ):
        """The online softmax over the keys from `start` on, which are stored in `slot`.

        EARLY_VALUES: load values with the keys, not behind the scores. Loops load both ahead.
        """
        key_position = start + tl.arange(0, sizes.BLOCK_KEYS)
        in_range = key_position < keys.end
        k = _load_keys(keys.keys_ptr, keys.stride_k_slot, slot, in_range, sizes)
        if EARLY_VALUES:
            v = _load_keys(keys.values_ptr, keys.stride_v_slot, slot, in_range, sizes)
            # Changes nothing, but Triton would wait for the keys before it loads the values.
            k = tl.where(in_range[:, None], k, 0.0)
        visible = key_position[None, :] > rows.position[:, None] - rows.window
        visible = visible & (key_position[None, :] <= rows.position[:, None]) & in_range[None, :]
        scores = _visible_scores(q, k, scale, visible)
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(max_score - new_max)
        if not EARLY_VALUES:
            v = _load_keys(keys.values_ptr, keys.stride_v_slot, slot, in_range, sizes)
        weights = weights.to(v.dtype)
        acc = tl.dot(weights, v, acc * rescale[:, None], input_precision="ieee")
        total = total * rescale + _fixed_sum(weights).to(tl.float32) / _WEIGHT_UNIT
        return acc, new_max, total

    @triton.jit
    def attend_split(  # type: ignore[no-untyped-def]
        q,
        keys,
        first_block,
        end_block,
        rows,
        scale,
        acc,
        max_score,
        total,
        SPLITS: tl.constexpr,
        sizes,
    ):
        """Every SPLITS-th block from `first_block` on."""
        end_key = end_block * sizes.BLOCK_KEYS
        for start in range(first_block * sizes.BLOCK_KEYS, end_key, SPLITS * sizes.BLOCK_KEYS):
            slot = load_slots(keys, start, sizes)
            acc, max_score, total = attend_block(
                q, keys, start, slot, rows, scale, acc, max_score, total, sizes, False
            )
        return acc, max_score, total

    @triton.jit
    def attend_blocks(  # type: ignore[no-untyped-def]
        q,
        keys,
        low_block,
        blocks,
        rows,
        scale,
        acc,
        max_score,
        total,
        merged,
        merged_max,
        merged_total,
        SPLITS: tl.constexpr,
        sizes,
    ):
        """All blocks, split after split, merged; one loop, so that loads run ahead."""
        block = 0
        for _ in range(blocks):
            if block < SPLITS and block > 0:  # the first block of its split
                merged, merged_max, merged_total = merge_split(
                    merged, merged_max, merged_total, acc, max_score, total
                )
                max_score = tl.full(max_score.shape, _UNSEEN_SCORE, tl.float32)
                total = tl.zeros_like(total)
                acc = tl.zeros_like(acc)
            start = (low_block + block) * sizes.BLOCK_KEYS
            slot = load_slots(keys, start, sizes)
            acc, max_score, total = attend_block(
                q, keys, start, slot, rows, scale, acc, max_score, total, sizes, False
            )
            following = block + SPLITS
            block = tl.where(following < blocks, following, block % SPLITS + 1)
        return merge_split(merged, merged_max, merged_total, acc, max_score, total)
