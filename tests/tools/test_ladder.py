"""The ladder: runs with one target are trained, measured and resumed; speeds are measured, too."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from peagle.catalog import find_pair
from peagle.drafter.formats import checkpoint
from peagle.target import load_target
from peagle.train.data.documents import Document, join_documents
from tests.support.bench.benching import tiny_folder, write_set
from tests.support.models.tiny_models import MASK
from tests.support.train.training import some_answers
from tools import ladder, ladder_speed

LADDER = f"""
[base]
aux_layer_ids = [1, 3, 6]
mask_token_id = {MASK}
pack_tokens = 384
layers = 1
k = 4
held_out = 0
optimizer = "adamw"
log_every = 2

[[run]]
name = "plain"
label = "plain"
seeds = [0, 1]

[[run]]
name = "tv"
label = "total variation"
set = {{ loss = "tv" }}

[[run]]
name = "broken"
label = "never trains"
set = {{ layers = 99 }}

[[run]]
name = "combined"
label = "chosen late"
chosen = true
"""


pytestmark = pytest.mark.slow  # half a minute of training for an internal tool


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, benchmark sets and a ladder."""
    root = tiny_folder(tmp_path_factory.mktemp("ladder"))
    (root / "ladder.toml").write_text(LADDER)
    (root / "bench").mkdir()
    write_set(root / "bench" / "humaneval.jsonl", 4)
    write_set(root / "bench" / "mt_bench.jsonl", 3, turns=2)
    return root


def run_ladder(workspace: Path, out: Path, *more: str) -> int:
    data = some_answers()[1] / "answers.jsonl"
    given = {
        "--data": data,
        "--bench": workspace / "bench",
        "--out": out,
        "--steps": 4,
        "--max-tokens": 12,
    }
    words = [str(workspace / "ladder.toml"), *(str(x) for pair in given.items() for x in pair)]
    return ladder.main(
        [*words, "--sets", "humaneval,mt_bench", "--base", f"target={workspace / 'target'}", *more]
    )


@pytest.fixture(scope="module")
def finished_ladder(workspace: Path) -> Path:
    out = workspace / "out"
    assert run_ladder(workspace, out, "--answers", str(workspace / "answers.pkl")) == 1, (
        "one of the runs cannot be trained"
    )
    return out


def test_every_run_leaves_a_drafter_and_a_record(workspace: Path, finished_ladder: Path):
    names = {"plain-0", "plain-1", "tv-0"}
    assert {path.stem for path in finished_ladder.glob("*.json")} == names
    assert {
        path.name for path in finished_ladder.iterdir() if path.is_dir() and path.name[0] != "."
    } == names
    target = load_target(workspace / "target", torch.float32, "cpu", "tiny", None)
    for name in names:
        record = json.loads((finished_ladder / f"{name}.json").read_text())
        assert (
            f"{record['name']}-{record['seed']}" == name
            and record["steps"] == 4
            and record["target_tokens"] > 0
        )
        assert (
            record["seconds_compiled"] > 0 and record["bytes"] > 1000 and record["device"] == "CPU"
        )
        lengths = record["sets"]["mt_bench"]
        forms = ["K=3", "K=5", "K=7", "K=11", "tree 15, K=7", "tree 31, K=7", "tree 31, K=11"]
        assert lengths["answers"] == 6 and list(lengths) == ["answers", *forms]
        assert (
            lengths["tree 31, K=7"]["acceptance_length"]
            >= lengths["tree 15, K=7"]["acceptance_length"]
        )
        shares = lengths["K=7"]["accepted_per_position"]
        assert lengths["K=7"]["acceptance_length"] == pytest.approx(1 + sum(shares), abs=1e-3)
        assert checkpoint.load(finished_ladder / name, target, torch.float32).config.trained
    assert json.loads((finished_ladder / "tv-0.json").read_text())["settings"] == {"loss": "tv"}


def test_further_seeds_run_last_and_differ(finished_ladder: Path):
    first, second = (
        json.loads((finished_ladder / f"plain-{seed}.json").read_text()) for seed in (0, 1)
    )
    assert first["sets"] != second["sets"]
    order = sorted(
        ("plain-0", "plain-1", "tv-0"),
        key=lambda name: (finished_ladder / f"{name}.json").stat().st_mtime_ns,
    )
    assert order == ["plain-0", "tv-0", "plain-1"]


def test_runs_with_a_record_are_not_repeated(
    workspace: Path, finished_ladder: Path, capsys: pytest.CaptureFixture[str]
):
    before = (finished_ladder / "plain-0.json").stat().st_mtime_ns
    assert run_ladder(workspace, finished_ladder, "--only", "plain,tv") == 0
    assert (finished_ladder / "plain-0.json").stat().st_mtime_ns == before
    assert capsys.readouterr().out == "every run has its record\n"


