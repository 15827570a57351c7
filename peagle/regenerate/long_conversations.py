"""Long conversations from short prompts, for drafters that are used with long contexts.

Each conversation has a length, drawn log-uniformly between MIN_LENGTH and the longest one, and
takes prompts in their order until they fill it; no prompt is used twice. There are two kinds, in
turn:

    turns     every prompt is a turn of its own: the target answers in the middle and at the end
    joined    1 to 3 turns, each of several texts and a question: long prompts, few answers

The target answers every turn (job.py). An answer that is dropped ends its conversation; one that is
truncated and kept does not.
"""

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peagle.data.long_prompts import SEPARATOR
from peagle.errors import UserError
from peagle.regenerate.prompts import Prompt
from peagle.target import Target

MIN_LENGTH = 512  # tokens of the shortest conversation
MAX_JOINED_TURNS = 3
TEMPLATE_TOKENS = 16  # that the chat template adds to a turn
USUAL_ANSWER = 0.3  # of `max_tokens`: the part of it that an answer usually needs
SOURCE = "long"


@dataclass(frozen=True, slots=True)
class LongSettings:
    length: int  # tokens of the longest conversation, answers included
    max_tokens: int  # of an answer
    seed: int = 0

    def check(self, target: Target) -> None:
        if self.length > target.context:
            raise UserError(f"`long` {self.length} exceeds the target's context, {target.context}")
        if self.length < 2 * self.max_tokens:
            raise UserError(
                f"`long` {self.length} holds no two answers of `max_tokens` {self.max_tokens}:"
                " raise the one, or lower the other"
            )

    @property
    def answer_tokens(self) -> int:
        """The tokens that are planned for an answer."""
        return max(1, int(USUAL_ANSWER * self.max_tokens))


def long_conversations(
    prompts: Sequence[Prompt], target: Target, settings: LongSettings
) -> list[Prompt]:
    """Conversations of all prompts, for each temperature by itself."""
    settings.check(target)
    conversations: list[Prompt] = []
    for temperature in dict.fromkeys(prompt.temperature for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.temperature == temperature]
        conversations += _join_prompts(own, target, settings)
    return conversations


def _join_prompts(
    prompts: list[Prompt], target: Target, settings: LongSettings
) -> Iterator[Prompt]:
    rng = random.Random(settings.seed)
    temperature = prompts[0].temperature
    texts = deque(SEPARATOR.join(prompt.turns) for prompt in prompts)
    number = 0
    while texts:
        length = draw_length(rng, settings)
        num_turns = 0 if number % 2 == 0 else rng.randint(1, MAX_JOINED_TURNS)  # 0: one a text
        turns = _take_texts(texts, target, length, settings.answer_tokens, num_turns)
        if num_turns:
            turns = join_texts(turns, num_turns)
        yield Prompt(conversation_key(number, turns, temperature), SOURCE, turns, temperature)
        number += 1


def conversation_key(number: int, turns: list[str], temperature: float) -> str:
    """The key names the texts, too: with more prompts, the last conversation becomes another."""
    digest = hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:8]
    return f"{SOURCE}:{number}-{digest}@{temperature:g}"


def draw_length(rng: random.Random, settings: LongSettings) -> int:
    """Log-uniform: as many conversations of 512 to 1,024 tokens as of 4,096 to 8,192."""
    shortest = min(MIN_LENGTH, settings.length)
    return int(shortest * (settings.length / shortest) ** rng.random())


def _take_texts(
    texts: deque[str], target: Target, length: int, answer_tokens: int, num_turns: int
) -> list[str]:
    """Remove the first texts, at least one, that fit `length` tokens with the answers to them.

    `num_turns`: turns of the conversation; 0: one for each text.
    """
    taken: list[str] = []
    total = num_turns * (answer_tokens + TEMPLATE_TOKENS)
    while texts:
        total += len(target.tokenizer.encode(texts[0], add_special_tokens=False))
        total += 0 if num_turns else answer_tokens + TEMPLATE_TOKENS
        if taken and total > length:
            break
        taken.append(texts.popleft())
    return taken


def join_texts(texts: list[str], turns: int) -> list[str]:
    """Spread the texts evenly over at most `turns` turns; the last text of each is its question."""
    turns = min(turns, len(texts))
    bounds = [len(texts) * i // turns for i in range(turns + 1)]
    return [SEPARATOR.join(texts[bounds[i] : bounds[i + 1]]) for i in range(turns)]
