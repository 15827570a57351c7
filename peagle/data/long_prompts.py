"""Prompts of a given length: texts of a set, joined in front of one of its questions.

The question is the first turn of a task. The texts of the other tasks fill the prompt, in the order
of the set, beginning behind the question's own task; what does not fit is cut at the beginning of
the prompt, at a word.

    tasks A B C D, question B, room for about two texts:    "... end of D, A, B"
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from peagle.data.bench import Task
from peagle.data.chat import Messages, encode_prompt
from peagle.errors import UserError
from peagle.target import Target

SEPARATOR = "\n\n"
WORD = re.compile(r"\s*\S+")


def long_prompts(target: Target, tasks: Sequence[Task], tokens: int, count: int) -> list[Task]:
    """`count` tasks of one turn, whose prompts have almost `tokens` tokens, never more."""
    if count > len(tasks):
        raise UserError(
            f"the set has {len(tasks)} tasks, too few for {count} questions: use a larger set,"
            " or lower `limit`"
        )
    step = len(tasks) // count  # Questions come from all parts of the set.
    return [long_prompt(target, tasks, i * step, tokens) for i in range(count)]


def long_prompt(target: Target, tasks: Sequence[Task], index: int, tokens: int) -> Task:
    """The question of task `index` behind texts of the other tasks."""
    task = replace(tasks[index], turns=tasks[index].turns[:1], extra={})
    length = prompt_length(target, task)
    if length > tokens:
        raise UserError(
            f"task {task.id} has {length} tokens, more than a prompt of {tokens} tokens holds:"
            " use a longer context, or another set"
        )
    words = filling_words(target, tasks, index, tokens)
    kept = count_fitting_words(target, task, words, tokens)
    if kept == len(words):
        length = prompt_length(target, prepend(words, task))
        raise UserError(
            f"all {len(tasks)} tasks of the set make a prompt of {length} tokens, but {tokens} are"
            " needed: use a larger set, or a shorter context"
        )
    return prepend(words[len(words) - kept :], task)


def filling_words(target: Target, tasks: Sequence[Task], index: int, tokens: int) -> list[str]:
    """Words of the tasks before task `index`, around the end of the set; enough, if it has them."""
    texts: list[str] = []
    total = 0
    for other in [*tasks[:index][::-1], *tasks[index + 1 :][::-1]]:
        text = SEPARATOR.join(other.turns)
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