def test_late_settings_and_known_answers(workspace: Path, finished_ladder: Path, tmp_path: Path):
    """`combined` needs settings from the command line; given answers are read, up to the limit."""
    answers = ["--answers", str(workspace / "answers.pkl"), "--limit", "2"]
    assert run_ladder(workspace, tmp_path, "--only", "combined", *answers) == 2
    assert (
        run_ladder(
            workspace, tmp_path, "--only", "combined", "--set", "loss=kl", "--set", "k=2", *answers
        )
        == 0
    )
    record = json.loads((tmp_path / "combined-0.json").read_text())
    assert (
        record["settings"] == {"loss": "kl", "k": 2} and record["sets"]["mt_bench"]["answers"] == 4
    )
    assert run_ladder(workspace, tmp_path, "--only", "nobody") == 2
    assert run_ladder(workspace, tmp_path, "--only", "plain", "--sets", "gsm8k", *answers) == 2


def test_no_run_starts_that_would_exceed_the_time_limit(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_ladder(workspace, tmp_path, "--only", "plain", "--seconds", "0.001") == 0
    assert [
        path.name for path in tmp_path.glob("*.json")
    ] == [] and "no time left" in capsys.readouterr().out


def test_answers_are_evenly_selected(workspace: Path, finished_ladder: Path):
    whole = pickle.loads((workspace / "answers.pkl").read_bytes())["mt_bench", 0.0]
    assert (
        len(ladder.select_tasks(whole, 1)) == 2
        and len(ladder.select_tasks(whole, 9)) == len(whole) == 6
    )
    ids, answer_mask, _ = whole[0]
    many = join_documents([Document(ids, answer_mask, f"{i:03}#0") for i in range(100)])
    assert ladder.select_tasks(many, 4).keys == ("000#0", "025#0", "050#0", "075#0")


def test_speeds_are_added_to_the_records(workspace: Path, finished_ladder: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(finished_ladder, out)
    words = [
        str(out),
        "--target",
        str(workspace / "target"),
        "--bench",
        str(workspace / "bench"),
        "--only",
        "plain",
        "-k",
        "3",
    ]
    words += ["--concurrency", "1,2", "--max-tokens", "12", "--device", "cpu", "--dtype", "float32"]
    words += ["--sets", "humaneval,mt_bench", "--tree", "6", "--tree-k", "3"]
    assert ladder_speed.main(words) == 0
    alone, plain, other = (
        json.loads((out / f"{name}.json").read_text()) for name in ("none-0", "plain-0", "tv-0")
    )
    found, *more = plain["engine"]
    measured = [(one["set"], one["shape"]) for one in more]
    assert measured == [
        ("mt_bench", "K=3"),
        ("humaneval", "tree 6, K=3"),
        ("mt_bench", "tree 6, K=3"),
    ]
    assert more[1]["acceptance_length"] >= found["acceptance_length"], "a tree contains the chain"
    assert (
        found["shape"] == "K=3"
        and [*found["tokens_per_second"]] == ["1", "2"]
        and found["step_ms"] > 0
    )
    assert found["acceptance_length"] >= 1 and plain["sets"] and "engine" not in other
    assert alone["engine"][0]["shape"] == "K=0" and alone["engine"][0]["acceptance_length"] == 1.0
    assert all(speed > 0 for speed in alone["engine"][0]["tokens_per_second"].values())
    before = (out / "plain-0.json").stat().st_mtime_ns
    assert ladder_speed.main(words) == 0 and (out / "plain-0.json").stat().st_mtime_ns == before


def test_the_second_target_is_trained_like_the_first():
    """Only settings that depend on the target differ, and those equal the catalog."""
    file = ladder.LADDER_FILE.parent / "qwen2.5-coder-0.5b" / "ladder.toml"
    first, second = (
        ladder.read_ladder(path, {}, {"loss": "tvmix", "mix": 0.95}, [])
        for path in (ladder.LADDER_FILE, file)
    )
    source = find_pair(second.base["target"]).drafters["p-eagle"]
    assert (
        second.taps == source.aux_layer_ids and second.base["mask_token_id"] == source.mask_token_id
    )
    own = {"target", "aux_layer_ids", "mask_token_id", "draft_vocab"}
    assert {
        key: value for key, value in second.base.items() if first.base[key] != value
    }.keys() == own
    assert [str(rung) for rung in second.rungs] == ["p-eagle-0", "combined-0", "eagle3-0"]
    settings = {str(rung): rung.settings for rung in first.rungs}
    assert all(rung.settings == settings[str(rung)] for rung in second.rungs)
    assert all(second.config(rung, Path("out"), Path("scratch")) for rung in second.rungs)
