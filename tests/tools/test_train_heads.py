"""The job that trains the shipped drafters: prompts, answers, training, measurement, resuming."""

import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from peagle.core import Method, Step
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint
from peagle.drafter.formats.row_format import INT4
from peagle.regenerate.answers import Counts
from peagle.regenerate.job import VALIDATION_FILE
from peagle.regenerate.prompts import read_prompts
from peagle.train.data.documents import Document, join_documents
from peagle.train.evaluation import calibration
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.features.features import FeatureSource
from tests.support.bench.benching import tiny_folder, write_set
from tests.support.models.tiny_models import MASK
from tools import train_heads
from tools.heads import data as heads_data
from tools.heads import measure as heads_measure
from tools.heads import rungs as heads_rungs
from tools.heads.data import Size
from tools.heads.measure import answer_counts
from tools.heads.recipes import DEFAULT_PAIR, RECIPES, RUNGS, Recipe, stored_bytes
from tools.heads.rungs import context_table, rung_table

TINY = Size(
    prompts=24,
    max_prompt=60,
    max_tokens=16,
    invented=0,
    long_prompts=60,
    long=120,
    long_answer=12,
    tasks=2,
    task_answer=12,
    contexts=(40, 60),
    context_prompts=1,
    context_answer=12,
)
METHODS: tuple[Method, ...] = ("p-eagle", "eagle3")
RECIPE = {
    "aux_layer_ids": (1, 3, 6),
    "mask_token_id": MASK,
    "pack_tokens": 128,
    "max_anchors": 60,
    "held_out": 3,
    "joined": 0.3,
    "loss": "lk",
    "epochs": 1.0,
    "log_every": 1,
    "eval_k": 3,
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_folder(tmp_path_factory.mktemp("heads"))
    (root / "bench").mkdir()
    for name in heads_data.SETS:
        write_set(root / "bench" / f"{name}.jsonl", 30)
    write_set(root / "all.jsonl", 70)
    return root


@pytest.fixture
def tiny(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the default pair by a tiny pair."""
    shapes: dict[Method, dict] = {
        method: {"k": 4, "layers": checkpoint.read(workspace / method).config.num_layers}
        for method in ("p-eagle", "eagle3")
    }
    monkeypatch.setattr(heads_data, "VALIDATION", 4)
    monkeypatch.setattr(train_heads, "Size", lambda: TINY)
    settings = RECIPE | {"target": str(workspace / "target")}
    recipe = Recipe(settings, shapes, {}, workspace)
    monkeypatch.setitem(RECIPES, DEFAULT_PAIR, recipe)
    monkeypatch.setattr(train_heads, "SNAPSHOT_SECONDS", 0.0)


def prepared_run(workspace: Path, name: str) -> list[str]:
    """Prepare prompts in a folder of this name; return the arguments of `run`."""
    prompts = workspace / name
    assert train_heads.main(["prepare", str(workspace / "all.jsonl"), "--out", str(prompts)]) == 0
    return ["run", "--prompts", str(prompts), "--bench", str(workspace / "bench")]


@pytest.mark.slow
def test_a_job_in_two_runs(workspace: Path, tiny: None, tmp_path: Path) -> None:
    prompts, out = workspace / "prompts", tmp_path / "out"
    assert train_heads.main(["prepare", str(workspace / "all.jsonl"), "--out", str(prompts)]) == 0
    held_out = {p.turns[0] for p in read_prompts(prompts / VALIDATION_FILE)}
    training = {p.turns[0] for p in read_prompts(prompts / heads_data.PROMPTS_FILE)}
    assert len(held_out) == 4 and len(training) == 66 and not held_out & training

    def run(stages: str, *more: str) -> int:
        folders = [
            "--prompts",
            str(prompts),
            "--bench",
            str(workspace / "bench"),
            "--out",
            str(out),
        ]
        return train_heads.main(["run", *folders, "--stages", stages, "--answers", "9,0,9", *more])

    assert run("answers,p-eagle", "--set", "lr=0.001") == 0
    assert not (out / "files" / "eagle3.tar").exists()
    assert run("answers,p-eagle,eagle3,measure", "--set", "lr=0.001") == 0
    for method in ("p-eagle", "eagle3"):
        with tarfile.open(out / "files" / f"{method}.tar") as archive:
            assert {"config.json", "model.safetensors", "README.md"} <= set(archive.getnames())
        assert checkpoint.read(out / method / "published").config.trained
    steps = [json.loads((out / f"training-{m}.json").read_text())["steps"] for m in METHODS]
    assert steps[0] == steps[1] > 1
    measured = json.loads((out / "files" / "measured.json").read_text())
    assert set(measured) == {f"{when} {m}" for when in ("new", "shipped") for m in METHODS}
    sets = [*heads_data.SETS, "context-40", "context-60", "validation"]
    assert sorted(measured["new p-eagle"]) == sorted(sets)
    assert all(record["tree 31"] >= 1 for record in measured["shipped p-eagle"].values())
    counts = json.loads((out / "files" / train_heads.COUNTS_FILE).read_text())
    for kind, name in (("chain", "K=7"), ("tree", "tree 31")):
        drafts, accepted = np.sum(counts["new p-eagle"][kind]["humaneval"], axis=0)
        expected = pytest.approx(1 + accepted / drafts, abs=1e-4)
        assert measured["new p-eagle"]["humaneval"][name] == expected


@pytest.mark.slow
def test_a_snapshot_can_be_served(workspace: Path, tiny: None, tmp_path: Path) -> None:
    """Recover a drafter from a job that was interrupted in the second half of its training."""
    out = tmp_path / "out"
    words = [*prepared_run(workspace, "prompts-2"), "--out", str(out)]
    words += ["--stages", "answers,p-eagle", "--answers", "9,0,9"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_heads, "write_record", interrupt)
        train_heads.main([*words, "--p-eagle", "0.5", "--set", "epochs=50"])
    with tarfile.open(out / "files" / "p-eagle-snapshot.tar") as archive:
        archive.extractall(tmp_path / "snapshot", filter="data")
    assert checkpoint.read(tmp_path / "snapshot").config.trained


def test_another_seed_gives_other_answers(
    workspace: Path,
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another seed needs another folder: one with answers is refused."""
    seeds: dict[str, int] = {}

    def regenerated(target, prompts, out: Path, settings, stop_after: float) -> Counts:
        seeds[out.name] = settings.seed
        return Counts()

    def invented(target, count: int, out: Path, seed: int) -> Path:
        seeds["prompts"] = seed
        return write_set(tmp_path / "invented.jsonl", 3)

    monkeypatch.setattr(heads_data, "regenerate", regenerated)
    monkeypatch.setattr(heads_data, "invent", invented)
    words = prepared_run(workspace, "prompts-8")
    words += ["--stages", "answers", "--answers", "9,9,9", "--out"]
    for out, more, first in (("a", [], 11), ("b", ["--seed", "30"], 30)):
        assert train_heads.main([*words, str(tmp_path / out), *more]) == 0
        others = dict.fromkeys(("prompts", "invented", "long"), first + 1)
        assert seeds == {"short": first} | others
    assert train_heads.main([*words, str(tmp_path / "a")]) == 0
    assert train_heads.main([*words, str(tmp_path / "a"), "--seed", "30"]) == 2
    assert "give another --out" in capsys.readouterr().err


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_rungs_in_two_runs(
    workspace: Path, tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rungs have the same documents and minutes; a rung with a record is not trained again."""
    out = tmp_path / "out"
    words = [*prepared_run(workspace, "prompts-3"), "--out", str(out)]
    words += ["--stages", "answers,rungs", "--answers", "9,0,9", "--rung-seconds", "0.5"]
    assert train_heads.main([*words, "--rungs", "base,on-policy"]) == 0
    first = json.loads((out / "files" / "rungs.json").read_text())
    assert list(first) == ["base", "on-policy"] and first["base"]["settings"] == {}
    assert train_heads.main([*words, "--rungs", "on-policy,tree,convolution,refine"]) == 0
    records = json.loads((out / "files" / "rungs.json").read_text())
    assert records["on-policy"] == first["on-policy"]
    assert list(records) == ["base", "on-policy", "tree", "convolution", "refine"]
    assert {r["bytes"] for r in records.values()} > {records["base"]["bytes"]}
    assert all(r["steps"] > 0 for r in records.values())
    table = capsys.readouterr().out.splitlines()
    assert table[-2].startswith("| refine |") and "validation K=7" in table[-8]
    assert checkpoint.read(out / "rungs" / "tree" / "stored").config.trained


def train_rungs(workspace: Path, prompts: str, out: Path, rungs: str) -> int:
    words = [*prepared_run(workspace, prompts), "--out", str(out)]
    words += ["--stages", "answers,rungs", "--answers", "9,0,0", "--rung-seconds", "0.2"]
    return train_heads.main([*words, "--rungs", rungs])


@pytest.mark.slow
def test_a_rung_that_fails(
    workspace: Path,
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A loss that is not finite is one line; the other rungs are trained and in the table."""
    out = tmp_path / "out"
    monkeypatch.setitem(RUNGS, "on-policy", {"lr": 1e30})
    assert train_rungs(workspace, "prompts-5", out, "base,on-policy,tree") == 0
    assert list(json.loads((out / "files" / "rungs.json").read_text())) == ["base", "tree"]
    lines = capsys.readouterr().out.splitlines()
    [failed] = [line for line in lines if "failed" in line]
    assert failed.startswith("on-policy: failed: the loss of step ")
    assert [line.split(" | ")[0] for line in lines[-3:-1]] == ["| base", "| tree"]


def test_the_table_after_an_error(
    workspace: Path,
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    measured: list[tuple[float, ...]] = []  # calibration factors of the measured drafters

    def new_replay(drafter: Drafter, features: FeatureSource) -> DraftReplay:
        measured.append(drafter.config.calibration)
        return heads_measure.new_replay(drafter, features)

    monkeypatch.setattr(heads_rungs, "new_replay", new_replay)
    monkeypatch.setattr(calibration, "MIN_ROWS_PER_DEPTH", 5)
    monkeypatch.setitem(RUNGS, "on-policy", {"on_policy": 2.0})
    assert train_rungs(workspace, "prompts-6", out, "base,on-policy") == 2
    records = json.loads((out / "files" / "rungs.json").read_text())
    assert list(records) == ["base"]
    factors = records["base"]["calibration"]
    assert len(factors) == 4 and factors[0] != 1 and measured == [tuple(factors)]
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("| base |")
    assert "on_policy is 2.0" in captured.err


def test_no_rung_starts_without_time(workspace: Path, tiny: None, tmp_path: Path, capsys) -> None:
    words = prepared_run(workspace, "prompts-4")
    words += ["--out", str(tmp_path), "--stages", "answers,rungs", "--answers", "9,0,9"]
    assert train_heads.main([*words, "--seconds", "1"]) == 0
    assert "base: no time left; run again" in capsys.readouterr().out
    assert not list((tmp_path / "rungs").glob("*.json"))


@pytest.mark.slow
def test_rungs_of_equal_steps_and_another_method(
    workspace: Path, tiny: None, tmp_path: Path
) -> None:
    """Two commands share a folder; covers EAGLE-3 alone and other windows in long contexts."""
    out = tmp_path / "out"
    words = [*prepared_run(workspace, "prompts-7"), "--out", str(out)]
    words += ["--answers", "9,0,9"]
    assert train_heads.main([*words, "--stages", "bench,answers"]) == 0
    assert not (out / "rungs").exists() and not (out / "eagle3").exists()
    steps = ["--stages", "rungs", "--rung-steps", "2"]
    assert train_heads.main([*words, *steps, "--rungs", "eagle3"]) == 0
    assert train_heads.main([*words, *steps, "--rungs", "base,base@3"]) == 0
    records = json.loads((out / "files" / "rungs.json").read_text())
    assert list(records) == ["base", "base@3", "eagle3"]
    assert {record["steps"] for record in records.values()} == {2}
    assert records["base@3"]["settings"] == {"seed": 3} and not records["eagle3"]["tree"]
    more = ["--stages", "eagle3,measure", "--eagle3", "0.5", "--windows", "64,0"]
    assert train_heads.main([*words, *more]) == 0
    measured = json.loads((out / "files" / "measured.json").read_text())
    assert set(measured["new eagle3, window 0"]) == {"context-40", "context-60"}


def test_eagle3_without_p_eagle(workspace: Path, tiny: None, tmp_path: Path, capsys) -> None:
    words = ["run", "--prompts", "p", "--bench", "b", "--out", str(tmp_path)]
    assert train_heads.main([*words, "--stages", "eagle3"]) == 2
    assert "give --eagle3 seconds" in capsys.readouterr().err


def test_table_of_two_methods() -> None:
    """Changes are relative to the first rung of the method; EAGLE-3 has no trees."""
    counts = {"validation": [[10, 20], [10, 20]], "gsm8k": [[10, 10]]}
    better = {"validation": [[10, 25], [10, 20]], "gsm8k": [[10, 10]]}
    record = {"steps": 2, "seconds": 1.0, "settings": {}, "chain": counts, "tree": counts}
    other = record | {"settings": {"method": "eagle3"}, "tree": {}}
    table = rung_table({"base": record, "eagle3": other, "eagle3-norms": other | {"chain": better}})
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert rows[0][4].startswith("+0.0%") and rows[0][5] == "3.000"
    assert rows[1][4].startswith("+0.0%") and rows[1][5:7] == ["–", "–"]
    assert rows[2][3] == "3.250" and rows[2][4].startswith("+8.3%")


def test_table_of_long_contexts() -> None:
    base = {"validation": [[10, 20]], "context-500": [[10, 20], [10, 20]], "context-9": [[4, 4]]}
    other = base | {"context-500": [[10, 24], [10, 20]]}
    table = context_table({"base": {"chain": base}, "dpace": {"chain": other}}).splitlines()
    assert table[0] == "| rung | 500 | 9 |" and table[2] == "| base | 3.00 | 2.00 |"
    assert re.fullmatch(
        r"\| dpace \| 3\.20 \(\+6\.7% ± [1-9]\.\d%\) \| 2\.00 \(\+0\.0% ± 0\.0%\) \|", table[3]
    )


def test_counts_of_answers() -> None:
    """Steps are in the order of the documents; the first token of an answer is not replayed."""
    masks = ([0, 1, 1, 1, 1], [0, 0, 1], [1, 1, 0, 1, 1, 0, 1, 1, 1])
    documents = join_documents(
        [Document(np.arange(len(m)), np.array(m, bool), f"{i}") for i, m in enumerate(masks)]
    )
    steps = [Step((1, 2), 7, 1), Step((3,), 7, 0), Step((4,), 7, 3), Step((5, 6), 7, 2)]
    assert answer_counts(steps, documents).tolist() == [[2, 1], [0, 0], [2, 5]]


SHIPPED_HEADS = [
    (pair, method)
    for pair, recipe in RECIPES.items()
    for method in recipe.methods
    if (recipe.shipped / method).is_dir()
]


@pytest.mark.parametrize(("pair", "method"), SHIPPED_HEADS)
def test_recipes_give_the_shipped_shapes(pair: str, method: Method) -> None:
    config = RECIPES[pair].config(method)
    shipped = checkpoint.read(RECIPES[pair].shipped / method).config
    for name in ("num_layers", "intermediate_size", "draft_vocab_size", "aux_layer_ids"):
        assert getattr(config, name) == getattr(shipped, name)
    assert (config.dependency, config.sliding_window) == (shipped.dependency, 1024)
    assert shipped.sliding_window == 1024


@pytest.mark.parametrize(("pair", "method"), SHIPPED_HEADS)
def test_sizes_of_recipes(pair: str, method: Method) -> None:
    """The computed size is that of the shipped drafter; its draft vocabulary is one bitmap."""
    config = RECIPES[pair].config(method)
    shipped = RECIPES[pair].shipped / method / "model.safetensors"
    assert abs(stored_bytes(config, INT4) - shipped.stat().st_size) < 1024


@pytest.mark.slow
def test_all_drafters_fit_into_the_package() -> None:
    sizes = [stored_bytes(r.config(m), INT4) for r in RECIPES.values() for m in r.methods]
    assert len(sizes) == 4 and sum(sizes) < 28e6


@pytest.mark.parametrize(
    ("option", "words"),
    [(("--pair", "gpt-5"), "no recipe for gpt-5"), (("--rungs", "moon"), "unknown rung moon")],
)
def test_unknown_options_are_refused(
    option: tuple[str, str], words: str, tmp_path: Path, capsys
) -> None:
    folders = ["--prompts", "p", "--bench", "b", "--out", str(tmp_path)]
    assert train_heads.main(["run", *folders, *option]) == 2
    assert words in capsys.readouterr().err


def test_unknown_stages_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--prompts", "p", "--bench", "b", "--out", str(tmp_path), "--stages", "sleep"]
    assert train_heads.main(words) == 2
    assert "unknown stage sleep" in capsys.readouterr().err
