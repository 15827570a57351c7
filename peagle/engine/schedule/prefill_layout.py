"""The layout of a prefill pass: chunks of prompts side by side, as one vector of numbers.

The host builds the vector and copies it to the device in one transfer. The target's rows are the
tokens of the chunks. The drafter's rows are the same positions with ids shifted by one (the id
after a chunk's last token is known, or the target is about to give it) and, behind a chunk that
ends its prompt, mask rows. A layout may be larger than its contents, so that shapes repeat and a
CUDA graph can be replayed; the remaining rows and requests are padding.

    chunk 10 11 12 at positions 5..7, next id 13, 2 mask rows:

    target   id 10 11 12      position 5 6 7
    drafter  id 11 12 13 M M  position 5 6 7 8 9   source 0 1 2 -1 -1
"""

from dataclasses import dataclass, fields

from torch import Tensor

from peagle.engine.schedule.request import PrefillChunk

# Values of `draft_source` in rows that no token of a chunk belongs to.
MASK_ROW = -1
PADDING_ROW = -2
UNKNOWN_ID = -1  # The id after a chunk, if the target's pass gives it.


@dataclass(frozen=True, slots=True)
class PrefillSize:
    """The shape of a layout: passes of equal size share a CUDA graph."""

    rows: int  # Rows of the target's pass.
    requests: int
    mask_rows: int  # Mask rows behind a chunk, at most.
    max_rows: int  # Rows of one request, at most.
    mask_every_chunk: bool = False  # Mask rows behind every chunk, not only at the end of a prompt.

    @property
    def draft_rows(self) -> int:
        """Rows of the drafter's pass."""
        return self.rows + self.requests * self.mask_rows

    def holds(self, other: "PrefillSize") -> bool:
        """Whether the contents of the other size fit, with padding, into this one."""
        return (
            self.rows >= other.rows
            and self.requests >= other.requests
            and self.max_rows >= other.max_rows
            and self.mask_rows == other.mask_rows
            and self.mask_every_chunk == other.mask_every_chunk
        )


@dataclass(frozen=True, slots=True)
class PrefillInput:
    """The parts of the vector, in its order, as views on the device."""

    # Of each row of the target's pass.
    ids: Tensor
    positions: Tensor
    owner: Tensor  # The index of its request in the batch; -1: padding.
    # Of each row of the drafter's pass.
    draft_ids: Tensor
    draft_positions: Tensor
    draft_owner: Tensor
    draft_source: Tensor  # The target's row with its hidden state, or MASK_ROW or PADDING_ROW.
    # Of each request.
    slot: Tensor
    start: Tensor  # Its first row.
    count: Tensor  # Its number of rows.
    first: Tensor  # Its first position.
    last: Tensor  # Its last row.
    end: Tensor  # The position after its chunk.
    draft_start: Tensor
    draft_count: Tensor
    draft_last: Tensor  # The drafter's last row that is not a mask row.
    next_id: Tensor  # The token after the chunk, or UNKNOWN_ID.
    emitted: Tensor  # Tokens of the answer, the first one included.


PART_NAMES = tuple(part.name for part in fields(PrefillInput))
ROW_PARTS = frozenset(("ids", "positions", "owner"))
DRAFT_ROW_PARTS = frozenset(("draft_ids", "draft_positions", "draft_owner", "draft_source"))


def part_lengths(size: PrefillSize) -> list[tuple[str, int]]:
    """The name and the length of each part of the vector, in order."""
    lengths = dict.fromkeys(PART_NAMES, size.requests)
    lengths |= dict.fromkeys(ROW_PARTS, size.rows)
    lengths |= dict.fromkeys(DRAFT_ROW_PARTS, size.draft_rows)
    return list(lengths.items())


def layout_vector(
    chunks: list[PrefillChunk], slots: list[int], size: PrefillSize, padding_slot: int
) -> list[int]:
    """The numbers of all parts, one after another; `slots`: the decode slots of the chunks."""
    parts: dict[str, list[int]] = {name: [] for name in PART_NAMES}
    for request_index, (chunk, slot) in enumerate(zip(chunks, slots, strict=True)):
        append_chunk(parts, chunk, request_index, slot, size)
    padding = {"owner": -1, "draft_owner": -1, "draft_source": PADDING_ROW, "slot": padding_slot}
    vector: list[int] = []
    for name, length in part_lengths(size):
        vector += parts[name] + [padding.get(name, 0)] * (length - len(parts[name]))
    return vector


def append_chunk(
    parts: dict[str, list[int]],
    chunk: PrefillChunk,
    request_index: int,
    slot: int,
    size: PrefillSize,
) -> None:
    ids = chunk.ids
    next_id = chunk.next_id
    count = len(ids)
    ends_prompt = chunk.end == chunk.request.prefill_end
    mask_rows = size.mask_rows if size.mask_every_chunk or ends_prompt else 0
    row = len(parts["ids"])
    draft_row = len(parts["draft_ids"])
    parts["ids"] += ids
    parts["positions"] += range(chunk.start, chunk.end)
    parts["owner"] += [request_index] * count
    parts["draft_ids"] += [*ids[1:], UNKNOWN_ID] + [0] * mask_rows
    parts["draft_positions"] += range(chunk.start, chunk.end + mask_rows)
    parts["draft_owner"] += [request_index] * (count + mask_rows)
    parts["draft_source"] += [*range(row, row + count)] + [MASK_ROW] * mask_rows
    parts["slot"].append(slot)
    parts["start"].append(row)
    parts["count"].append(count)
    parts["first"].append(chunk.start)
    parts["last"].append(row + count - 1)
    parts["end"].append(chunk.end)
    parts["draft_start"].append(draft_row)
    parts["draft_count"].append(count + mask_rows)
    parts["draft_last"].append(draft_row + count - 1)
    parts["next_id"].append(UNKNOWN_ID if next_id is None else next_id)
    parts["emitted"].append(max(1, len(chunk.request.output)))


def split_vector(vector: Tensor, size: PrefillSize) -> PrefillInput:
    """The parts of the vector, each a view of it."""
    views = {}
    start = 0
    for name, length in part_lengths(size):
        views[name] = vector[start : start + length]
        start += length
    return PrefillInput(**views)
