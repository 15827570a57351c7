"""Prompts of a given length, filled with the texts of a set."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from peagle.data.bench import Task, read_sets
from peagle.data.long_prompts import filling_words, long_prompts, prompt_length
from peagle.errors import UserError
from peagle.loaded import load
from peagle.paths import cache_home
from peagle.target import Target
from tests.support.bench.humaneval import DATA
from tests.support.command_line import save_tiny_pair

TASKS = [Task(str(i), (f"w{10 + i} w7 w{20 + i}", "w8")) for i in range(40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = save_tiny_pair(tmp_path_factory.mktemp("tiny"))
    return load(str(folder / "target"), dtype="float32", device="cpu").target


def test_length_and_question(target: Target) -> None:
    lengths = (5, 6, 20, 100)
    by_length = long_prompts(target, TASKS, lengths, 5)
    assert tuple(by_length) == lengths
    for tokens, prompts in by_length.items():
        assert [prompt.id for prompt in prompts] == ["0", "8", "16", "24", "32"]
        for prompt in prompts:
            assert prompt_length(target, prompt) == tokens  # The tokenizer has one token per word.
            question = TASKS[int(prompt.id)].turns[0]
            assert prompt.turns[0] == question or prompt.turns[0].endswith("\n\n" + question)


def test_filling_texts_exclude_the_question(target: Target) -> None:
    words = "".join(filling_words(target, TASKS, 1, 10))
    assert words == "w48 w7 w58\n\nw8\n\nw49 w7 w59\n\nw8\n\nw10 w7 w20\n\nw8"


def test_texts_of_a_small_set_repeat(target: Target) -> None:
    tasks = [Task(name, (f"w{number}",)) for number, name in enumerate("ABCD", start=20)]
    words = filling_words(target, tasks, 1, 4)
    assert " ".join(map(str.strip, words)) == "w23 w20 w22 w23 w20"
    [prompt] = long_prompts(target, tasks, [300], 1)[300]
    assert prompt_length(target, prompt) == 300
    with pytest.raises(UserError, match="a set of one task has no texts"):
        long_prompts(target, tasks[:1], [300], 1)


def test_questions_that_do_not_fit_are_skipped(target: Target) -> None:
    """They are skipped at every length, so that all lengths have the same questions."""
    long = Task("long", (" ".join(["w9"] * 30),))
    tasks = [long if i in (0, 8, 9, 39) else task for i, task in enumerate(TASKS)]
    by_length = long_prompts(target, tasks, [200, 20], 5)
    for prompts in by_length.values():
        assert [prompt.id for prompt in prompts] == ["1", "10", "16", "24", "32"]
    few = [long, *TASKS[1:3], long, long]
    assert [prompt.id for prompt in long_prompts(target, few, [20], 4)[20]] == ["1", "2"]
    with pytest.raises(UserError, match=r"no question of the set fits .* the shortest has 31"):
        long_prompts(target, [long, long], [20], 1)


def test_the_system_prompt_is_kept(target: Target) -> None:
    tasks = [Task(task.id, task.turns, system="w30 w31") for task in TASKS]
    [prompt] = long_prompts(target, tasks, [50], 1)[50]
    assert prompt.system == "w30 w31" and prompt_length(target, prompt) == 50


def test_too_few_tasks(target: Target) -> None:
    with pytest.raises(UserError, match="40 tasks, too few for 41 questions"):
        long_prompts(target, TASKS, [100], 41)


@cache
def cached_tokenizer(model: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(cache_home() / "targets" / model)


@pytest.mark.parametrize("name", sorted(file.stem for file in DATA.glob("*.jsonl")))
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_every_set_fills_the_documented_lengths(model: str, name: str) -> None:
    """`peagle evaluate --context 512,1k,2k,4k,8k` with answers of 256 tokens, the default."""
    if not (cache_home() / "targets" / model).is_dir():
        pytest.skip(f"{model} is not in the cache")
    target: Any = SimpleNamespace(tokenizer=cached_tokenizer(model), name=model)
    [tasks] = read_sets([name], DATA).values()
    for tokens, [prompt] in long_prompts(target, tasks[:300], [256, 7936], 1).items():
        assert 0.9 * tokens < prompt_length(target, prompt) <= tokens
