"""The engine on GGUF files: answers of the stored weights are the same with every method."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from typer.testing import CliRunner

from peagle.cli import app
from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.engine.model import weight as weight_module
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.engine.model.weight import Weight
from peagle.kernels.cpu.library import kernel_state, library
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix, Table, dense
from peagle.loaded import LoadedPair
from peagle.target import Target, load_target
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import COUNT, REQUESTS, engine_of, pair_of, reference_steps, serve
from tests.support.models.byte_level import byte_level_tokenizer
from tests.support.models.gguf_files import TinyGGUF, random_blocks
from tests.support.models.tiny_models import make_drafter

AUX = (0, 1, 2)
METHODS: tuple[Method, ...] = ("none", "p-eagle", "eagle3")
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0"}


@pytest.fixture(autouse=True)
def peagle_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))


def stored_pair(file: Path) -> LoadedPair:
    target = load_target(file, torch.float32, "cpu", stored=True)
    drafters: dict[Method, Drafter] = {
        "p-eagle": make_drafter(target, "p-eagle", 2, aux=AUX),
        "eagle3": make_drafter(target, "eagle3", 1, aux=AUX),
    }
    return pair_of(target, drafters)


@pytest.fixture
def stored_kernel() -> None:
    if library() is None:
        pytest.skip(f"needs the C kernels: {kernel_state()}")


def plain_answers(pair: LoadedPair) -> list[list[int]]:
    settings: dict[str, Any] = {"max_tokens": COUNT, "ignore_eos": True}
    return [tokens_of(reference_steps(pair, "none", ids, **settings)) for ids, _ in REQUESTS]


def check_answers(pair: LoadedPair, methods: tuple[Method, ...] = METHODS) -> None:
    """Concurrent requests have the answers of single requests, with every method."""
    expected = plain_answers(pair)
    assert len({tuple(answer) for answer in expected}) >= 3
    for method in methods:
        engine = engine_of(pair, method)
        assert [tokens_of(steps) for steps in serve(engine, REQUESTS)] == expected
        engine.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_answers_equal_the_reference(
    tmp_path: Path, architecture: str, stored_kernel: None
) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", architecture, "Q4_K", MIXED, tied=False).write()
    pair = stored_pair(file)
    engine = engine_of(pair, "p-eagle")
    verifier = engine._stepper.verifier
    assert isinstance(verifier, FusedLlamaTarget) and verifier.is_stored
    assert engine.weights == "Q4_K/Q6_K" and not engine.exact
    check_answers(pair)


def test_rounded_activations_are_reported(tmp_path: Path, stored_kernel: None) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", "llama", "Q4_1").write()
    target = load_target(file, torch.bfloat16, "cpu", stored=True)
    engine = engine_of(pair_of(target, {}), "none")
    assert engine.weights == "Q4_1, bfloat16 activations"


@pytest.mark.parametrize(
    "format",
    [  # tests/target/gguf has every format; these two have blocks of 32 and of 256 weights.
        pytest.param(format, marks=[] if format in ("Q4_0", "Q6_K") else pytest.mark.slow)
        for format in BLOCK_FORMATS
    ],
)
def test_without_the_kernel_weights_are_dequantized_once(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_module, "can_pack", lambda *_: False)
    pair = stored_pair(TinyGGUF(tmp_path / "m.gguf", "llama", format, tied=False).write())
    engines = [engine_of(pair, "none") for _ in range(2)]
    assert engines[0].weights == f"{format}, multiplied out to float32"
    layers: list[Any] = [engine._stepper.verifier.layers[1] for engine in engines]  # type: ignore[attr-defined]
    assert layers[0].qkv.weight.data_ptr() == layers[1].qkv.weight.data_ptr()
    # Dequantized weights do not depend on the format, so one format is run with all methods.
    check_answers(pair, METHODS if format == "Q4_0" else ("none",))


def test_a_target_that_is_not_llama_like(tmp_path: Path, stored_kernel: None) -> None:
    pair = stored_pair(TinyGGUF(tmp_path / "m.gguf", "gemma2", "Q4_0").write())
    engine = engine_of(pair, "none")
    assert isinstance(engine._stepper.verifier, HFPagedTarget)
    assert engine.weights == "Q4_0"
    check_answers(pair)


@pytest.mark.parametrize("pruned", [None, 40])
def test_drafters_share_stored_tables(
    tmp_path: Path, pruned: int | None, stored_kernel: None
) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", "llama", "Q4_1", {"token_embd": "Q8_0"}).write()
    target = load_target(file, torch.float32, "cpu", stored=True)
    drafter = make_drafter(target, "p-eagle", 2, pruned, AUX, dependency=8, confidence=True)
    torch.nn.init.normal_(drafter.dependency.out.weight)  # type: ignore[union-attr]
    assert drafter.embed_tokens is None and drafter.lm_head is None
    folder = tmp_path / "drafter"
    compact.save(drafter, folder, target, torch.bfloat16)
    loaded = checkpoint.load(folder, target, torch.float32)
    assert loaded.embed_table is target.embedding_table
    assert isinstance(loaded.head_table, StoredMatrix) and len(loaded.head_table) == (pruned or 96)
    assert loaded.fc.weight.dtype == torch.bfloat16 and loaded.dtype == torch.float32
    wide_target = dense_copy(target, file)
    wide = checkpoint.load(folder, wide_target, torch.float32)
    assert wide.fc.weight.dtype == torch.float32
    pairs = [pair_of(target, {"p-eagle": loaded}), pair_of(wide_target, {"p-eagle": wide})]
    for ids, _ in REQUESTS[:3]:
        steps = [
            reference_steps(pair, "p-eagle", ids, max_tokens=COUNT, ignore_eos=True)
            for pair in pairs
        ]
        assert [step.drafted for step in steps[0]] == [step.drafted for step in steps[1]]
    for tree in (0, 6):
        engine = engine_of(pairs[0], "p-eagle", tree=tree)
        answers = [tokens_of(steps) for steps in serve(engine, REQUESTS)]
        assert answers == plain_answers(pairs[0])
        engine.close()


def dense_copy(target: Target, file: Path) -> Target:
    """The same file, dequantized."""
    return load_target(file, torch.float32, "cpu")


def test_weights_of_different_formats_and_a_bias(stored_kernel: None) -> None:
    parts: list[Table] = [
        StoredMatrix(name, torch.from_numpy(random_blocks(name, rows, 256)))
        for name, rows in (("Q4_K", 48), ("Q6_K", 16), ("Q8_0", 16))
    ]
    bias = torch.randn(80)
    x = torch.randn(5, 256)
    weight = Weight(parts, bias, dtype=torch.float32)
    whole = torch.cat([dense(part) for part in parts])
    assert weight.is_stored and weight.weight is None
    assert torch.allclose(weight(x), linear(x, whole, bias), atol=1e-4)
    assert torch.equal(weight.split_k(x), weight(x))
    # One part is not exact in bf16, so all are dequantized.
    mixed = Weight([parts[0], whole[:16]], None, dtype=torch.float32)
    assert not mixed.is_stored and mixed.weight is not None
    assert torch.equal(mixed.weight, torch.cat([dense(parts[0]), whole[:16]]))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_answers_do_not_depend_on_the_file_after_the_start(
    tmp_path: Path, architecture: str, stored_kernel: None
) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", architecture, "Q4_1").write()
    pair = stored_pair(file)
    engines = {method: engine_of(pair, method) for method in METHODS}
    expected = [tokens_of(steps) for steps in serve(engines["none"], REQUESTS)]
    with file.open("r+b") as content:  # Overwrite the file in place, as `cp` does.
        content.write(bytes(file.stat().st_size))
    for engine in engines.values():
        assert [tokens_of(steps) for steps in serve(engine, REQUESTS)] == expected
    with file.open("r+b") as content:
        content.truncate(10)  # Reading mapped bytes would now end the process.
    for engine in engines.values():
        assert [tokens_of(steps) for steps in serve(engine, REQUESTS)] == expected
        engine.close()


def test_the_command_line(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    file = TinyGGUF(tmp_path / "m.gguf", "llama", "Q4_1", tokenizer=tokenizer).write()
    words = ["the quick fox", "--max-tokens", "6", "--json", "--dtype", "float32"]
    result = CliRunner().invoke(app, ["generate", str(file), *words, "--method", "none"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["dtype"] == "float32" and answer["weights"].startswith("Q4_1")
    target = load_target(file, torch.float32, "cpu", stored=True)
    assert target.tokenizer("the quick fox")["input_ids"] == tokenizer("the quick fox")["input_ids"]
    assert target.tokenizer.chat_template == tokenizer.chat_template
    without_drafter = CliRunner().invoke(app, ["generate", str(file), *words])
    assert without_drafter.exit_code == 2
    assert "--drafter" in without_drafter.output and "ngram or none" in without_drafter.output
    drafter = make_drafter(target, "p-eagle", 2, aux=AUX)
    compact.save(drafter, tmp_path / "drafter", target)
    drafted = CliRunner().invoke(
        app, ["generate", str(file), *words, "--drafter", str(tmp_path / "drafter")]
    )
    assert drafted.exit_code == 0, drafted.output
    assert json.loads(drafted.stdout)["token_ids"] == answer["token_ids"]
    missing = CliRunner().invoke(app, ["generate", str(tmp_path / "none.gguf"), *words])
    assert missing.exit_code == 2 and "there is no file" in missing.output


@pytest.mark.parametrize("tree", ["0", "6"])
def test_acceptance_without_decoding(tmp_path: Path, tree: str) -> None:
    """`evaluate --jump` reads the stored output matrix; the drafter has no float copy of it."""
    tokenizer = byte_level_tokenizer()
    file = TinyGGUF(tmp_path / "m.gguf", "llama", "Q4_1", tokenizer=tokenizer).write()
    target = load_target(file, torch.float32, "cpu", stored=True)
    drafter = make_drafter(target, "p-eagle", 2, aux=AUX, dependency=8)
    compact.save(drafter, tmp_path / "drafter", target)
    task = {"id": "a", "turns": ["the quick fox"]}
    (tmp_path / "set.jsonl").write_text(json.dumps(task) + "\n")
    words = ["evaluate", str(file), "--drafter", str(tmp_path / "drafter"), "--dtype", "float32"]
    words += ["--set", str(tmp_path / "set.jsonl"), "-k", "3", "--tree", tree, "--max-tokens", "12"]
    results = [CliRunner().invoke(app, [*words, "--json", *more]) for more in ([], ["--jump"])]
    assert [result.exit_code for result in results] == [0, 0], results[1].exception
    decoded, jumped = (json.loads(result.stdout)["results"][0] for result in results)
    assert jumped["drafts"] == decoded["drafts"] > 0


def test_an_export_does_not_tell_vllm_to_serve_a_gguf_file(tmp_path: Path) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", "llama", "Q4_1", tokenizer=byte_level_tokenizer()).write()
    target = load_target(file, torch.float32, "cpu")
    compact.save(make_drafter(target, "p-eagle", 2, aux=AUX), tmp_path / "drafter", target)
    words = ["export", str(tmp_path / "drafter"), str(tmp_path / "out"), "--target", str(file)]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and not (tmp_path / "out").exists()
    assert "safetensors" in refused.output and "--verifier" in refused.output
    named = CliRunner().invoke(app, [*words, "--verifier", "someone/model", "--json"])
    assert named.exit_code == 0, named.output
    assert "someone/model" in json.loads(named.stdout)["command"]
