"""The shipped catalog, pairs of the user, and errors in pair files."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle.catalog.catalog import all_pairs, find_pair, pair_names, shipped_pairs, user_files
from peagle.catalog.entry import parse_pair
from peagle.catalog.pair import Pair
from peagle.catalog.production import Memory, Production
from peagle.cli import app
from peagle.drafter.formats import compact
from peagle.errors import UserError
from tests.support.models.tiny_models import make_drafter, make_target

LAUNCH = ["gpt-oss-120b", "gpt-oss-20b", "qwen3-coder-30b", "gemma-4-31b"]
OWN = ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
ENTRY: dict[str, Any] = {
    "method": "p-eagle",
    "k": 5,
    "target": {"hub": "someone/target"},
    "drafters": {"p-eagle": {"hub": "someone/drafter", "format": "vllm", "depth": 8}},
    "production": {
        "vllm": "0.18",
        "k": {"1": 7, "8": 3},
        "instances": ["ml.g5.xlarge"],
        "flags": {"dtype": "half"},
    },
}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    return tmp_path / "config" / "pairs"


def run(*args: object, code: int = 0, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result.stdout if code == 0 else result.stderr + result.stdout


def changed(path: str, value: Any) -> dict[str, Any]:
    """ENTRY with one field set: "production.vllm"."""
    entry = json.loads(json.dumps(ENTRY))
    place = entry
    *way, last = path.split(".")
    for key in way:
        place = place.setdefault(key, {})
    place[last] = value
    return entry


def parse(entry: dict[str, Any]) -> Pair:
    return parse_pair("mine", entry, Path("/root-of-it"), "mine.toml")


def test_the_shipped_pairs() -> None:
    assert sorted(shipped_pairs()) == sorted([*LAUNCH, *OWN, "qwen3-8b"])
    for pair in shipped_pairs().values():
        source = pair.drafters[pair.method]
        assert pair.target.hub and pair.license == "Apache-2.0"
        assert not source.trained or source.format
        assert source.depth is None or max([pair.k, *pair.production.k.values()]) <= source.depth
        assert pair.production.memory.source


def test_facts_of_the_sagemaker_launch_pairs() -> None:
    pairs = [shipped_pairs()[name] for name in LAUNCH]
    ids = [pair.production.jumpstart_id for pair in pairs]
    assert ids == [
        "openai-reasoning-gpt-oss-120b",
        "openai-reasoning-gpt-oss-20b",
        None,
        "huggingface-vlm-gemma-4-31b-it",
    ]
    assert [pair.production.vllm for pair in pairs] == ["0.18", "0.18", "0.16", None]
    assert [pair.drafters[pair.method].depth for pair in pairs] == [8, 10, 18, None]
    twenty = find_pair("openai/gpt-oss-20b")
    assert twenty.production.jumpstart_k == 3 and twenty.k == 7
    assert (
        twenty.production.instances == ("ml.g7e.2xlarge",) and twenty.production.channel == "eagle"
    )
    assert "p-eagle" not in shipped_pairs()["gemma-4-31b"].drafters, (
        "the drafter is available in JumpStart only"
    )
    assert shipped_pairs()["qwen3-8b"].drafters["p-eagle"].format == "speculators"
    assert shipped_pairs()["qwen3-8b"].production.vllm == "0.22"


def test_the_best_k_depends_on_concurrency() -> None:
    production = shipped_pairs()["gpt-oss-120b"].production
    assert [production.best_k(c) for c in (1, 7, 8, 64)] == [7, 7, 3, 3]
    assert Production().best_k(4) is None
    assert Production(k={4: 2}).best_k(1) == 2, "below the lowest load, its K is used"


def test_memory_is_computed_or_unknown() -> None:
    """gpt-oss-20b: 12.8 GiB of weights; 24 layers * 2 * 8 heads * 64 * 2 bytes per KV position."""
    by_hand = (12.8 * 2**30 + 24 * 2 * 8 * 64 * 2 * 8192) / 1e9
    assert shipped_pairs()["gpt-oss-20b"].production.memory_gb == pytest.approx(by_hand, abs=0.06)
    assert shipped_pairs()["gemma-4-31b"].production.memory_gb is None
    assert shipped_pairs()["gemma-4-31b"].production.memory.weights_gb == 62
    memory = Memory(weights=10**9, position=1000, drafter=10**8)
    assert memory.need_gb(10**6, requests=2) == 3.1
    assert memory.need_gb(None) is None


def test_the_shipped_drafters_match_the_catalog() -> None:
    content = json.loads(run("catalog", "validate", "--json"))
    assert content["ok"] and set(content["pairs"]) == set(shipped_pairs())
    assert any(
        "p-eagle" in line["text"] and line["level"] == "ok"
        for line in content["pairs"]["smollm2-135m"]
    )
    assert any("unknown" in line["text"] for line in content["pairs"]["gemma-4-31b"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (changed("produktion", {}), "unknown field 'produktion'.*Did you mean 'production'"),
        (
            changed("target.hubb", "x/y"),
            r"\[target\] has an unknown field 'hubb'.*Did you mean 'hub'",
        ),
        (changed("production.instance", []), r"\[production\].*Did you mean 'instances'"),
        (changed("production.memory.weight", 1), r"\[production.memory\].*Did you mean 'weights'"),
        (changed("drafters.p-egle", {}), "Did you mean 'p-eagle'"),
        (changed("method", "eagel3"), "unknown method 'eagel3'.*Did you mean 'eagle3'"),
        (changed("method", "eagle3"), r"no \[drafters.eagle3\]"),
        (changed("k", "seven"), "k must be a whole number, not 'seven'"),
        (changed("k", True), "k must be a whole number, not True"),
        (changed("k", 0), "k is 0, but must be 1 or more"),
        (changed("k", 9), "K is 9, but the drafter was trained to depth 8"),
        (changed("production.k", {"1": 12}), "K is 12, but the drafter was trained to depth 8"),
        (changed("production.k", {"one": 3}), "k must be like"),
        (changed("target", {}), "has no source of the target"),
        (changed("target.hub", "nonsense"), "a hub id is ORG/NAME"),
        (
            changed("target.sources", ["wheels"]),
            "sources names 'wheels', but the target has only hub",
        ),
        (changed("target.wheels", {"packages": ["a==1"]}), "wheels need members"),
        (changed("drafters.p-eagle.format", "vlm"), "unknown format 'vlm'.*Did you mean 'vllm'"),
        (changed("production.vllm", ">=0.18"), "must be the first version"),
        (changed("production.instances", ["g5.xlarge"]), "a type is like ml.g7e.2xlarge"),
        (changed("production.flags", {"port": 1}), "flags cannot have 'port'"),
        (changed("production.flags", {"--dtype": "half"}), "leave the dashes out"),
        (changed("production.flags", {"enable-prefix-caching": False}), "a flag is true, a text"),
        (changed("production.flags", {"dtype\nrun: evil": True}), "name of an option consists of"),
        (changed("production.flags", {"dtype\x85run: evil": 1}), "name of an option consists of"),
        (changed("production.flags", {"chat-template": "a\nrun: b"}), "write it on one line"),
        (changed("production", 3), "production must be a table"),
        ({"k": 3}, r"\[target\] is missing"),
    ],
)
def test_mistakes_are_reported(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^mine.toml.*{message}"):
        parse(entry)


def test_every_production_field_may_be_unknown() -> None:
    pair = parse(
        changed(
            "production", dict.fromkeys(["vllm", "k", "instances", "memory", "channel"], "unknown")
        )
    )
    assert pair.production == Production()
    assert parse({"target": {"folder": "here"}}).method == "none"
    assert parse({"target": {"folder": "here"}}).target.folder == Path("/root-of-it/here")


def test_a_user_pair_is_added(config: Path) -> None:
    run(
        "catalog",
        "add",
        "mine",
        "--target",
        "someone/target",
        "--drafter",
        "someone/drafter",
        "-k",
        4,
        "--vllm",
        "0.20",
    )
    written = tomllib.loads((config / "mine.toml").read_text())
    assert written["drafters"]["p-eagle"] == {"hub": "someone/drafter"}
    assert find_pair("mine").k == 4 and find_pair("someone/target").name == "mine"
    assert list(all_pairs())[-1] == "mine" and pair_names()[-1] == "mine"
    assert "mine" in run("catalog", "list")
    shown = run("catalog", "show", "mine")
    assert "someone/drafter (unknown format, trained depth unknown)" in shown and ">= 0.20" in shown
    assert "already: --force" in run("catalog", "add", "mine", "--target", "someone/other", code=2)
    run("catalog", "add", "mine", "--target", "someone/other", "--force")
    assert find_pair("mine").target.hub == "someone/other" and find_pair("mine").method == "none"
    assert "Did you mean 'mine'" in run("catalog", "show", "mien", code=2)
    assert [path.name for path in config.iterdir()] == ["mine.toml"], "no temporary file is left"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smollm2-135m", "--target", "a/b"], "is a shipped pair"),
        (["Mine!", "--target", "a/b"], "is not a valid name of a pair"),
        (["mine"], "needs a target"),
        (["mine", "--target", "nowhere"], "a hub id is ORG/NAME"),
        (
            ["mine", "--target", "a/b", "--drafter", "c/d", "--method", "p-egle"],
            "Did you mean 'p-eagle'",
        ),
        (
            ["mine", "--target", "a/b", "--drafter", "c/d", "--depth", "3", "-k", "5"],
            "trained to depth 3",
        ),
        (["missing.toml"], "cannot read"),
    ],
)
def test_invalid_pairs_are_not_added(words: list[str], message: str, config: Path) -> None:
    assert message in run("catalog", "add", *words, code=2).replace("\n", " ")
    assert not config.exists()


def test_a_file_is_added_with_its_folders(tmp_path: Path, config: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    file = tmp_path / "written.toml"
    file.write_text('license = "MIT"\n[target]\nfolder = "target"\n')
    run("catalog", "validate", file)
    run("catalog", "add", file)
    assert (
        find_pair("written").target.folder == tmp_path / "target"
        and find_pair("written").license == "MIT"
    )
    message = run("catalog", "add", file, "--target", "a/b", "--force", code=2)
    assert "describes the whole pair" in message
    file.write_text("[target\n")
    assert "is not valid TOML" in run("catalog", "add", file, "--force", code=2)


def test_method_and_depth_are_read_from_a_drafter_folder(tmp_path: Path, config: Path) -> None:
    target = make_target()
    target.name = "tiny"
    drafter = make_drafter(target, "eagle3", 1)
    drafter.config = replace(drafter.config, k_trained=6)
    compact.save(drafter, tmp_path / "drafter", target)
    run("catalog", "add", "mine", "--target", "a/b", "--drafter", tmp_path / "drafter", "-k", 3)
    source = find_pair("mine").drafters["eagle3"]
    assert (source.format, source.depth, source.folder) == ("peagle", 6, tmp_path / "drafter")
    assert "is eagle3, not p-eagle" in run(
        "catalog",
        "add",
        "other",
        "--target",
        "a/b",
        "--drafter",
        tmp_path / "drafter",
        "--method",
        "p-eagle",
        code=2,
    )
    run("catalog", "validate", "mine")
    text = (config / "mine.toml").read_text()
    (config / "mine.toml").write_text(text.replace("depth = 6", "depth = 5"))
    assert "the entry says depth 5" in run("catalog", "validate", "mine", code=2).replace("\n", "")


def test_a_broken_file_affects_only_its_own_pair(config: Path) -> None:
    config.mkdir(parents=True)
    (config / "broken.toml").write_text("k = 3\n")
    assert find_pair("smollm2-135m").name == "smollm2-135m"
    assert "broken.toml" in run("catalog", "list", code=2) and "broken.toml" in run(
        "pull", "broken", code=2
    )
    content = json.loads(run("catalog", "validate", "--json", code=2))
    assert not content["ok"] and content["pairs"]["broken"][0]["level"] == "error"
    assert all(line["level"] != "error" for line in content["pairs"]["gpt-oss-20b"])
    (config / "broken.toml").rename(config / "gpt-oss-20b.toml")
    assert "is a shipped pair" in run("catalog", "list", code=2)


def test_the_table_fits_a_terminal(config: Path) -> None:
    lines = run("catalog", "list", columns=80).splitlines()
    table = [line for line in lines if not line.startswith("*")]
    assert all(len(line) <= 80 for line in table)
    for pair in shipped_pairs().values():
        assert sum(line.startswith(pair.name) for line in table) == 1, (
            "the name is complete and on one line"
        )
    assert sum("unknown" in line for line in table) == 2


def test_unknown_values_are_null_in_json() -> None:
    pairs = {pair["name"]: pair for pair in json.loads(run("catalog", "list", "--json"))}
    assert pairs == {pair["name"]: pair for pair in json.loads(run("pairs", "--json"))}, (
        "`pairs` is an alias of `catalog list`"
    )
    assert pairs["gemma-4-31b"]["vllm"] is None
    assert pairs["gemma-4-31b"]["memory"]["need_gb"] is None
    assert pairs["gpt-oss-120b"]["k_by_concurrency"] == {"1": 7, "8": 3}
    assert json.loads(run("catalog", "show", "gpt-oss-20b", "--json")) == pairs["gpt-oss-20b"]


def test_show_prints_unknown_values() -> None:
    shown = run("catalog", "show", "gemma-4-31b", columns=200)
    for line in (
        "vLLM             unknown",
        "unknown (weights alone 62.0 GB)",
        "instances        unknown",
        "K unknown",
    ):
        assert line in shown
    assert "JumpStart        none" in run("catalog", "show", "smollm2-135m")


def test_the_config_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEAGLE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    run("catalog", "add", "mine", "--target", "a/b")
    assert (tmp_path / "xdg" / "peagle" / "pairs" / "mine.toml").is_file()
    assert user_files().keys() == {"mine"}


def test_a_hub_id_is_a_target_without_drafters() -> None:
    """Any OWNER/NAME is a hub id; a path that does not exist is an error."""
    pair = find_pair("acme/model-7b.v2")
    assert (pair.name, pair.target.order, pair.target.hub) == (
        "acme--model-7b.v2",
        ("hub",),
        "acme/model-7b.v2",
    )
    assert not pair.drafters
    assert find_pair("HuggingFaceTB/SmolLM2-135M-Instruct").name == "smollm2-135m"
    for path in ("./model", "../model", "~/no/model", "/model"):
        with pytest.raises(UserError, match=r"there is no folder .*model: give one that exists"):
            find_pair(path)
    with pytest.raises(UserError, match="unknown pair"):
        find_pair("a/b/c")
