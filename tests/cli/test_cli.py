"""The command line with a tiny pair: answers, JSON, one-line errors with exit code 2."""

import io
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from peagle.catalog.pair import DrafterSource
from peagle.cli import app
from peagle.cli.serving.generate import print_statistics
from peagle.core import Generation, Step
from peagle.engine import Engine, EngineConfig
from peagle.evaluate import demo
from peagle.loaded import LoadedPair, load
from tests.support.command_line import run, save_tiny_pair
from tests.support.models.tiny_models import make_drafter

COMMANDS = ["pull", "generate", "demo", "serve", "bench", "tune", "export", "quantize", "check"]
COMMANDS += [
    "catalog list",
    "catalog show",
    "catalog add",
    "catalog validate",
    "deploy vllm",
    "deploy kserve",
    "doctor",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target folder with a word tokenizer and a chat template, and folders of its drafters."""
    return save_tiny_pair(tmp_path_factory.mktemp("tiny"))


def generate(tiny: Path, *args: object) -> dict:
    out = run(
        "generate",
        tiny / "target",
        "w6 w9 w30",
        "--json",
        "--dtype",
        "float32",
        "--max-tokens",
        20,
        *args,
    )
    return json.loads(out)


def test_methods_agree_and_json_is_complete(tiny: Path) -> None:
    plain = generate(tiny, "--method", "none")
    for method in ("p-eagle", "eagle3"):
        answer = generate(tiny, "-k", 3, "--drafter", tiny / method)
        assert answer["method"] == method
        assert answer["token_ids"] == plain["token_ids"]
        assert answer["k"] == 3
        assert len(answer["accepted_per_position"]) == 3
        assert answer["acceptance_length"] >= 1
        assert answer["tokens_per_second"] > 0
        assert answer["num_draft_tokens"] == 3 * answer["num_drafts"]
    assert plain["prompt_tokens"] == 4  # <user> from the template, and three words
    assert plain["acceptance_length"] == 1
    assert plain["startup"].keys() >= {"import", "load", "build"}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_trees_give_the_same_answers(tiny: Path, temperature: float) -> None:
    options = ("--temperature", temperature, "--seed", 3)
    plain = generate(tiny, "--method", "none", *options)
    answer = generate(tiny, "-k", 3, "--drafter", tiny / "p-eagle", "--tree", 12, *options)
    assert (answer["tree"], answer["k"], plain["tree"]) == (12, 3, 0)
    assert len(answer["accepted_per_position"]) == 3  # depths, not nodes
    if not temperature:
        assert answer["token_ids"] == plain["token_ids"]


def test_raw_skips_the_template(tiny: Path) -> None:
    assert generate(tiny, "--method", "none", "--raw")["prompt_tokens"] == 3


def test_a_reported_seed_repeats_the_answer(tiny: Path) -> None:
    first = generate(tiny, "--method", "none", "--temperature", 1.5)
    again = generate(
        tiny, "--drafter", tiny / "p-eagle", "--temperature", 1.5, "--seed", first["seed"]
    )
    assert again["token_ids"] == first["token_ids"]


def test_a_measured_dtype_is_shown_with_its_times(tiny: Path) -> None:
    command = ["generate", str(tiny / "target"), "w6 w9", "--method", "none", "--device", "cpu"]
    shown = CliRunner().invoke(app, command).stderr
    assert "measured on this CPU: " in shown and "ms for a pass of 8 rows" in shown
    named = CliRunner().invoke(app, [*command, "--dtype", "float32"]).stderr
    assert "tokens/s" in named and "measured" not in named


def test_the_status_of_an_engine_has_the_dtype_and_its_times(tiny: Path) -> None:
    for dtype in ("auto", "float32"):
        pair = load(str(tiny / "target"), dtype=dtype, device="cpu")
        config = EngineConfig(method="none", max_batch=1, kv_tokens=256, thread=False)
        with Engine(pair, config) as engine:
            status = engine.status()
        assert status["dtype"] == str(pair.target.dtype).removeprefix("torch.")
        choice = status["dtype_choice"]
        if dtype == "float32":
            assert choice is None
        else:
            assert choice["chosen"] == status["dtype"]
            assert choice["pass_ms"].keys() == {"float32", "bfloat16"}
        json.dumps(status)


def test_export_and_check(tiny: Path, tmp_path: Path) -> None:
    for to in ("vllm", "speculators"):
        out = run("export", tiny / "p-eagle", tmp_path / to, "--to", to, "-k", 5, "--json")
        answer = json.loads(out)
        assert "serve" in answer["command"]
        assert json.loads(run("check", tmp_path / to, "--target", tiny / "target", "--json"))["ok"]
        assert "identical" in run("check", tmp_path / to, "--target", tiny / "target")
    command = json.loads(run("export", tiny / "p-eagle", tmp_path / "v", "-k", 5, "--json"))[
        "command"
    ]
    spec = json.loads(command.split("'")[1])
    assert spec == {
        "method": "eagle3",
        "model": str(tmp_path / "v"),
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }


@pytest.mark.parametrize("to", ["vllm", "speculators", "peagle"])
def test_export_overwrites_only_drafters(tiny: Path, tmp_path: Path, to: str) -> None:
    args = ("export", tiny / "p-eagle", tmp_path, "--to", to)
    for earlier in ("vllm", "speculators", "peagle"):
        run("export", tiny / "p-eagle", tmp_path, "--to", earlier)
        run(*args)
    target_config = (tiny / "target" / "config.json").read_text()
    for config in ("{}", "[]", "not JSON", target_config):
        (tmp_path / "config.json").write_text(config)
        told = run(*args, code=2)
        assert told == f"error: {tmp_path} has other files: give a new or an empty folder\n"
        assert (tmp_path / "config.json").read_text() == config
    (tmp_path / "config.json").unlink()
    assert "has other files" in run(*args, code=2)
    assert (tmp_path / "model.safetensors").is_file()


def test_export_of_few_bits(tiny: Path, tmp_path: Path) -> None:
    sizes = {}
    for bits in (8, 4):
        folder = tmp_path / str(bits)
        options = ["--to", "peagle", "--bits", bits, "--json"]
        options += ["--group", 16, "--eight-bit", "layers.0"] if bits == 4 else []
        answer = json.loads(run("export", tiny / "p-eagle", folder, *options))
        assert json.loads((folder / "config.json").read_text())["weights"] == f"int{bits}"
        assert json.loads(run("check", folder, "--target", tiny / "target", "--json"))["ok"]
        sizes[bits] = answer["bytes"]
    assert sizes[4] < sizes[8]
    assert "8 bits" in run("export", tiny / "p-eagle", tmp_path / "8", "--to", "peagle")


def test_check_fails_with_code_2(tiny: Path, tmp_path: Path) -> None:
    run("export", tiny / "p-eagle", tmp_path / "d")
    config = tmp_path / "d" / "config.json"
    config.write_text(
        config.read_text().replace(
            '"max_position_embeddings": 256', '"max_position_embeddings": 32'
        )
    )
    run("check", tmp_path / "d", "--target", tiny / "target", code=2)


MISTAKES = {
    "unknown pair": (["generate", "smolm2-135m", "hi"], "Did you mean 'smollm2-135m'"),
    "K below 1": (["generate", "{target}", "w1", "-k", "0"], "at least one token"),
    "unknown method": (
        ["generate", "{target}", "w1", "--method", "peagle"],
        "Did you mean 'p-eagle'",
    ),
    "missing drafter": (
        ["generate", "{target}", "w1", "--drafter", "{root}/nothing"],
        "no such folder",
    ),
    "no drafter at all": (
        ["generate", "{target}", "w1", "--method", "p-eagle"],
        "give one with --drafter",
    ),
    "drafter that does not fit": (
        ["generate", "{target}", "w1", "--drafter", "{root}/misfit"],
        "hidden size 64",
    ),
    "prompt longer than the context": (
        ["generate", "{target}", "w7 " * 300, "--method", "none"],
        "context holds 256",
    ),
    "empty prompt": (["generate", "{target}", " "], "empty"),
    "only a pair": (["generate", "smollm2-135m"], "add a prompt"),
    "bad temperature": (
        ["generate", "{target}", "w1", "--temperature", "-2"],
        "temperature must be",
    ),
    "bad dtype": (["generate", "{target}", "w1", "--dtype", "int7"], "unknown dtype"),
    "bad device": (["generate", "{target}", "w1", "--device", "tpu9"], "cannot be used here"),
    "export of nothing": (["export", "{root}/nothing", "{root}/out"], "there is no folder"),
    "export of an unknown pair": (["export", "nothing", "{root}/out"], "unknown pair"),
    "export over a file": (["export", "{root}/p-eagle", "{root}/p-eagle/config.json"], "is a file"),
    "export over someone's work": (["export", "{root}/p-eagle", "{root}"], "not part of a drafter"),
    "export with K below 1": (
        ["export", "{root}/p-eagle", "{root}/out", "-k", "0"],
        "at least one token",
    ),
    "export of another method": (
        ["export", "{root}/p-eagle", "{root}/out", "--method", "eagle3"],
        "drop --method",
    ),
    "a drafter of another method": (
        ["generate", "{target}", "w2", "--drafter", "{root}/p-eagle", "--method", "eagle3"],
        "it has p-eagle",
    ),
    "a tree of eagle3": (
        ["generate", "{target}", "w1", "--method", "eagle3", "--tree", "16"],
        "need a p-eagle drafter",
    ),
    "a tree of an eagle3 drafter": (
        ["generate", "{target}", "w1", "--drafter", "{root}/eagle3", "--tree", "16"],
        "need a p-eagle drafter",
    ),
    "a tree too large": (["generate", "{target}", "w1", "--tree", "63"], "at most 62 nodes"),
    "a tree too small": (
        ["generate", "{target}", "w1", "-k", "7", "--tree", "6"],
        "more nodes than K",
    ),
    "a tree that is a chain": (
        ["generate", "{target}", "w1", "-k", "7", "--tree", "7"],
        "is a chain",
    ),
    "a tree of the pair's depth": (
        ["generate", "{target}", "w1", "--drafter", "{root}/p-eagle", "--tree", "4"],
        "more nodes than K",
    ),
    "a tree of fewer than no nodes": (
        ["generate", "{target}", "w1", "--tree", "-1"],
        "0 for chains",
    ),
    "brackets": (["generate", "[/x]", "hi"], "unknown pair '[/x]'"),
    "broken bytes": (["generate", "{target}", "a\udcffb", "--method", "none"], "not valid UTF-8"),
    "demo of one token": (["demo", "--max-tokens", "1"], "at least two tokens"),
    "export to nowhere": (
        ["export", "{root}/p-eagle", "{root}/out", "--to", "gguf"],
        "use --to vllm",
    ),
    "bits for vLLM": (["export", "{root}/p-eagle", "{root}/out", "--bits", "4"], "--to peagle"),
    "bits that do not exist": (
        ["export", "{root}/p-eagle", "{root}/out", "--to", "peagle", "--bits", "5"],
        "4 or 8 bits",
    ),
    "a group of 8-bit rows": (
        ["export", "{root}/p-eagle", "{root}/out", "--to", "peagle", "--group", "32"],
        "add --bits 4",
    ),
    "check of nothing": (["check", "{root}/nothing"], "no such folder"),
    "check against no target": (["check", "{root}/p-eagle", "--target", "nothing"], "unknown pair"),
    "unknown source": (["pull", "smollm2-135m", "--source", "hubs"], "Did you mean 'hub'"),
    "unknown pair to pull": (["pull", "nothing"], "unknown pair"),
    "target without a template": (["generate", "{root}/bare", "w1"], "use --raw"),
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_one_line_and_code_2(tiny: Path, args: list[str], words: str) -> None:
    bare = tiny / "bare"
    if not bare.exists():
        import shutil

        shutil.copytree(tiny / "target", bare)
        (bare / "chat_template.jinja").unlink(missing_ok=True)
    filled = [arg.format(target=tiny / "target", root=tiny) for arg in args]
    message = run(*filled, code=2)
    assert words in message
    assert message.count("\n") == 1
    assert "Traceback" not in message


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    assert f"peagle {command}" in run(*command.split(), "--help")


def test_target_by_name_or_folder(tiny: Path) -> None:
    out = run(
        "generate",
        "smollm2-135m",
        "w6 w9 w30",
        "--target",
        tiny / "target",
        "--method",
        "none",
        "--json",
    )
    assert json.loads(out)["prompt_tokens"] == 4


def test_a_huge_token_limit_is_accepted(tiny: Path) -> None:
    args = ("--max-tokens", 10**12, "--temperature", 0.7, "--seed", 1, "--method", "none", "--json")
    assert json.loads(run("generate", tiny / "target", "w6", *args))["finish_reason"] in (
        "stop",
        "length",
    )


def test_loading_and_generating_needs_no_network(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    generate(tiny, "--drafter", tiny / "p-eagle")


def test_streamed_text_is_the_whole_answer(tiny: Path) -> None:
    pair = load(str(tiny / "target"), dtype="float32")
    pieces: list[str] = []
    answer = pair.generate("w6 w9", method="none", max_tokens=12, on_text=pieces.append)
    assert "".join(pieces) == answer.text


def test_demo(tiny: Path) -> None:
    """Every method gives the same answers; the table and the warning are complete."""
    pair = load(str(tiny / "target"), dtype="bfloat16")
    drafters = {method: make_drafter(pair.target, method, 1) for method in ("p-eagle", "eagle3")}
    sources = {method: DrafterSource() for method in drafters}
    loaded = LoadedPair(replace(pair.pair, drafters=sources), pair.target, drafters)
    rows = demo.run_demo(loaded, 3, 16, None, Console(quiet=True))
    assert [row.method for row in rows] == ["none", "p-eagle", "eagle3"]
    assert all(row.identical for row in rows)
    console = Console(record=True, width=120, file=io.StringIO())
    demo.show_demo(rows, loaded, console)
    shown = console.export_text()
    assert "p-eagle (untrained)" in shown
    assert "acceptance length" in shown
    assert "drafts are noise" in shown
    assert all(
        demo.color_drafts(answer, loaded).plain == answer.text
        for row in rows
        for answer in row.answers.values()
    )
    drafters["p-eagle"].config = replace(drafters["p-eagle"].config, trained=True)
    rows = demo.run_demo(loaded, 3, 4, None, Console(quiet=True))
    assert [row.method for row in rows] == ["none", "p-eagle"], (
        "untrained drafters are left out if a trained one exists"
    )


def test_pairs_as_json() -> None:
    assert json.loads(run("pairs", "--json"))[0]["name"] == "smollm2-135m"


def test_light_imports() -> None:
    """`peagle --help` and `import peagle` load neither torch, transformers nor fastapi."""
    heavy = "('torch', 'transformers', 'fastapi')"
    code = f"import sys, peagle, peagle.cli; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("drafted", "words"), [(3, "4 tokens in 2 steps,"), (0, "(1 with drafts)")]
)
def test_statistics_count_steps_with_drafts(
    drafted: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [Step((1, 2, 3), 3, 2), Step((4,), drafted)]
    print_statistics(Generation("x", [1, 2, 3, 4], 2, steps, "stop", "p-eagle", 3, 1.0, 0.1))
    assert words in capsys.readouterr().err
