"""Parts of the kernel of paged attention: visible keys, and merged splits."""

from peagle.kernels.triton.attention.attention_plan import UNSEEN_SCORE

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

if triton is not None:
    _UNSEEN_SCORE = tl.constexpr(UNSEEN_SCORE)

    @triton.jit
    def visible_to_rows(  # type: ignore[no-untyped-def]
        key_position, first, position, last, tree_bits, window, TREE: tl.constexpr
    ):
        """[rows, keys]: as `visible_keys`."""
        visible = key_position[None, :] > position[:, None] - window
        if TREE:
            tree_row = tl.maximum(key_position - first, 0).to(tl.int64)
            bit = (tree_bits[:, None] >> tree_row[None, :]) & 1
            visible = tl.where(key_position[None, :] < first, visible, bit == 1)
        else:
            visible = visible & (key_position[None, :] <= last[:, None])
        return visible

    @triton.jit
    def merge_splits(  # type: ignore[no-untyped-def]
        part_ptr,
        max_ptr,
        sum_ptr,
        part,
        row_mask,
        query_mask,
        dims,
        D: tl.constexpr,
        SPLITS: tl.constexpr,
    ):
        """The weighted sum of values and the total weight over all splits."""
        max_score = tl.full(row_mask.shape, _UNSEEN_SCORE, tl.float32)
        total = tl.zeros(row_mask.shape, tl.float32)
        acc = tl.zeros(query_mask.shape, tl.float32)
        for i in tl.static_range(SPLITS):
            split_max = tl.load(
                max_ptr + part + i, mask=row_mask, other=_UNSEEN_SCORE, cache_modifier=".cg"
            )
            new_max = tl.maximum(max_score, split_max)
            rescale = tl.exp2(max_score - new_max)
            weight = tl.exp2(split_max - new_max)
            split_sum = tl.load(sum_ptr + part + i, mask=row_mask, other=0.0, cache_modifier=".cg")
            split_acc = tl.load(
                part_ptr + (part + i)[:, None] * D + dims,
                mask=query_mask,
                other=0.0,
                cache_modifier=".cg",
            )
            total = total * rescale + split_sum * weight
            acc = acc * rescale[:, None] + split_acc * weight[:, None]
            max_score = new_max
        return acc, total
