"""EngineConfig: every choice of an engine, in one place."""

import math
from dataclasses import dataclass

from peagle.draft_shape import check_window
from peagle.errors import UserError

PAGE_SIZE = 64
MINIMUMS = {"max_batch": 1, "max_queue": 1, "page_size": 1}
OPTIONAL_MINIMUMS = {"tree": 0, "context": 2, "kv_tokens": 1, "prefill_chunk": 1}  # or None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    method: str | None = None  # none, ngram, eagle3 or p-eagle; None: the pair's own
    k: int | str = "auto"  # drafted tokens per step; auto: adaptive drafting
    tree: int | None = None  # nodes of a draft tree, see below
    ngram: bool | None = None  # n-gram drafts beside those of the drafter, see below
    max_batch: int = 64  # requests that decode at the same time
    drafter_window: int | None = None  # sliding window of the drafter, see below
    context: int | None = None  # tokens of a prompt and its answer; None: the target's context
    kv_tokens: int | None = None  # positions in the KV cache, all requests together
    reserved_gib: float = 0.0  # GPU memory that the KV cache leaves to other processes
    prefill_chunk: int | None = None  # prompt tokens computed per step
    max_queue: int = 1024
    page_size: int = PAGE_SIZE  # positions per KV page
    exact: bool | None = None  # see below
    one_by_one: bool = False  # `exact` of None may give every request its own passes
    int8: bool = False  # multiply with 8-bit weights: CPU only, and not lossless
    prefix_caching: bool = True
    cuda_graphs: bool = True
    thread: bool = True  # False: the caller runs `Engine.step`
    """
    `tree`: a fixed K drafts a tree with this many nodes; adaptive drafting may choose trees with
    up to this many nodes. 0: chains only. None: chains, and with adaptive drafting on a GPU trees
    of up to 31 nodes. Adaptive drafting uses K up to 7, or up to 11 with a parallel drafter on a
    GPU.

    `ngram`: where the text of a request repeats itself, the continuation of the repeated part is
    verified instead of the drafter's chain, and as a branch of its tree. None: with adaptive
    drafting of chains on a CPU.

    `drafter_window`: each row of the drafter attends to so many positions, its own included. 0: to
    all. None: as the drafter's config says.

    `exact`: answers are bit-equal to those of a request alone without drafts, in batches where
    kernels allow it, and with a pass for each request elsewhere. None: below float32, exact in
    batches where that costs little, on a CPU with the C kernels and on GPUs where it was measured;
    with `one_by_one`, wherever it is supported. Large targets on the C kernels are not probed then,
    and count as not exact (docs/lossless.md).
    """

    def __post_init__(self) -> None:
        if self.k != "auto" and not (isinstance(self.k, int) and self.k >= 1):
            raise UserError(f"K is {self.k!r}: set `k` to a number of at least 1, or to auto")
        check_window(self.drafter_window or None, "drafter_window")
        for name, minimum in MINIMUMS.items():
            self._check_count(name, minimum, "")
        for name, minimum in OPTIONAL_MINIMUMS.items():
            if getattr(self, name) is not None:
                self._check_count(name, minimum, ", or leave it out")
        if not 0 <= self.reserved_gib < math.inf:
            raise UserError(f"`reserved_gib` is {self.reserved_gib}: use 0 or more GiB")

    def _check_count(self, name: str, minimum: int, alternative: str) -> None:
        count = getattr(self, name)
        if not isinstance(count, int) or count < minimum:
            raise UserError(
                f"`{name}` is {count!r}: use a whole number of at least {minimum}{alternative}"
            )
