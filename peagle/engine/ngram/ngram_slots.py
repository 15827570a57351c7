"""NgramSlots: the tokens of the requests in decode slots, and what prompt lookup finds in them.

All of it is on the GPU, so that a step neither waits for the host nor needs it. HostNgramSlots is
the same on a CPU.
"""

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.device import to_device
from peagle.engine.ngram.graft import graft_branch
from peagle.engine.ngram.lookup import find_ngrams
from peagle.kernels.triton.build_tree import DraftTrees


class NgramSlots:
    def __init__(
        self, slots: int, k: int, positions: int, min_match: int, device: torch.device
    ) -> None:
        """`positions`: the length of the longest request, drafts included.

        `min_match`: the match length from which on n-gram drafts replace those of the drafter; 0
        without a drafter.
        """
        self.device = device
        self.min_match = min_match
        self.tokens = torch.zeros(slots, positions, dtype=torch.int32, device=device)
        self.drafts = torch.zeros(slots, k, dtype=torch.long, device=device)
        # Whether the chain of a slot is the n-gram draft.
        self.used = torch.zeros(slots, dtype=torch.bool, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """What a measurement of steps must restore."""
        return [self.tokens, self.drafts, self.used]

    def write_prompt(self, slot: int, tokens: list[int]) -> None:
        """Set the known tokens of a new request in this slot."""
        uploaded = to_device(torch.tensor(tokens, dtype=torch.int32), self.device)
        self.tokens[slot, : len(tokens)] = uploaded

    def append(self, index: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write tokens [B, R] behind `positions` [B] of the slots `index` [B]."""
        offsets = torch.arange(1, tokens.shape[1] + 1, device=self.device)
        self.tokens[index[:, None], positions.long()[:, None] + offsets] = tokens.int()

    def look_up(self, index: Tensor, newest: Tensor) -> None:
        """Match the tokens of the slots `index` [B]; newest [B]: the position of the last one."""
        lengths, drafts = find_ngrams(self.tokens[index], newest, self.drafts.shape[1])
        self.drafts[index] = drafts
        self.used[index] = lengths >= self.min_match

    def write_drafts(self, index: Tensor, trees: DraftTrees, shape: DraftShape) -> None:
        """Put the n-gram drafts of the slots that use them in place of chains, and into trees.

        `shape`: what the drafter has drafted.
        """
        drafts = self.drafts[index]
        used = self.used[index]
        trees.chain[index] = torch.where(used[:, None], drafts, trees.chain[index])
        if not shape.is_chain:
            graft_branch(trees, index, drafts, used, shape)
