"""The documents of a round: selection, counts and file permissions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.learn.document import encode_line, is_held_back, new_document, parse_header
from peagle.learn.folder import LearnFolder, StoreIdentity
from peagle.learn.store_reader import list_segments, purge_documents
from peagle.learn.training.new_documents import DocumentCounter
from peagle.learn.training.round_folder import RoundFolder, cut_prompt
from peagle.learn.training.round_settings import RoundSettings
from tests.support.train.learning import write_documents

HELD_BACK, TRAINED = ([i for i in range(500) if is_held_back(f"{i:016x}-") == x] for x in (1, 0))


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    folder = LearnFolder(tmp_path / "learn")
    folder.open(StoreIdentity("tiny", "main", 96, "0123"))
    return folder


def store(folder: LearnFolder, prompts: list[int], answers: int, time: float) -> None:
    """`answers` different answers to each of the prompts."""
    documents = [new_document([prompt], [i]) for prompt in prompts for i in range(answers)]
    named = [
        replace(document, id=f"{document.prompt[0]:016x}-{document.answer[0]}")
        for document in documents
    ]
    write_documents(folder, named, time)


def counts(counter: DocumentCounter) -> tuple[int, int]:
    counter.update()
    return counter.new, counter.held_back


@pytest.mark.parametrize("sizes", [(0, 1), (1, 1), (2, 3), (700, 5)])
def test_a_header_counts_tokens_without_reading_them(sizes: tuple[int, int]) -> None:
    document = new_document(list(range(sizes[0])), list(range(sizes[1])))
    header = parse_header(encode_line(document))
    assert header is not None
    assert (header.id, header.time, header.tokens) == (document.id, document.time, sum(sizes))


@pytest.mark.parametrize("line", [b"[]", b"{", b'{"id": "x", "time": 1, "prompt": "BwAAAA=="}'])
def test_an_invalid_line_has_no_header(line: bytes) -> None:
    assert parse_header(line) is None


def test_a_repeated_prompt_is_held_back_once(folder: LearnFolder) -> None:
    """Many answers to one held-back prompt, such as a health check, must not decide the verdict."""
    store(folder, HELD_BACK[:1], answers=50, time=2000.0)
    store(folder, HELD_BACK[1:4], answers=1, time=1000.0)
    store(folder, TRAINED[:10], answers=1, time=1000.0)
    assert counts(DocumentCounter(folder)) == (10, 4)
    plan = RoundFolder(folder).create(0, "base", RoundSettings(max_held_back=3))
    assert (plan.documents, plan.held_back) == (10, 3)
    lines = RoundFolder(folder).held_back.read_text().splitlines()
    assert [49] in [json.loads(line)["ids"][1:] for line in lines]  # the newest answer


def test_new_documents_are_counted_after_the_cursor(folder: LearnFolder) -> None:
    counter = DocumentCounter(folder)
    store(folder, TRAINED[:10], answers=1, time=1000.0)
    assert counts(counter) == (10, 0)
    rounds = RoundFolder(folder)
    rounds.finish(rounds.create(0, "base", RoundSettings()))
    assert counts(counter) == (0, 0)
    store(folder, TRAINED[10:13], answers=1, time=2000.0)
    assert counts(counter) == (3, 0)


def test_deleted_documents_are_not_counted(folder: LearnFolder) -> None:
    """Otherwise the learner would start jobs without work every second."""
    counter = DocumentCounter(folder)
    store(folder, TRAINED[:10], answers=1, time=1000.0)
    store(folder, HELD_BACK[:3], answers=1, time=1000.0)
    assert counts(counter) == (10, 3)
    purge_documents(folder)
    assert counts(counter) == (0, 0)


def test_a_large_store_is_read_in_parts(folder: LearnFolder) -> None:
    store(folder, TRAINED[:100], answers=1, time=1000.0)
    counter = DocumentCounter(folder)
    part = list_segments(folder)[0].stat().st_size / 4
    numbers = []
    for _ in range(6):
        counter.update(part)
        numbers.append(counter.new)
    assert 20 < numbers[0] < 30 and numbers[0] < numbers[1] < numbers[2]
    assert numbers[-1] == 100


@pytest.mark.parametrize(
    ("prompt", "answer", "kept"), [(100, 5, 15), (10, 10, 10), (11, 10, 10), (100, 50, 10)]
)
def test_a_long_prompt_leaves_room_for_its_answer(prompt: int, answer: int, kept: int) -> None:
    """In this test, the trainer reads the first 20 tokens."""
    document = new_document(list(range(prompt)), list(range(answer)))
    assert cut_prompt(document, 20) == document.prompt[-kept:]


def test_only_this_user_can_read_a_round(folder: LearnFolder) -> None:
    store(folder, TRAINED[:3] + HELD_BACK[:3], answers=1, time=1000.0)
    rounds = RoundFolder(folder)
    rounds.create(0, "base", RoundSettings())
    assert rounds.documents.is_file() and rounds.root.stat().st_mode & 0o077 == 0


def test_a_killed_process_leaves_no_documents_behind(folder: LearnFolder) -> None:
    left = folder.root / ".round.abcd"
    left.mkdir()
    (left / "documents.jsonl").write_text("{}")
    RoundFolder(folder).discard()
    assert not left.exists()
