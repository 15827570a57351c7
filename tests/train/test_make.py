"""`peagle make-drafter`: all stages, the recipe that fits the hardware, and the published folder
with its model card.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle.catalog.pair import DrafterSource, Pair, TargetSource
from peagle.cli import app
from peagle.cli.training.make_drafter import card_command, choose_config
from peagle.data.bench import Task
from peagle.drafter.formats import checkpoint
from peagle.evaluate.evaluate import EvaluateSettings, evaluate
from peagle.evaluate.offline_acceptance import offline_acceptance
from peagle.loaded import LoadedPair
from peagle.target import Target
from peagle.train.card import model_card
from peagle.train.config import TrainConfig
from peagle.train.make import choose_pack_tokens, choose_recipe
from tests.support.command_line import run
from tests.support.models.chat_targets import make_chat_target, save_chat_target
from tests.support.models.tiny_models import AUX, make_drafter, make_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat target on disk, and prompts for it."""
    path = tmp_path_factory.mktemp("make")
    save_chat_target(path / "target")
    lines = [json.dumps({"turns": [f"w{3 + i % 60} w{40 + i % 50}"]}) for i in range(40)]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


def make(folder: Path, out: Path, *more: str) -> str:
    words = [
        "make-drafter",
        str(folder / "target"),
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--out",
        str(out),
    ]
    small = [
        "pack_tokens=256",
        "max_anchors=64",
        "layers=1",
        "k=4",
        "eval_k=3",
        "aux_layer_ids=1,3,6",
        "mask_token_id=5",
    ]
    done = CliRunner().invoke(
        app, [*words, "--epochs", "2", *(w for s in small for w in ("--set", s)), *more]
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_every_stage_and_a_second_run(folder: Path, tmp_path: Path) -> None:
    text = make(folder, tmp_path / "out", "--set", "held_out=4")
    assert "acceptance length" in text
    published = tmp_path / "out" / "p-eagle" / "published"
    pictures = {"curves.png", "calibration.png"}
    assert {f.name for f in published.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    } | pictures
    assert "| steps |" in (published / "README.md").read_text()
    target = Target(make_chat_target().model)
    config = checkpoint.load(published, target, target.dtype).config
    assert config.trained and config.sliding_window == 1024
    exported = tmp_path / "vllm"
    run("export", published, exported, "--target", folder / "target", "--to", "vllm")
    layers = checkpoint.read(exported).raw
    assert (layers["sliding_window"], layers["layer_types"]) == (1024, ["sliding_attention"])
    again = make(folder, tmp_path / "out", "--set", "held_out=4")
    assert "resuming" in again and "0 answered" in again


def test_no_answers_are_added_after_training_has_started(folder: Path, tmp_path: Path) -> None:
    words = ("--set", "held_out=2")
    out = tmp_path / "out"
    make(folder, out, *words, "--limit", "9", "--stop-after", "0")
    answers = (out / "answers" / "answers.jsonl").read_text()
    again = make(folder, out, *words, "--answer-minutes", "0.5")
    assert "no more answers" in again and "0 answered" in again and "resuming" in again
    assert (out / "answers" / "answers.jsonl").read_text() == answers
    card = (out / "p-eagle" / "published" / "README.md").read_text()
    assert "--answer-minutes 0.5 --epochs 2.0 --set" in card
    changed = [*words, "--method", "eagle3", "--set", "aux_layer_ids=1,3,6"]
    other = make(folder, out, *changed, "--stop-after", "0")
    assert "no more answers" in other and "2. training" in other
    assert (out / "answers" / "answers.jsonl").read_text() == answers


def test_the_card_shows_numbers_as_given() -> None:
    numbers = {"limit": 1_234_567, "invent": 0, "answer-minutes": None, "epochs": 6.5}
    assert card_command("x", numbers, ["k=7"]) == "x --limit 1234567 --epochs 6.5 --set k=7"


def test_answer_minutes_limits_the_answers(folder: Path, tmp_path: Path) -> None:
    """The time limit expires before the first answer, so training finds no answers."""
    words = ["make-drafter", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    words += ["--out", str(tmp_path / "out"), "--set", "layers=1", "--answer-minutes"]
    done = CliRunner().invoke(app, [*words, "1e-9"])
    assert done.exit_code == 2 and "0 answered" in done.output and "no answer" in done.output
    for minutes in ("0", "nan"):
        refused = CliRunner().invoke(app, [*words, minutes])
        assert refused.exit_code == 2 and "use more than 0" in refused.output


def test_pack_size_and_recipe_fit_the_memory() -> None:
    target = make_target()
    assert choose_pack_tokens(target, None) == 1024
    sizes = [choose_pack_tokens(target, int(gb * 1e9)) for gb in (0.01, 0.5, 2, 140)]
    assert sizes == sorted(sizes) and sizes[0] == 1024 and sizes[-1] == 16384
    chosen = choose_recipe(target, "tiny", "eagle3", Path("x"), 2.0, None)
    assert chosen.config.k == 7 and chosen.config.num_layers == 1 and chosen.config.draft_vocab == 0
    assert chosen.config.dependency == 0 and chosen.config.window == 1024
    chosen = choose_recipe(target, "tiny", "p-eagle", Path("x"), 2.0, None)
    assert chosen.config.dependency == 64 and chosen.config.window == 1024


@pytest.mark.parametrize(
    ("long", "changes", "expected"),
    [
        (0, [], 1024),
        (8192, [], 1024),
        (0, ["sliding_window=-1"], None),
        (0, ["sliding_window=128"], 128),
        (0, ["init=random"], 1024),
        (0, ["init=earlier"], None),  # inherited when the run begins (drafter_init.py)
        (0, ["init=earlier", "sliding_window=128"], 128),
    ],
)
def test_the_sliding_window(
    folder: Path, long: int, changes: list[str], expected: int | None
) -> None:
    config, _ = choose_config(str(folder / "target"), "eagle3", folder, 2.0, "cpu", long, changes)
    assert config.window == expected and config.max_length == (long or 256)
    assert (config.sliding_window == 0) == (changes == ["init=earlier"])


@pytest.mark.parametrize(("changes", "expected"), [([], 7), (["k=4"], 4), (["k=4", "eval_k=6"], 6)])
def test_the_measured_k(folder: Path, changes: list[str], expected: int) -> None:
    config, _ = choose_config(str(folder / "target"), "p-eagle", folder, 2.0, "cpu", 0, changes)
    assert config.logged_k == expected


def test_a_wrong_drafter_is_reported_before_the_answers(folder: Path, tmp_path: Path) -> None:
    words = ["make-drafter", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    done = CliRunner().invoke(
        app, [*words, "--out", str(tmp_path / "out"), "--set", f"init={tmp_path / 'nothing'}"]
    )
    assert done.exit_code == 2 and "there is no such folder" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [["make-drafter", "x"], ["make-drafter", "x", "--invent", "3", "--method", "none"]]
)
def test_bad_input(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "error:" in done.output


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_offline_acceptance_equals_decoding(method: str) -> None:
    """The results differ only in drafts past the end of an answer, which decoding alone counts."""
    target = make_chat_target()
    drafter = make_drafter(target, method, 1)
    pair = Pair("tiny", TargetSource(("folder",)), {method: DrafterSource()}, method, 3)
    loaded = LoadedPair(pair, target, {method: drafter})
    tasks = {"a": [Task(str(i), [f"w{5 + i} w{50 + i}", f"w{60 + i}"]) for i in range(4)]}
    settings = EvaluateSettings((2, 3), (0.0,), method, max_tokens=20)
    decoded, offline = (
        evaluate(loaded, tasks, settings),
        offline_acceptance(loaded, tasks, settings),
    )
    for mine, theirs in zip(offline.results, decoded.results, strict=True):
        assert (mine.k, mine.set, mine.drafts) == (theirs.k, theirs.set, theirs.drafts)
        assert theirs.accepted - 8 * mine.k <= mine.accepted <= theirs.accepted


def test_the_card_lists_settings_that_differ_from_the_defaults() -> None:
    drafter = make_drafter(make_target(), "p-eagle", 2).config
    results = [
        {
            "set": "x",
            "k": 3,
            "temperature": 0.0,
            "acceptance_length": 2.5,
            "tasks": 7,
            "accepted_per_position": [0.8, 0.5, 0.2],
        }
    ]
    mean = [{"k": 3, "temperature": 0.0, "acceptance_length": 2.5}]
    text = model_card(
        replace(drafter, target="T"),
        TrainConfig(lr=0.5, aux_layer_ids=AUX),
        {"steps": 1234},
        [{"results": results, "mean": mean, "max_tokens": 64}],
        ["peagle train"],
    )
    for part in (
        "P-EAGLE drafter, 2 layers, for T",
        "| steps | 1,234 |",
        "| x | 7 | 2.50 |",
        "lr: 0.5",
        "peagle train",
    ):
        assert part in text
    assert "optimizer" not in text
