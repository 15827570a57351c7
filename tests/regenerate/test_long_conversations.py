"""Long conversations from short prompts: lengths, keys, the target's answers, resumed runs."""

import json
import random
from itertools import count
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.regenerate.answers import ANSWERS
from peagle.regenerate.job import RegenerateSettings, regenerate
from peagle.regenerate.long_conversations import (
    LongSettings,
    draw_length,
    join_texts,
    long_conversations,
)
from peagle.regenerate.prompts import Prompt
from peagle.target import Target
from peagle.train.data.documents import read_documents
from tests.support.models.chat_targets import make_chat_target

SETTINGS = LongSettings(length=200, max_tokens=30)


@pytest.fixture(scope="module")
def chat() -> Target:
    return make_chat_target()


def some(count: int, temperature: float = 0.0) -> list[Prompt]:
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(6, 90)}" for _ in range(3)) for _ in range(count)]
    return [
        Prompt(f"{i}@{temperature:g}", "x", [text], temperature) for i, text in enumerate(texts)
    ]


def test_every_prompt_is_used_once_and_in_order(chat: Target) -> None:
    prompts = some(60)
    long = long_conversations(prompts, chat, SETTINGS)
    joined = "\n\n".join(turn for conversation in long for turn in conversation.turns)
    assert joined == "\n\n".join(prompt.turns[0] for prompt in prompts)
    assert len({conversation.key for conversation in long}) == len(long) > 3
    assert all("\n\n" not in turn for turn in long[0].turns) and len(long[0].turns) > 3
    assert len(long[1].turns) <= 3 and "\n\n" in long[1].turns[0]
    # A resumed run needs the same conversations.
    assert long == long_conversations(prompts, chat, SETTINGS)


def test_keys_depend_on_the_texts(chat: Target) -> None:
    """More prompts change the last conversation and its key, so it is answered again."""
    few, many = (long_conversations(some(count), chat, SETTINGS) for count in (40, 60))
    shared = {c.key for c in few} & {c.key for c in many}
    assert shared == {c.key for c in few[:-1]}
    texts = {c.key: c.turns for c in many}
    assert all(texts[c.key] == c.turns for c in few[:-1])


def test_a_timed_out_job_keeps_answered_turns(
    chat: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = long_conversations(some(200), chat, SETTINGS)
    settings = RegenerateSettings(
        max_tokens=30, max_prompt=170, slots=3, keep_truncated=True, long=200
    )
    ticks = count()
    monkeypatch.setattr("peagle.regenerate.job.time.perf_counter", lambda: float(next(ticks)))
    regenerate(chat, long, tmp_path, settings, stop_after=8)
    records = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    cut = [record for record in records if record.get("cut") == "time"]
    assert 1 <= len(cut) <= 3 and all(record["spans"] for record in cut)
    assert len(records) < len(long)
    assert regenerate(chat, long, tmp_path, settings).resumed == len(records)


def test_a_conversation_has_one_temperature(chat: Target) -> None:
    long = long_conversations(some(30) + some(30, 0.8), chat, SETTINGS)
    assert {conversation.temperature for conversation in long} == {0.0, 0.8}
    assert len({conversation.key for conversation in long}) == len(long)


def test_lengths_are_log_uniform() -> None:
    rng = random.Random(0)
    settings = LongSettings(length=8192, max_tokens=256)
    lengths = sorted(draw_length(rng, settings) for _ in range(2000))
    assert 512 <= lengths[0] < 530 and 8000 < lengths[-1] <= 8192
    assert lengths[1000] == pytest.approx(2048, rel=0.1)


def test_joined_texts() -> None:
    assert join_texts(["a", "b", "c", "d", "e"], 2) == ["a\n\nb", "c\n\nd\n\ne"]
    assert join_texts(["a"], 3) == ["a"]


def test_the_target_answers_in_the_middle_and_at_the_end(chat: Target, tmp_path: Path) -> None:
    long = long_conversations(some(200), chat, SETTINGS)
    settings = RegenerateSettings(
        max_tokens=30, max_prompt=170, slots=3, keep_truncated=True, long=200
    )
    counts = regenerate(chat, long, tmp_path, settings)
    records = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    kept = [record for record in records if "ids" in record]
    assert kept and any(len(record["spans"]) > 1 for record in kept)
    assert counts.length_quantiles["max"] == max(len(record["ids"]) for record in kept) <= 200
    assert list(counts.as_dict()["document_tokens"]) == ["min", "p10", "median", "p90", "max"]
    documents = read_documents([tmp_path], chat, 200)
    assert documents.answer_tokens == counts.tokens
    assert regenerate(chat, long, tmp_path, settings).resumed == len(long)
    with pytest.raises(UserError, match="was started with long 200"):
        regenerate(chat, long, tmp_path, RegenerateSettings(**{**as_dict(settings), "long": 100}))


def as_dict(settings: RegenerateSettings) -> dict:
    return {name: getattr(settings, name) for name in settings.__slots__}


def test_bad_lengths(chat: Target) -> None:
    with pytest.raises(UserError, match="exceeds the target's context"):
        long_conversations(some(3), chat, LongSettings(100_000, 12))
    with pytest.raises(UserError, match="holds no two answers"):
        long_conversations(some(3), chat, LongSettings(20, 12))
