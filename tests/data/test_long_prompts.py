"""Prompts of a given length from the texts of a set."""

from pathlib import Path

import pytest

from peagle.data.bench import Task
from peagle.data.long_prompts import filling_words, long_prompts, prompt_length
from peagle.errors import UserError
from peagle.loaded import load
from peagle.target import Target
from tests.support.command_line import save_tiny_pair

TASKS = [Task(str(i), (f"w{10 + i} w7 w{20 + i}", "w8")) for i in range(40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = save_tiny_pair(tmp_path_factory.mktemp("tiny"))
    return load(str(folder / "target"), dtype="float32", device="cpu").target


@pytest.mark.parametrize("tokens", [5, 6, 20, 100])
def test_length_and_question(target: Target, tokens: int) -> None:
    prompts = long_prompts(target, TASKS, tokens, 5)
    assert [prompt.id for prompt in prompts] == ["0", "8", "16", "24", "32"]
    for prompt in prompts:
        assert prompt_length(target, prompt) == tokens  # a word is a token here
        question = TASKS[int(prompt.id)].turns[0]
        assert prompt.turns[0] == question or prompt.turns[0].endswith("\n\n" + question)


def test_texts_come_from_the_tasks_before_and_never_from_the_question(target: Target) -> None:
    words = "".join(filling_words(target, TASKS, 1, 10))
    assert words == "w48 w7 w58\n\nw8\n\nw49 w7 w59\n\nw8\n\nw10 w7 w20\n\nw8"


def test_the_system_prompt_is_kept(target: Target) -> None:
    tasks = [Task(task.id, task.turns, system="w30 w31") for task in TASKS]
    [prompt] = long_prompts(target, tasks, 50, 1)
    assert prompt.system == "w30 w31" and prompt_length(target, prompt) == 50


def test_bad_input(target: Target) -> None:
    with pytest.raises(UserError, match="40 tasks, too few for 41 questions"):
        long_prompts(target, TASKS, 100, 41)
    with pytest.raises(UserError, match=r"make a prompt of .* tokens, but 300 are needed"):
        long_prompts(target, TASKS, 300, 1)
    with pytest.raises(UserError, match="task 0 has 5 tokens, more than"):
        long_prompts(target, TASKS, 3, 1)
