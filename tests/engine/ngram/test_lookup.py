"""The n-gram lookups of GPU and CPU equal the reference."""

import random

import pytest
import torch

from peagle.draft_shape import DraftShape
from peagle.engine.kv.slots import empty_trees
from peagle.engine.ngram.host_lookup import continuation, longest_match
from peagle.engine.ngram.host_slots import HostNgramSlots
from peagle.engine.ngram.lookup import find_ngrams
from peagle.engine.ngram.ngram_draft import NgramDraft
from peagle.engine.ngram.ngram_slots import NgramSlots
from peagle.reference.ngram import match_length, propose_ngram


def test_both_lookups_equal_the_reference() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 4)
        k = rng.randint(1, 15)
        texts = [
            [rng.randrange(rng.choice([2, 3, 8])) for _ in range(rng.randint(1, 40))]
            for _ in range(count)
        ]
        width = max(map(len, texts)) + rng.randint(0, 5)
        # Tokens after the newest are random.
        tokens = torch.randint(0, 3, (count, width), dtype=torch.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        newest = [len(text) - 1 for text in texts]
        lengths, drafts = find_ngrams(tokens, torch.tensor(newest), k)
        assert lengths.tolist() == [match_length(text)[0] for text in texts]
        assert drafts.tolist() == [propose_ngram(text, k) or [text[-1]] * k for text in texts]
        for row, text in zip(tokens.numpy(), texts, strict=True):
            length, end = longest_match(row[: len(text)])
            assert length == match_length(text)[0]
            continued = continuation(row[: len(text)], end, k).tolist()
            assert continued == (propose_ngram(text, k) or [text[-1]] * k)


@pytest.mark.parametrize("on_host", [True, False])
def test_slots_use_matches_that_are_long_enough(on_host: bool) -> None:
    device = torch.device("cpu")
    slots: NgramSlots | HostNgramSlots = NgramSlots(3, 2, 16, 3, device)
    if on_host:
        slots = HostNgramSlots(3, 2, 16, 3)
    slots.write_prompt(0, [5, 6, 7, 5, 6])
    slots.write_prompt(2, [5, 6, 7, 8, 5, 6])
    index = torch.tensor([0, 2])
    # One of two tokens is kept.
    slots.append(index, torch.tensor([4, 5]), torch.tensor([[9, 1], [7, 1]]))
    slots.look_up(index, torch.tensor([5, 6]))
    trees = empty_trees(3, DraftShape(2, 2), device)
    slots.write_drafts(index, trees, DraftShape(2, 2))
    assert trees.chain.tolist() == [[0, 0], [0, 0], [8, 5]]


def test_the_host_sets_the_minimum_match() -> None:
    slots = HostNgramSlots(1, 2, 16, 0)
    slots.write_prompt(0, [5, 6, 7, 8, 5, 6, 7])
    index = torch.tensor([0])
    for min_match, used in ((0, True), (3, True), (4, False)):
        slots.set_min_match([0], [min_match])
        slots.look_up(index, torch.tensor([6]))
        assert slots.read([0]) == [NgramDraft(3, [8, 5], used)]
    slots.write_prompt(0, [1, 2, 3])
    slots.set_min_match([0], [0])
    slots.look_up(index, torch.tensor([2]))
    assert not slots.read([0])[0].used  # Nothing matches.
