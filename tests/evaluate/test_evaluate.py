"""Evaluation: the counts by hand, several turns, seeds, the context's end, and the command line
on a tiny pair.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.core import Generation, Step
from peagle.data.bench import Task
from peagle.errors import UserError
from peagle.evaluate.evaluate import (
    EvaluateSettings,
    Evaluation,
    SetResult,
    answer,
    evaluate,
    measure,
    summarize,
)
from peagle.loaded import LoadedPair, load
from tests.support.command_line import run, save_tiny_pair

TASKS = [Task("a", ("w6 w9 w30",)), Task("b", ("w7 w8", "w10 w11"))]
SETTINGS = EvaluateSettings(ks=(3, 5), temperatures=(0.0, 1.0), max_tokens=12)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedPair:
    return load(str(tiny / "target"), drafter=tiny / "p-eagle", dtype="float32", device="cpu")


def test_counts_of_known_steps() -> None:
    """Two answers in one list: 4 drafts with 6 accepted tokens give a length of 1 + 6/4."""
    prefill = Step((7,))
    steps = [
        prefill,
        Step((1, 2, 3, 4), 3, 3),
        Step((5,), 3, 0),
        prefill,
        Step((1, 2), 3, 1),
        Step((1, 2), 2, 2),
    ]
    found = summarize(iter(steps), 3)
    assert (found.drafts, found.draft_tokens, found.accepted, found.tokens) == (4, 11, 6, 11)
    assert found.acceptance_length == 2.5
    assert found.accepted_per_position == (3 / 4, 2 / 4, 1 / 3)


def test_counts_without_drafts() -> None:
    found = summarize([Step((1,))], 2)
    assert (found.acceptance_length, found.accepted_per_position, found.tokens) == (
        1.0,
        (0.0, 0.0),
        1,
    )
    assert summarize([], 2).acceptance_length == 1.0


def test_counts_equal_those_of_one_generation(loaded: LoadedPair) -> None:
    one = loaded.generate("w6 w9 w30", k=3, max_tokens=30)
    found = summarize(one.steps, 3)
    assert found.acceptance_length == one.acceptance_length
    assert list(found.accepted_per_position) == one.accepted_per_position
    assert found.tokens == len(one.token_ids)


def test_trees_by_depth(loaded: LoadedPair) -> None:
    """The same answers in fewer or as many steps; positions are depths, however many nodes there
    are.
    """
    chains, trees = (
        evaluate(loaded, {"x": TASKS}, EvaluateSettings((3,), max_tokens=12, tree=tree))
        for tree in (0, 12)
    )
    [chain], [tree] = chains.results, trees.results
    assert (tree.tokens, tree.tasks) == (chain.tokens, chain.tasks)
    assert len(tree.accepted_per_position) == 3 and tree.draft_tokens <= 3 * tree.drafts
    assert tree.acceptance_length >= chain.acceptance_length
    assert (trees.as_dict()["tree"], chains.as_dict()["tree"]) == (12, 0)


def test_the_mean_weights_all_sets_equally() -> None:
    small, large = (
        SetResult(3, 1, 3, 2, 9, (), set="small"),
        SetResult(3, 100, 300, 100, 900, (), set="large"),
    )
    found = Evaluation("p", "t", "float32", True, EvaluateSettings(ks=(3,)), (small, large))
    assert found.mean(3, 0.0) == (3 + 2) / 2


def test_later_turns_see_the_earlier_ones(
    loaded: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], loaded.encode
    monkeypatch.setattr(
        loaded, "encode", lambda prompt, raw=False: seen.append(prompt[:]) or real(prompt, raw)
    )
    task = Task("b", ("w7 w8", "w10 w11"), system="w20")
    first, second = answer(loaded, task, 3, 0.0, 0, SETTINGS)
    start = [{"role": "system", "content": "w20"}, {"role": "user", "content": "w7 w8"}]
    asked = [prompt for prompt in seen if isinstance(prompt[0], dict)]
    assert asked == [
        start,
        [
            *start,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "w10 w11"},
        ],
    ]
    assert first.text
    assert second.prompt_tokens == len(real(asked[1]))


def test_every_set_k_and_temperature(loaded: LoadedPair) -> None:
    advanced: list[str] = []
    found = evaluate(loaded, {"x": TASKS, "y": TASKS[:1]}, SETTINGS, advance=advanced.append)
    key = [(result.set, result.temperature, result.k) for result in found.results]
    assert key == [(name, t, k) for name in "xy" for t in (0.0, 1.0) for k in (3, 5)]
    assert len(advanced) == 3 * 4
    assert found.results[0].tasks == 2
    for k3, k5 in zip(found.results[::2], found.results[1::2], strict=True):
        assert k3.tokens == k5.tokens  # Drafting is lossless: the answers do not depend on K.
        assert len(k5.accepted_per_position) == 5
    again = evaluate(loaded, {"x": TASKS, "y": TASKS[:1]}, SETTINGS)
    assert [replace(r, seconds=0.0) for r in again.results] == [
        replace(r, seconds=0.0) for r in found.results
    ]
    assert not found.trained


def test_each_task_and_turn_has_its_own_seed(
    loaded: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, real = [], loaded.generate

    def spy(*args, **kwargs) -> Generation:
        seeds.append(kwargs["seed"])
        return real(*args, **kwargs)

    monkeypatch.setattr(loaded, "generate", spy)
    for k in (3, 5):
        measure(loaded, "x", TASKS, k, 1.0, replace(SETTINGS, seed=40))
    assert seeds[:3] == seeds[3:]
    assert seeds[:2] == [40, 41]
    assert len(set(seeds[:3])) == 3


def test_prompts_that_do_not_fit_the_context_are_skipped(loaded: LoadedPair) -> None:
    tasks = [Task("long", ("w7 " * 300,)), Task("half", ("w6", "w8 " * 300, "w9"))]
    lines: list[str] = []
    found = measure(loaded, "x", tasks, 3, 0.0, SETTINGS, lines.append)
    assert (found.tasks, found.skipped) == (2, 3)
    assert found.tokens > 0
    assert ["task long: turn 1" in lines[0], "task half: turn 2" in lines[1]] == [True, True]


@pytest.mark.parametrize("more", [[], ["--jump"]])
def test_a_set_without_fitting_prompts_is_an_error(tiny: Path, data: Path, more: list[str]) -> None:
    long = {"id": 0, "turns": ["w7 " * 300]}
    (data / "long.jsonl").write_text(json.dumps(long) + "\n")
    message = command(tiny, data, "--set", f"gsm8k,{data / 'long.jsonl'}", *more, code=2)
    assert "no prompt of long fits the context of 256 tokens: give a set with shorter" in message
    assert message.strip().count("\n") == 0
    with (data / "long.jsonl").open("a") as file:
        file.write(json.dumps({"id": 1, "turns": ["w7 w8"]}) + "\n")
    found = json.loads(command(tiny, data, "--set", data / "long.jsonl", "--json", *more))
    assert [(result["tasks"], result["skipped"]) for result in found["results"]] == [(2, 1)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ks": (3, 0)}, "at least one token"),
        ({"method": "none"}, "nothing is drafted"),
        ({"max_tokens": 1}, "below 2 tokens"),
        ({"temperatures": (0.0, float("nan"))}, "temperature must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_invalid_settings_are_refused(wrong: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        EvaluateSettings(**{"ks": (3,)} | wrong)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, turns in {"mt_bench": ["w7 w8", "w10 w11"], "gsm8k": ["w6 w9 w30"]}.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"id": i, "turns": turns}) + "\n" for i in (0, 1))
        )
    return tmp_path


def command(tiny: Path, data: Path, *args: object, code: int = 0) -> str:
    where = ("--data", data, "--set", "mt_bench,gsm8k", "--max-tokens", 8, "--dtype", "float32")
    return run("evaluate", tiny / "target", "--drafter", tiny / "p-eagle", *where, *args, code=code)


def test_json(tiny: Path, data: Path) -> None:
    saved = data / "sub" / "result.json"
    args = ("-k", "3,2,3", "--limit", 1, "--temperature", "0,1", "--json", "--out", saved)
    found = json.loads(command(tiny, data, *args))
    assert json.loads(saved.read_text()) == found
    assert [path.name for path in saved.parent.iterdir()] == ["result.json"]
    assert found.keys() == {
        "pair",
        "target",
        "method",
        "trained",
        "dtype",
        "int8",
        "tree",
        "max_tokens",
        "seed",
        "results",
        "mean",
    }
    assert (found["method"], found["trained"], found["dtype"], found["max_tokens"]) == (
        "p-eagle",
        False,
        "float32",
        8,
    )
    assert len(found["results"]) == 2 * 2 * 2
    assert [(m["k"], m["temperature"]) for m in found["mean"]] == [(3, 0), (2, 0), (3, 1), (2, 1)]
    counts = {
        "drafts",
        "draft_tokens",
        "accepted",
        "tokens",
        "tasks",
        "skipped",
        "seconds",
        "exact",
    }
    head = {"set", "k", "temperature", "acceptance_length", "accepted_per_position"}
    for result in found["results"]:
        assert result.keys() == counts | head
        assert result["tasks"] == 1
        length = 1 + result["accepted"] / result["drafts"]
        assert result["acceptance_length"] == round(length, 4)
        assert len(result["accepted_per_position"]) == result["k"]
    lengths = [
        r["acceptance_length"] for r in found["results"] if (r["k"], r["temperature"]) == (3, 0)
    ]
    assert found["mean"][0]["acceptance_length"] == pytest.approx(sum(lengths) / 2, abs=1e-4)


def run_both(tiny: Path, data: Path, *args: object) -> tuple[str, str]:
    """Return stdout and stderr."""
    where = [
        "evaluate",
        tiny / "target",
        "--data",
        data,
        "--set",
        "gsm8k",
        "-k",
        2,
        "--max-tokens",
        4,
    ]
    result = CliRunner().invoke(app, [str(arg) for arg in (*where, *args)])
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


def test_table_and_warning(tiny: Path, data: Path) -> None:
    shown = command(tiny, data)  # with the K of the pair
    assert "K=7" in shown
    assert all(
        name in shown for name in ("mt_bench", "gsm8k", "mean", "greedy", "accepted by position")
    )
    shown, message = run_both(tiny, data, "--drafter", tiny / "eagle3", "--temperature", 0.5)
    assert "eagle3, temperature 0.5" in shown
    assert "the eagle3 drafter of this pair is untrained" in message


MISTAKES = {
    "trees of eagle3": (["--method", "eagle3", "--tree", "16"], "need a p-eagle drafter"),
    "trees as small as K": (["-k", "3,5", "--tree", "5"], "is a chain"),
    "unknown set": (["--set", "humanevel"], "Did you mean 'humaneval'"),
    "a set that is not there": (["--set", "mbpp"], "no mbpp.jsonl"),
    "no set": (["--set", ","], "no set is given"),
    "K below 1": (["-k", "3,0"], "at least one token"),
    "K that is no number": (["-k", "3;5"], "write it like -k 3,5,7"),
    "no temperature": (["--temperature", "warm"], "write it like --temperature 0,1"),
    "temperature below 0": (["--temperature", "-1"], "temperature must be"),
    "limit": (["--limit", "0"], "--limit is 0: use 1 or more"),
    "method": (["--method", "peagle"], "Did you mean 'p-eagle'"),
    "nothing drafted": (["--method", "none"], "nothing is drafted"),
    "another method than the drafter's": (["--method", "eagle3"], "it has p-eagle"),
    "out is a folder": (["--out", "{data}"], "is a folder"),
    "no drafter": (["--drafter", "{data}/nothing"], "no such folder"),
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_one_line_and_code_2(
    tiny: Path, data: Path, args: list[str], words: str
) -> None:
    message = command(tiny, data, *(arg.format(data=data) for arg in args), code=2)
    assert words in message
    assert message.count("\n") == 1


def test_broken_lines_are_reported(tiny: Path, data: Path) -> None:
    path = data / "gsm8k.jsonl"
    path.write_text("{\n" + path.read_text())
    assert "gsm8k.jsonl:1: skipped" in run_both(tiny, data, "--drafter", tiny / "p-eagle")[1]


def test_help_has_an_example() -> None:
    assert "peagle evaluate" in run("evaluate", "--help")
