"""NgramSlots: the tokens of the requests in decode slots, and what prompt lookup finds in them.

All of it is on the device, so that a step neither waits for the host nor needs it. The host decides
from which match length on a slot drafts by prompt lookup (`min_match`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.ngram.graft import graft_branch
from peagle.engine.ngram.host_lookup import find_ngrams_on_host
from peagle.engine.ngram.lookup import find_ngrams
from peagle.kernels.triton.build_tree import DraftTrees


@dataclass(frozen=True, slots=True)
class NgramDraft:
    """What prompt lookup proposes to a request, on the host."""

    match_length: int  # 0: nothing
    drafts: list[int]
    used: bool  # Whether the request's chain is this draft.


class NgramSlots:
    def __init__(
        self, slots: int, k: int, positions: int, min_match: int, device: torch.device
    ) -> None:
        """`positions`: the length of the longest request, drafts included.

        `min_match`: the match length from which on n-gram drafts replace those of the drafter; 0
        without a drafter.
        """
        self.device = device
        self.tokens = torch.zeros(slots, positions, dtype=torch.int32, device=device)
        self.match_lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self.drafts = torch.zeros(slots, k, dtype=torch.long, device=device)
        self.min_match = torch.full((slots,), min_match, dtype=torch.int32, device=device)
        # Whether the drafter drafts nothing for a pass whose requests all use n-grams.
        self.skips_drafter = False
        # Whether the chain of a slot is the n-gram draft.
        self.used = torch.zeros(slots, dtype=torch.bool, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.match_lengths, self.drafts, self.min_match, self.used]

    def write_prompt(self, slot: int, tokens: Tensor) -> None:
        """Set the known tokens [T] of a new request in this slot."""
        self.tokens[slot, : len(tokens)] = tokens

    def set_min_match(self, slots: list[int], min_match: list[int]) -> None:
        """Set the match lengths from which on these slots draft by prompt lookup."""
        index = torch.tensor(slots, device=self.device)
        self.min_match[index] = torch.tensor(min_match, dtype=torch.int32, device=self.device)

    def append(self, index: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write tokens [B, R] behind `positions` [B] of the slots `index` [B]."""
        offsets = torch.arange(1, tokens.shape[1] + 1, device=self.device)
        self.tokens[index[:, None], positions.long()[:, None] + offsets] = tokens.int()

    def look_up(self, index: Tensor, newest: Tensor) -> None:
        """Match the tokens of the slots `index` [B]; newest [B]: the position of the last one."""
        k = self.drafts.shape[1]
        if self.tokens.is_cuda:
            lengths, drafts = find_ngrams(self.tokens[index], newest, k)
        else:
            lengths, drafts = find_ngrams_on_host(self.tokens, index.tolist(), newest.tolist(), k)
        self.match_lengths[index] = lengths
        self.drafts[index] = drafts
        self.used[index] = lengths >= self.min_match[index]

    def write_drafts(self, index: Tensor, trees: DraftTrees, shape: DraftShape) -> None:
        """Put the n-gram drafts of the slots that use them in place of chains, and into trees.

        `shape`: what the drafter has drafted.
        """
        drafts = self.drafts[index]
        used = self.used[index]
        trees.chain[index] = torch.where(used[:, None], drafts, trees.chain[index])
        if not shape.is_chain:
            graft_branch(trees, index, drafts, used, shape)

    def read(self, slots: list[int]) -> list[NgramDraft]:
        """The proposals for these slots; this waits for the device."""
        index = torch.tensor(slots, device=self.device)
        return [
            NgramDraft(*values)
            for values in zip(
                self.match_lengths[index].tolist(),
                self.drafts[index].tolist(),
                (self.used[index] & (self.match_lengths[index] > 0)).tolist(),
                strict=True,
            )
        ]
