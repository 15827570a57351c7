"""The batch sizes for which CUDA graphs are captured, and the keys of these graphs."""

from collections.abc import Callable, Hashable

from peagle.draft_shape import DraftShape

BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Batches up to this size, or 1.5 times the requests, may run requests that have no graphs yet.
MAX_PADDED_BATCH = 8


def batch_bucket(count: int) -> int:
    """The batch size with a graph that holds this many requests."""
    return next((size for size in BATCH_BUCKETS if size >= count), count)


def padded_batch(count: int, has_graph: Callable[[int], bool]) -> int:
    """The smallest batch size with graphs that holds this many requests, if it is not too big.

    A step that is padded more takes a little longer; capturing its graphs takes 100 steps.
    """
    own = batch_bucket(count)
    if has_graph(own):
        return own
    limit = max(MAX_PADDED_BATCH, own * 3 // 2)
    return next((size for size in BATCH_BUCKETS if own < size <= limit and has_graph(size)), own)


def graph_keys(
    batch: int, verify_shape: DraftShape, draft_shape: DraftShape
) -> tuple[Hashable, Hashable]:
    """The keys of a step's two graphs."""
    return ("verify", batch, verify_shape), ("accept", batch, verify_shape, draft_shape)
