"""Prompts the target writes itself: it continues its template's header of a user's turn, at temperature 1."""

import json
from collections.abc import Iterator
from pathlib import Path

from peagle.data.records import read_records, require_turns
from peagle.errors import UserError
from peagle.regenerate.answers import cut_torn_line
from peagle.regenerate.batch_generator import BatchAnswer, BatchGenerator, BatchRequest, auto_slots
from peagle.regenerate.job import ROUND, Progress, silent
from peagle.target import Target

INVENTED = "invented.jsonl"
MAX_TOKENS = 128
MARKER = "peagleturnmarker"
ROUNDS = 3  # given up after so many rounds of samples without a new prompt
MORE = 64  # samples of a round beyond what is missing


def invent(
    target: Target,
    count: int,
    out: Path,
    seed: int = 0,
    slots: int | None = None,
    progress: Progress = silent,
) -> Path:
    """A file of at least `count` prompts, no two alike; what an earlier run invented is kept and counts."""
    path = Path(out).expanduser() / INVENTED
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _known(path)
    header, tail = user_frame(target)
    capacity = -(-(len(header) + MAX_TOKENS) // ROUND) * ROUND
    fruitless = 0
    while (missing := count - len(known)) > 0:
        tries, before = missing + missing // 2 + MORE, len(known)
        fits = slots or auto_slots(target, capacity, tries)
        generator = BatchGenerator(target, fits, capacity, seed + before + fruitless)
        answers = generator.run(BatchRequest(i, header, MAX_TOKENS, 1.0) for i in range(tries))
        for _ in _append_new(path, _texts(target, answers, tail), known, count):
            progress(len(known), count, generator.made)
        fruitless = fruitless + 1 if len(known) == before else 0
        if fruitless == ROUNDS:
            raise UserError(
                f"target {target.name!r} invents too few prompts ({len(known)}): use --prompts instead"
            )
    return path


def _append_new(path: Path, texts: Iterator[str], known: set[str], count: int) -> Iterator[str]:
    """Each text that is not known yet goes to the file, until `count` are."""
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
    """The ids before a user's words under the chat template, and the text that follows them."""
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError(f"target {target.name!r} has no chat template: it cannot invent prompts")
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARKER}], tokenize=False)
    before, found, after = text.partition(MARKER)
    header = tokenizer(before, add_special_tokens=False)["input_ids"]
    if not found or not header:
        raise UserError(
            f"the chat template of {target.name!r} has no header of a user's turn: it cannot invent prompts"
        )
    return header, after.strip()


def _texts(target: Target, answers: Iterator[BatchAnswer], tail: str) -> Iterator[str]:
    """Whole turns only: ended by a stop token or by what follows a turn in the template, without special tokens."""
    special = set(target.tokenizer.all_special_tokens)
    for answer in answers:
        text: str = target.tokenizer.decode(
            answer.ids[:-1] if answer.reason == "stop" else answer.ids
        )
        text, ended, _ = text.partition(tail) if tail else (text, "", "")
        whole = answer.reason == "stop" or (ended and answer.reason == "length")
        text = text.strip()
        if whole and text and not any(token in text for token in special):
            yield text
