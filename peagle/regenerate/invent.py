"""Prompts that the target writes: it continues the user header of its chat template."""

import json
from collections.abc import Iterator
from pathlib import Path

from peagle.data.records import read_records, require_turns
from peagle.errors import UserError
from peagle.regenerate.answers import cut_torn_line
from peagle.regenerate.batch_generator import BatchAnswer, BatchGenerator, BatchRequest, auto_slots
from peagle.regenerate.job import CAPACITY_MULTIPLE, Progress, silent
from peagle.target import Target

INVENTED_FILE = "invented.jsonl"
MAX_TOKENS = 128
MARKER = "peagleturnmarker"
MAX_FRUITLESS_ROUNDS = 3  # rounds of samples without a new prompt before it gives up
EXTRA_SAMPLES = 64  # samples of a round beyond the missing prompts


def invent(
    target: Target,
    count: int,
    out: Path,
    seed: int = 0,
    slots: int | None = None,
    progress: Progress = silent,
) -> Path:
    """Write a file of at least `count` different prompts; those of an earlier run are kept."""
    path = Path(out).expanduser() / INVENTED_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _known(path)
    header, tail = user_frame(target)
    capacity = -(-(len(header) + MAX_TOKENS) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
    fruitless = 0
    while (missing := count - len(known)) > 0:
        samples = missing + missing // 2 + EXTRA_SAMPLES
        before = len(known)
        used_slots = slots or auto_slots(target, capacity, samples)
        generator = BatchGenerator(target, used_slots, capacity, seed + before + fruitless)
        answers = generator.run(BatchRequest(i, header, MAX_TOKENS, 1.0) for i in range(samples))
        for _ in _append_new(path, _texts(target, answers, tail), known, count):
            progress(len(known), count, generator.finished_tokens)
        fruitless = fruitless + 1 if len(known) == before else 0
        if fruitless == MAX_FRUITLESS_ROUNDS:
            raise UserError(
                f"target {target.name!r} invents too few prompts ({len(known)}):"
                " use `prompts` instead"
            )
    return path


def _append_new(path: Path, texts: Iterator[str], known: set[str], count: int) -> Iterator[str]:
    """Append new texts to the file until `count` are known."""
    with path.open("ab") as file:
        for text in texts:
            if text not in known:
                record = {"prompt": text, "source": "invented"}
                file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
                file.flush()
                known.add(text)
                yield text
            if len(known) >= count:
                return


def _known(path: Path) -> set[str]:
    cut_torn_line(path)
    if not path.is_file() or not path.stat().st_size:
        return set()
    return {require_turns(record, f"{path}:{line}")[0] for line, record in read_records(path)}


def user_frame(target: Target) -> tuple[list[int], str]:
    """The ids before a user's text in the chat template, and the text after it."""
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError(f"target {target.name!r} has no chat template: it cannot invent prompts")
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARKER}], tokenize=False)
    before, marker, after = text.partition(MARKER)
    header = tokenizer(before, add_special_tokens=False)["input_ids"]
    if not marker or not header:
        raise UserError(
            f"the chat template of {target.name!r} has no user header: it cannot invent prompts"
        )
    return header, after.strip()


def _texts(target: Target, answers: Iterator[BatchAnswer], tail: str) -> Iterator[str]:
    """Complete turns without special tokens."""
    special = set(target.tokenizer.all_special_tokens)
    for answer in answers:
        text: str = target.tokenizer.decode(
            answer.ids[:-1] if answer.reason == "stop" else answer.ids
        )
        text, end, _ = text.partition(tail) if tail else (text, "", "")
        complete = answer.reason == "stop" or (end and answer.reason == "length")
        text = text.strip()
        if complete and text and not any(token in text for token in special):
            yield text
