"""HostNgramSlots: NgramSlots on a CPU, in numpy and lists.

A step on a CPU takes milliseconds; a dozen tensor operations on a few numbers would take a
noticeable part of one.
"""

import numpy as np
import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.ngram.graft import graft_branch
from peagle.engine.ngram.host_lookup import continuation, longest_match
from peagle.engine.ngram.ngram_draft import NgramDraft
from peagle.kernels.triton.build_tree import DraftTrees


class HostNgramSlots:
    def __init__(self, slots: int, k: int, positions: int, min_match: int) -> None:
        """The arguments are those of NgramSlots."""
        self.k = k
        # Whether the drafter drafts nothing for a pass whose requests all use n-grams.
        self.skips_drafter = False
        self.tokens = np.zeros((slots, positions), np.int32)
        self.min_match = [min_match] * slots
        self.found = [NgramDraft(0, [], used=False)] * slots

    @property
    def tensors(self) -> list[Tensor]:
        """What a measurement must restore: nothing, because steps are timed on a GPU only."""
        return []

    def write_prompt(self, slot: int, tokens: list[int]) -> None:
        self.tokens[slot, : len(tokens)] = tokens

    def set_min_match(self, slots: list[int], min_match: list[int]) -> None:
        for slot, value in zip(slots, min_match, strict=True):
            self.min_match[slot] = value

    def append(self, index: Tensor, positions: Tensor, tokens: Tensor) -> None:
        rows = tokens.numpy()
        for i, (slot, position) in enumerate(zip(index.tolist(), positions.tolist(), strict=True)):
            self.tokens[slot, position + 1 : position + 1 + rows.shape[1]] = rows[i]

    def look_up(self, index: Tensor, newest: Tensor) -> None:
        for slot, position in zip(index.tolist(), newest.tolist(), strict=True):
            row = self.tokens[slot, : position + 1]
            length, end = longest_match(row)
            drafts = continuation(row, end, self.k).tolist()
            used = length > 0 and length >= self.min_match[slot]
            self.found[slot] = NgramDraft(length, drafts, used)

    def skips(self, index: Tensor) -> bool:
        """Whether the drafter drafts nothing for these slots: all of them use n-grams."""
        return self.skips_drafter and all(self.found[slot].used for slot in index.tolist())

    def write_drafts(self, index: Tensor, trees: DraftTrees, shape: DraftShape) -> None:
        used = [slot for slot in index.tolist() if self.found[slot].used]
        if not used:
            return
        slots = torch.tensor(used)
        drafts = torch.tensor([self.found[slot].drafts for slot in used])
        trees.chain[slots] = drafts
        if not shape.is_chain:
            graft_branch(trees, slots, drafts, torch.ones(len(used), dtype=torch.bool), shape)

    def read(self, slots: list[int]) -> list[NgramDraft]:
        """The proposals for these slots."""
        return [self.found[slot] for slot in slots]
