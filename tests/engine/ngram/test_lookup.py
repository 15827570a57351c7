"""The lookups of GPU and CPU find what the definition finds."""

import random

import torch

from peagle.draft_shape import DraftShape
from peagle.engine.kv.slots import empty_trees
from peagle.engine.ngram.host_lookup import find_ngrams_on_host
from peagle.engine.ngram.lookup import find_ngrams
from peagle.engine.ngram.ngram_slots import NgramSlots
from peagle.reference.ngram import match_length, propose_ngram


def test_both_lookups_equal_the_reference() -> None:
    chance = random.Random(0)
    for _ in range(200):
        count = chance.randint(1, 4)
        k = chance.randint(1, 15)
        texts = [
            [chance.randrange(chance.choice([2, 3, 8])) for _ in range(chance.randint(1, 40))]
            for _ in range(count)
        ]
        width = max(map(len, texts)) + chance.randint(0, 5)
        tokens = torch.randint(0, 3, (count, width), dtype=torch.int32)  # behind the newest: noise
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        newest = [len(text) - 1 for text in texts]
        for lengths, drafts in (
            find_ngrams(tokens, torch.tensor(newest), k),
            find_ngrams_on_host(tokens, list(range(count)), newest, k),
        ):
            assert lengths.tolist() == [match_length(text)[0] for text in texts]
            assert drafts.tolist() == [propose_ngram(text, k) or [text[-1]] * k for text in texts]


def test_slots_use_matches_that_are_long_enough() -> None:
    slots = NgramSlots(3, k=2, positions=16, min_match=3, device=torch.device("cpu"))
    slots.write_prompt(0, torch.tensor([5, 6, 7, 5, 6]))
    slots.write_prompt(2, torch.tensor([5, 6, 7, 8, 5, 6]))
    index = torch.tensor([0, 2])
    slots.append(index, torch.tensor([4, 5]), torch.tensor([[9, 1], [7, 1]]))  # of which one stays
    slots.look_up(index, torch.tensor([5, 6]))
    trees = empty_trees(3, DraftShape(2, 2), torch.device("cpu"))
    slots.write_drafts(index, trees, DraftShape(2, 2))
    assert trees.chain.tolist() == [[0, 0], [0, 0], [8, 5]]
    first, second = slots.read([0, 2])
    assert (first.match_length, first.used) == (0, False)
    assert (second.match_length, second.used, second.drafts) == (3, True, [8, 5])
    slots.set_min_match([0, 2], [2, 4])
    slots.look_up(index, torch.tensor([5, 6]))
    assert not any(draft.used for draft in slots.read([0, 2]))
