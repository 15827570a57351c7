"""`peagle evaluate --context`: table, record, figure and model card, with a tiny pair."""

import json
from pathlib import Path

import pytest

from peagle.cli.measurement.lists import parse_lengths
from peagle.data.bench import Task
from peagle.evaluate.context_curve import decode_point
from peagle.evaluate.evaluate import EvaluateSettings
from peagle.loaded import load
from tests.support.command_line import run, save_tiny_pair

LENGTHS = "64,128,200"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save_tiny_pair(tmp_path_factory.mktemp("tiny"))
    for name in ("mt_bench", "gsm8k"):
        lines = [json.dumps({"turns": [f"w{10 + i} w7", f"w{20 + i}"]}) for i in range(70)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    return root


def command(tiny: Path, *args: object, code: int = 0) -> str:
    where = ("--data", tiny, "--set", "mt_bench,gsm8k", "--max-tokens", 8, "--dtype", "float32")
    options = ("-k", 3, "--limit", 2, "--context", LENGTHS)
    drafter = ("--drafter", tiny / "p-eagle")
    return run("evaluate", tiny / "target", *drafter, *where, *options, *args, code=code)


def test_context_lengths_are_parsed() -> None:
    assert parse_lengths("8k,512, 1K,512") == (512, 1024, 8192)


def test_record_and_figure(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    printed = json.loads(command(tiny, "--json", "--out", path))
    assert json.loads(path.read_text()) == printed
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (printed["k"], printed["sliding_window"], printed["method"]) == (3, None, "p-eagle")
    points = printed["contexts"]
    assert [(point["set"], point["context"]) for point in points] == [
        (name, length) for name in ("mt_bench", "gsm8k") for length in (64, 128, 200)
    ]
    for point in points:
        assert point["prompt_tokens"] == point["context"] - 8
        assert point["tasks"] == 2 and point["ratio_to_none"] > 0
        assert point["acceptance_length"] == round(1 + point["accepted"] / point["drafts"], 4)


def test_the_record_has_the_option_as_vllm(tiny: Path) -> None:
    assert json.loads(command(tiny, "--json", "--as-vllm"))["as_vllm"] is True
    assert "as_vllm" not in json.loads(command(tiny, "--json"))


def test_answers_of_one_token_have_no_speed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = load(str(tiny / "target"), drafter=tiny / "p-eagle", dtype="float32", device="cpu")
    every_token = frozenset(range(pair.target.vocab_size))
    monkeypatch.setattr(type(pair.target), "stop_ids", every_token)
    settings = EvaluateSettings((3,), (0.0,), "p-eagle", 8)
    point = decode_point(pair, "x", 64, [Task("0", ("w7 w8",))], settings)
    assert (point.ratio_to_none, point.result.drafts) == (None, 0)


def test_table_and_jump(tiny: Path) -> None:
    decoded = command(tiny, "--set", "gsm8k")
    assert "acceptance length by context" in decoded and " x)" in decoded
    jumped = command(tiny, "--set", "gsm8k", "--jump", "--drafter-window", 64)
    assert "window 64" in jumped and " x)" not in jumped
    assert all(length in jumped for length in LENGTHS.split(","))


def test_a_window_longer_than_the_context_changes_nothing(tiny: Path) -> None:
    plain, windowed = (
        json.loads(command(tiny, "--json", "--drafter-window", window))["contexts"]
        for window in (0, 256)
    )
    for one, other in zip(plain, windowed, strict=True):
        assert (one["accepted"], one["drafts"]) == (other["accepted"], other["drafts"])


def test_the_model_card_is_updated(tiny: Path, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# A drafter\n\ntext\n\n## Commands\n\nrest\n")
    command(tiny, "--card", tmp_path)
    first = card.read_text()
    assert first.startswith("# A drafter\n\ntext\n\n## Commands\n\nrest\n\n## Acceptance length by")
    assert "| 128 | " in first and "![acceptance length by context](context.png)" in first
    assert (tmp_path / "context.png").is_file()
    card.write_text(first.replace("K=3", "K=9") + "\n## More\n\nlast\n")
    command(tiny, "--card", tmp_path)
    second = card.read_text()
    assert second.count("## Acceptance length by context") == 1 and "K=9" not in second
    assert second.endswith("\n\n## More\n\nlast\n")


def test_options_are_shown(tiny: Path, tmp_path: Path) -> None:
    """The output and the model card state the options, so that trees differ from chains."""
    card = tmp_path / "README.md"
    card.write_text("# A drafter\n")
    options = ("--set", "gsm8k", "--context", "64", "--limit", 1, "--card", tmp_path)
    tree = command(tiny, *options, "--tree", 9, "--no-exact")
    assert "p-eagle, K=3, trees of 9 nodes, no window, exact mode off" in tree
    assert "p-eagle, K=3, trees of 9 nodes, no window, exact mode off, greedy" in card.read_text()
    chain = command(tiny, *options, "--int8", "--as-vllm")
    assert "p-eagle, K=3, chains, no window, drafter as in vLLM, int8" in chain
    assert "trees" not in card.read_text() and "drafter as in vLLM, int8" in card.read_text()
    record = json.loads(command(tiny, *options, "--tree", 9, "--json"))
    assert record["tree"] == 9 and record["contexts"][0]["draft_tokens"] > 0


def test_questions_that_do_not_fit_are_skipped(tiny: Path, tmp_path: Path) -> None:
    """The set of the README example contains such a question for a context of 512 tokens."""
    long = json.dumps({"turns": [" ".join(["w7"] * 100)]})
    short = [json.dumps({"turns": [f"w{20 + i} w7"]}) for i in range(8)]
    (tmp_path / "mixed.jsonl").write_text("\n".join([long, *short, long]))
    sets = ("--set", tmp_path / "mixed.jsonl")
    record = json.loads(command(tiny, *sets, "--json", "--limit", 10))
    assert [point["tasks"] for point in record["contexts"]] == [8, 8, 8]
    (tmp_path / "mixed.jsonl").write_text("\n".join([long, long]))
    printed = command(tiny, *sets, "--context", "64", code=2)
    assert "no question of the set fits into a prompt of 56 tokens" in printed


MISTAKES = {
    "no number": (["--context", "1m"], "write it like --context 512,1k"),
    "beyond the context": (["--context", "64,1k"], "exceeds the target's context of 256"),
    "no room": (["--context", "8"], "no room for a prompt and an answer of 8"),
    "too few texts": (["--limit", "71"], "70 tasks, too few for 71 questions"),
    "no prompts": (["--limit", "0"], "--limit is 0: use 1 or more"),
    "fewer than no prompts": (["--limit", "-1"], "--limit is -1: use 1 or more"),
    "a figure as the record": (["--out", "curve.png"], "the figure would replace curve.png"),
    "several K": (["-k", "3,5"], "needs one --k"),
    "no card": (["--card", "{tiny}"], "has no README.md"),
    "a short window": (["--drafter-window", "5"], "--drafter-window is 5: use 64"),
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_one_line_and_code_2(tiny: Path, args: list[str], words: str) -> None:
    printed = command(tiny, *(arg.format(tiny=tiny) for arg in args), code=2)
    assert words in printed
    assert printed.count("\n") == 1
