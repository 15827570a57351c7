"""Prompts of given lengths: texts of a set, joined in front of one of its questions.

The question is the first turn of a task, the same at every length. The texts of the other tasks
fill the prompt, in the order of the set, beginning behind the question's own task; what does not
fit is cut at the beginning of the prompt, at a word. If a set has fewer tokens than a prompt, its
texts repeat.

    tasks A B C D, question B, room for about two texts:    "... end of D, A, B"
    room for about five texts:                              "... end of D, A, C, D, A, B"
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from peagle.data.bench import Task
from peagle.data.chat import Messages, encode_prompt
from peagle.errors import UserError
from peagle.target import Target

SEPARATOR = "\n\n"
WORD = re.compile(r"\s*\S+")


def long_prompts(
    target: Target, tasks: Sequence[Task], lengths: Sequence[int], count: int
) -> dict[int, list[Task]]:
    """For each length, tasks of one turn whose prompts have almost that many tokens, never more.

    There are `count` of them, or fewer if fewer questions fit into the shortest prompt.
    """
    questions = choose_questions(target, tasks, min(lengths), count)
    return {
        length: [long_prompt(target, tasks, index, length) for index in questions]
        for length in lengths
    }


def choose_questions(target: Target, tasks: Sequence[Task], tokens: int, count: int) -> list[int]:
    """Tasks whose question fits into `tokens` tokens, from all parts of the set.

    Each part gives its first task, or the next one that fits and is not yet chosen.
    """
    if count > len(tasks):
        raise UserError(
            f"the set has {len(tasks)} tasks, too few for {count} questions: use a larger set,"
            " or lower `limit`"
        )
    lengths = [prompt_length(target, question_of(task)) for task in tasks]
    fitting = [index for index, length in enumerate(lengths) if length <= tokens]
    if not fitting:
        raise UserError(
            f"no question of the set fits into a prompt of {tokens} tokens, the shortest has"
            f" {min(lengths)}: use a longer context, lower `max_tokens`, or use another set"
        )
    chosen: list[int] = []
    for part in range(count):
        start = part * (len(tasks) // count)
        following = sorted(set(fitting) - set(chosen), key=lambda index: (index < start, index))
        chosen += following[:1]
    return chosen


def question_of(task: Task) -> Task:
    return replace(task, turns=task.turns[:1], extra={})


def long_prompt(target: Target, tasks: Sequence[Task], index: int, tokens: int) -> Task:
    """The question of task `index` behind texts of the other tasks."""
    task = question_of(tasks[index])
    words = filling_words(target, tasks, index, tokens)
    kept = count_fitting_words(target, task, words, tokens)
    return prepend(words[len(words) - kept :], task)


def filling_words(target: Target, tasks: Sequence[Task], index: int, tokens: int) -> list[str]:
    """Words of the tasks before task `index`, around the end of the set: more than `tokens`."""
    others = [*tasks[:index][::-1], *tasks[index + 1 :][::-1]]
    joined = [SEPARATOR.join(task.turns) for task in others]
    if not any(text.strip() for text in joined):
        raise UserError("a set of one task has no texts for a prompt: use a set of two or more")
    texts: list[str] = []
    total = 0
    for text in cycle(joined):
        texts.insert(0, text)
        total += len(target.tokenizer.encode(text, add_special_tokens=False))
        if total > tokens:
            break
    return WORD.findall(SEPARATOR.join(texts))


def count_fitting_words(target: Target, task: Task, words: list[str], tokens: int) -> int:
    """How many of the last words fit into a prompt of `tokens` tokens, by bisection."""
    fitting = 0
    too_many = len(words) + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if prompt_length(target, prepend(words[len(words) - middle :], task)) <= tokens:
            fitting = middle
        else:
            too_many = middle
    return fitting


def prepend(words: Sequence[str], task: Task) -> Task:
    """The task with these words in front of its question."""
    text = "".join(words).lstrip()
    return replace(task, turns=(SEPARATOR.join([text, *task.turns]),)) if text else task


def prompt_messages(task: Task) -> Messages:
    messages: Messages = [{"role": "user", "content": task.turns[0]}]
    if task.system is not None:
        messages.insert(0, {"role": "system", "content": task.system})
    return messages


def prompt_length(target: Target, task: Task) -> int:
    return len(encode_prompt(target, prompt_messages(task)))
