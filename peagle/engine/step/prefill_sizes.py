"""PrefillSizer: the sizes of prefill passes, and which of them run as CUDA graphs."""

import itertools
from collections.abc import Iterator

from peagle.engine.model.drafting import DraftRunner
from peagle.engine.schedule.prefill_layout import PrefillSize
from peagle.engine.schedule.request import PrefillChunk

# The sizes that have CUDA graphs.
ROW_BUCKETS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
USUAL_PROMPT_TOKENS = (32, 512)
# Requests have up to this many rows in a graph; a longer one gets a graph that it may fill alone.
MAX_REQUEST_ROWS = 512
# Rows * weights that keep a GPU busy (about 40 ms) while the host launches a pass without a graph,
# which takes about a millisecond per layer.
BUSY_ROW_WEIGHTS = 8e12
# Rows * weights of padding (about 2 ms) that cost less than the capture of a smaller graph.
MAX_PADDING_ROW_WEIGHTS = 4e11


class PrefillSizer:
    def __init__(self, drafter: DraftRunner | None, weights: int) -> None:
        """`weights`: those of the target's layers that one row is multiplied with."""
        self.parallel = drafter is not None and drafter.parallel
        self.bidirectional = drafter is not None and drafter.drafter.config.bidirectional
        self.weights = weights
        fitting = [rows for rows in ROW_BUCKETS if rows * weights <= BUSY_ROW_WEIGHTS]
        self.max_graph_rows = max(fitting, default=ROW_BUCKETS[0])

    def has_graph(self, chunks: list[PrefillChunk]) -> bool:
        """Whether these chunks are few enough to run as a CUDA graph."""
        rows = sum(chunk.end - chunk.start for chunk in chunks)
        return rows <= self.max_graph_rows and len(chunks) <= REQUEST_BUCKETS[-1]

    def size(self, chunks: list[PrefillChunk], k: int, use_graphs: bool) -> PrefillSize:
        """The size that the chunks need; with graphs, the next one that has a graph."""
        counts = [chunk.end - chunk.start for chunk in chunks]
        rows = sum(counts)
        requests = len(chunks)
        max_rows = max(counts)
        if use_graphs:
            rows = next(size for size in ROW_BUCKETS if size >= rows)
            max_rows = rows if max_rows > MAX_REQUEST_ROWS else min(rows, MAX_REQUEST_ROWS)
            requests = next(size for size in REQUEST_BUCKETS if size >= requests)
        return self._prefill_size(rows, requests, max_rows, k)

    def is_padded_cheaply(self, size: PrefillSize, larger: PrefillSize) -> bool:
        """Whether the contents of `size` may always run in a graph of the larger size."""
        padding = (larger.rows - size.rows) * self.weights
        return larger.holds(size) and padding <= MAX_PADDING_ROW_WEIGHTS

    def usual_sizes(self, max_batch: int, k: int) -> Iterator[PrefillSize]:
        """Sizes worth a graph before the first request: up to `max_batch` usual prompts."""
        shortest, longest = USUAL_PROMPT_TOKENS
        for requests, rows in itertools.product(REQUEST_BUCKETS, ROW_BUCKETS):
            if requests >= 2 * max_batch:
                continue
            if shortest * requests <= rows <= min(longest * requests, self.max_graph_rows):
                yield self._prefill_size(rows, requests, min(rows, MAX_REQUEST_ROWS), k)

    def _prefill_size(self, rows: int, requests: int, max_rows: int, k: int) -> PrefillSize:
        mask_rows = max(k - 1, 0) if self.parallel else 0
        # The last rows of a request see each other, so they must be mask rows in every chunk.
        every_chunk = self.bidirectional
        return PrefillSize(rows, requests, mask_rows, max_rows, every_chunk)
