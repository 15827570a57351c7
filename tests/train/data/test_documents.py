"""Training documents: reading and skipping records, held-out prompts, the order of an epoch, and
the draft vocabulary.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import UserError
from peagle.target import Target
from peagle.train.data.documents import (
    Document,
    Documents,
    epoch_packs,
    iterate_steps,
    join_documents,
    join_some,
    pack_documents,
    read_documents,
    split_held_out,
)
from peagle.train.data.vocabulary import choose_draft_vocabulary, given_draft_vocabulary
from tests.support.models.chat_targets import make_chat_target
from tests.support.models.tiny_models import make_target

GOOD = {"key": "1@0", "ids": [7, 8, 9, 10, 11], "spans": [[2, 5]]}


@pytest.fixture(scope="module")
def chat() -> Target:
    return make_chat_target()


def write(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def read(path: Path, target: Target, max_length: int = 100) -> tuple[Documents, list[str]]:
    lines: list[str] = []
    return read_documents([path], target, max_length, lines.append), lines


def test_ids_and_spans(tmp_path, target):
    two = {"key": "2@0.7", "ids": [3, 4, 5, 6, 7, 8], "spans": [[1, 3], [5, 6]]}
    documents, lines = read(write(tmp_path / "a.jsonl", GOOD, two), target)
    assert lines == [] and documents.keys == ("1@0", "2@0.7") and documents.skipped == 0
    assert documents[0][0].tolist() == GOOD["ids"] and documents[0][1].tolist() == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert documents[1][1].tolist() == [False, True, True, False, False, True]
    assert documents.answer_tokens == 6 and documents.starts.tolist() == [0, 5, 11]


def test_messages_use_the_chat_template(tmp_path, chat):
    turns = [("user", "w5 w6"), ("assistant", "w7 w8"), ("user", "w9"), ("assistant", "w30")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    documents, lines = read(write(tmp_path / "a.jsonl", record), chat)
    ids, answer, _ = documents[0]
    assert lines == [] and ids.tolist() == [93, 5, 6, 94, 95, 7, 8, 1, 93, 9, 94, 95, 30, 1]
    assert np.flatnonzero(answer).tolist() == [5, 6, 7, 12, 13], (
        "each answer includes its stop token"
    )
    assert documents.keys == ("1",), "the key of a record without one is its line number"


def test_folders_gzip_and_several_files(tmp_path, target):
    write(tmp_path / "answers.jsonl", GOOD)
    other = tmp_path / "more.jsonl.gz"
    other.write_bytes(gzip.compress(json.dumps(GOOD | {"key": "2@0"}).encode()))
    documents = read_documents([tmp_path, other], target, 100)
    assert documents.keys == ("1@0", "2@0")


BROKEN = {
    "no JSON": '{"ids": [1,',
    "no object": "[1, 2]",
    "neither messages nor ids": {"text": "hello"},
    "ids without spans": {"ids": [7, 8, 9]},
    "an id outside the vocabulary": GOOD | {"ids": [7, 8, 96, 9, 9]},
    "an id below zero": GOOD | {"ids": [7, 8, -1, 9, 9]},
    "an id beyond 32 bits": GOOD | {"ids": [7, 8, 1 << 40, 9, 9]},
    "ids that are no list": GOOD | {"ids": 7},
    "ids within ids": GOOD | {"ids": [[7, 8, 9]]},
    "no ids": GOOD | {"ids": []},
    "words for ids": GOOD | {"ids": ["a", "b", "c"]},
    "a span of one number": GOOD | {"spans": [[2]]},
    "spans that are no spans": GOOD | {"spans": [2, 5]},
    "messages that are no list": {"messages": "hello"},
    "a message without a role": {"messages": [{"content": "w5"}]},
    "no answer in the conversation": {"messages": [{"role": "user", "content": "w5"}]},
    "what the template refuses": {"messages": [{"role": "user", "content": "w66"}]},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_records_are_named_and_skipped(name: str, tmp_path, chat):
    path = write(tmp_path / "a.jsonl", GOOD, BROKEN[name], "", GOOD | {"key": "3@0"})
    documents, lines = read(path, chat)
    assert documents.keys == ("1@0", "3@0")
    assert len(lines) == 1 and lines[0].startswith(f"{path}:2: skipped, ")


def test_dropped_answers_and_answers_without_a_row(tmp_path, target):
    """Answers that regenerate dropped, and one in the first two tokens, which no row predicts."""
    early = {"ids": [7, 8, 9], "spans": [[0, 2]]}
    documents, lines = read(
        write(tmp_path / "a.jsonl", GOOD | {"dropped": "loops"}, early, GOOD), target
    )
    assert len(documents) == 1 and documents.skipped == 2 and lines == []


def test_nothing_to_train_on(tmp_path, target):
    path = write(tmp_path / "a.jsonl", GOOD | {"dropped": "loops"}, {"text": "hello"})
    with pytest.raises(
        UserError, match=r"a\.jsonl: no answer to train on \(2 records skipped\).*regenerate"
    ):
        read(path, target)
    with pytest.raises(UserError, match="no file"):
        read_documents([tmp_path], target, 100)


def test_long_documents_are_cut(tmp_path, target):
    documents, _ = read(
        write(tmp_path / "a.jsonl", GOOD, GOOD | {"spans": [[4, 5]]}), target, max_length=4
    )
    assert len(documents) == 1 and documents.skipped == 1, (
        "the cut removes the answer of the second document"
    )
    assert documents[0][0].tolist() == [7, 8, 9, 10]


def test_messages_need_a_template(tmp_path):
    """An error is raised, instead of skipping every record."""
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError):
        read(write(tmp_path / "a.jsonl", record), make_target())


def documents_of(keys: list[str], seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    parts = []
    for key in keys:
        length = int(rng.integers(3, 60))
        parts.append(Document(rng.integers(0, 96, length), np.arange(length) > 1, key))
    return join_documents(parts)


def test_the_split_keeps_a_prompt_together():
    keys = [f"{i % 30}@{i // 30}" for i in range(90)]  # three answers to each of thirty prompts
    train, held_out_docs = split_held_out(documents_of(keys), 4, seed=3)
    prompts = [{key.split("@")[0] for key in part.keys} for part in (train, held_out_docs)]
    assert (
        len(prompts[1]) == 4
        and not prompts[0] & prompts[1]
        and len(held_out_docs) == 12
        and len(train) == 78
    )
    again = split_held_out(documents_of(keys), 4, seed=3)[1]
    assert again.keys == held_out_docs.keys and again.ids.tolist() == held_out_docs.ids.tolist()
    assert split_held_out(documents_of(keys), 4, seed=4)[1].keys != held_out_docs.keys


def test_the_split_does_not_depend_on_the_order():
    keys = [f"{i}@0" for i in range(40)]
    held_out_docs = [
        set(split_held_out(documents_of(order), 5, seed=0)[1].keys) for order in (keys, keys[::-1])
    ]
    assert held_out_docs[0] == held_out_docs[1]


@pytest.mark.parametrize(("held_out", "expected"), [(0, 0), (2, 2), (1000, 4)])
def test_at_most_a_fifth_is_held_out(held_out: int, expected: int):
    train, held_out_docs = split_held_out(
        documents_of([str(i) for i in range(20)]), held_out, seed=0
    )
    assert len(held_out_docs) == expected and len(train) == 20 - expected


def test_some_documents_are_joined():
    documents = documents_of([f"{i}@0" for i in range(100)])
    joined = join_some(documents, 0.5, 200, seed=1)
    assert joined.answer_tokens == documents.answer_tokens
    assert sorted(joined.ids.tolist()) == sorted(documents.ids.tolist())
    assert 60 < len(joined) < 90 and documents.lengths.max() < joined.lengths.max() <= 200
    first = joined[50]  # The documents that stay as they are come first, in their order.
    original = documents[documents.keys.index(first.key)]
    assert first.ids[: len(original.ids)].tolist() == original.ids.tolist()
    assert joined.digest == join_some(documents, 0.5, 200, seed=1).digest
    assert len(join_some(documents, 0.0, 200, seed=1)) == 100


@given(st.integers(1, 60), st.integers(20, 200), st.integers(0, 5))
def test_an_epoch_has_every_document_once(count, tokens, epoch):
    documents = documents_of([str(i) for i in range(count)])
    order = epoch_packs(documents, tokens, 7, epoch)
    assert sorted(i for chosen in order for i in chosen.tolist()) == list(range(count))
    lengths = np.diff(documents.starts)
    assert all(lengths[chosen].sum() <= tokens or len(chosen) == 1 for chosen in order)
    assert all(len(chosen) for chosen in order)


def test_epochs_differ_and_are_reproducible():
    documents = documents_of([str(i) for i in range(30)])
    first, second, again = (
        np.concatenate(epoch_packs(documents, 100, 7, e)).tolist() for e in (0, 1, 0)
    )
    assert first == again != second


def test_steps_continue_with_the_next_epoch():
    documents = documents_of([str(i) for i in range(9)])
    per_epoch = len(epoch_packs(documents, 60, 7, 0))
    stream = iterate_steps(documents, 60, 2, 7)
    seen: list[int] = []
    for _ in range((per_epoch + 1) // 2):
        seen += [i for chosen in next(stream) for i in chosen.tolist()]
    assert sorted(seen) == list(range(9))
    assert next(stream)[0].tolist() == epoch_packs(documents, 60, 7, 1)[0].tolist()


def test_a_pack_records_the_origin_of_its_tokens():
    documents = documents_of([str(i) for i in range(5)])
    pack = pack_documents(documents, np.array([3, 0]), 200)
    total = int(pack.lengths.sum())
    assert pack.ids[:total].tolist() == documents.ids[pack.token_indices[:total]].tolist()
    assert pack.ids[:total].tolist() == [
        *documents[3][0],
        *documents[0][0],
    ] and pack.document_indices.tolist() == [3, 0]


def test_the_draft_vocabulary():
    ids = np.array([50, 50, 50, 40, 40, 30, 20, 10, 10])
    # The tokens 10 are not part of the answer.
    documents = join_documents([Document(ids, np.arange(9) < 7, "a")])
    chosen, coverage = choose_draft_vocabulary(documents, 96, 3, frozenset({1}))
    assert chosen.tolist() == [1, 40, 50] and coverage == 5 / 7
    everything, share = choose_draft_vocabulary(documents, 96, 6, frozenset({1, 2}))
    assert everything.tolist() == [1, 2, 20, 30, 40, 50] and share == 1.0
    for size in (0, 96, 200):
        assert choose_draft_vocabulary(documents, 96, size) == (None, 1.0)


def test_a_given_draft_vocabulary():
    ids = np.array([50, 50, 50, 40, 40, 30, 20, 10, 10])
    documents = join_documents([Document(ids, np.arange(9) < 7, "a")])
    for known, covered in (([40, 20], 3 / 7), ([7, 95], 0.0)):
        chosen, coverage = given_draft_vocabulary(documents, torch.tensor(known))
        assert chosen is not None and chosen.tolist() == known and coverage == covered
    assert given_draft_vocabulary(documents, None) == (None, 1.0)
