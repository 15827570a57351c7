"""GGUF files as targets: logits equal those of transformers' GGUF reader, in every format."""

import logging
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from peagle.errors import UserError
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix
from peagle.model_pair import load_models
from peagle.paths import cache_home
from peagle.pull.receipt import RECEIPT, write_receipt
from peagle.target import Target, load_target
from peagle.target.gguf.choice import choose_weights
from peagle.target.gguf.modules import StoredEmbedding, StoredLinear, weight_bytes
from peagle.target.matrix_shapes import MatrixShapes
from peagle.target.weight_speed import ROW_COUNTS, PassTimes
from tests.support.models.gguf_files import (
    CONTEXT,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB_SIZE,
    TinyGGUF,
    transformers_model,
)

IDS = torch.tensor([3, 90, 17, 17, 4, 55, 8])


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("peagle.target.precision.is_overloaded", lambda: False)


def stored(path: Path, **options: object) -> Target:
    return load_target(path, torch.float32, "cpu", stored=True, **options)  # type: ignore[arg-type]


def check_logits(target: Target, file: Path, **config_changes: object) -> None:
    model = transformers_model(file, **config_changes)
    expected = model(IDS[None]).logits[0]
    assert torch.allclose(target.forward(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert float(expected.std()) > 0.1  # The logits depend on the token.


def matrices(target: Target) -> list[object]:
    layers = [x for x in target.model.modules() if isinstance(x, (StoredLinear, StoredEmbedding))]
    return [layer.weight for layer in layers]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_logits_equal_transformers(tmp_path: Path, format: str, architecture: str) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", architecture, format).write()
    target = stored(file)
    check_logits(target, file)
    weights = matrices(target)
    assert len(weights) == 4 * 7 + 2 and all(isinstance(x, StoredMatrix) for x in weights)
    assert target.stored_format == format and target.dtype == torch.float32
    assert target.head_table is target.embedding_table


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_mixed_formats_and_an_output_matrix(tmp_path: Path, architecture: str) -> None:
    """Formats are mixed as in Q4_K_M files; gemma2 norms are stored with 1 added."""
    formats = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0", "output": "Q6_K"}
    tied = architecture == "gemma2"
    file = TinyGGUF(tmp_path / "m.gguf", architecture, "Q4_K", formats, tied=tied).write()
    target = stored(file)
    check_logits(target, file, head_dim=HIDDEN // HEADS)
    assert target.stored_format == "Q4_K/Q6_K"


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
def test_plain_tensors_keep_their_dtype(tmp_path: Path, format: str) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", "llama", format).write()
    target = stored(file)
    check_logits(target, file)
    assert target.stored_format is None and target.dtype == torch.float32
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    assert target.layers[0].mlp.up_proj.weight.dtype == dtypes[format]  # type: ignore[union-attr]


def test_other_formats_are_dequantized_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    formats = {"ffn_up": "Q5_K", "ffn_down": "Q3_K"}
    file = TinyGGUF(tmp_path / "m.gguf", "llama", "Q4_0", formats).write()
    with caplog.at_level(logging.WARNING, "peagle"):
        target = stored(file)
    check_logits(target, file)
    assert target.stored_format == "Q4_0"
    (line,) = [record.message for record in caplog.records]
    assert "m.gguf: Q5_K, Q3_K tensors are dequantized, to 4 MB" in line


def test_files_are_dequantized_to_the_dtype_by_default(tmp_path: Path) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", "qwen2", "Q4_1").write()
    target = load_target(file, torch.bfloat16, "cpu")
    assert target.dtype == torch.bfloat16 and target.stored_format is None and not matrices(target)
    wide = transformers_model(file)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, wide.state_dict()[name].bfloat16()), name


def random_biases(*kinds: tuple[str, int]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    return {
        f"blk.{i}.{name}.bias": generator.standard_normal(size).astype(np.float32)
        for i in range(LAYERS)
        for name, size in kinds
    }


def test_biases_of_a_llama_file(tmp_path: Path) -> None:
    """If only q, k and v have biases, the bias of the attention output is zero."""
    kv = KV_HEADS * HIDDEN // HEADS
    writer = TinyGGUF(tmp_path / "m.gguf")
    writer.extra = random_biases(("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv))
    target = stored(writer.write())
    attention = target.layers[1].self_attn
    expected = torch.from_numpy(writer.extra["blk.1.attn_v.bias"])
    assert torch.equal(attention.v_proj.bias, expected)  # type: ignore[union-attr]
    assert not attention.o_proj.bias.any()  # type: ignore[union-attr]
    assert target.layers[1].mlp.up_proj.bias is None  # type: ignore[union-attr]
    writer.extra |= random_biases(("attn_output", HIDDEN))
    whole = stored(writer.write())
    check_logits(whole, writer.path, attention_bias=True)
    assert not torch.allclose(whole.forward(IDS).logits, target.forward(IDS).logits, atol=0.1)
    del writer.extra["blk.2.attn_q.bias"]
    with pytest.raises(UserError, match=r"the first is model.layers.2.self_attn.q_proj.bias"):
        stored(writer.write())


def test_tensors_that_the_model_does_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TinyGGUF(tmp_path / "m.gguf")
    for name in ("blk.1.attn_q_norm.weight", "blk.0.ffn_down.scale", "output.bias"):
        writer.extra = {name: np.ones(64, dtype=np.float32)}
        with pytest.raises(UserError, match=f"tensor {name} is not part of a llama model"):
            stored(writer.write())
    harmless = (f"blk.{LAYERS}.nextn.eh_proj.weight", "blk.0.attn_rot_embd.weight", "note.weight")
    writer.extra = {name: np.ones(32, dtype=np.float32) for name in harmless}
    with caplog.at_level(logging.WARNING, "peagle"):
        stored(writer.write())
    assert "3 tensors are not used" in caplog.text


def test_factors_and_scaling_of_rope(tmp_path: Path) -> None:
    """Files of Llama 3.1 have factors of the frequencies, which transformers ignores."""
    plain = stored(TinyGGUF(tmp_path / "plain.gguf").write())
    writer = TinyGGUF(tmp_path / "factors.gguf")
    factors = np.linspace(1, 8, HIDDEN // HEADS // 2, dtype=np.float32)
    writer.extra["rope_freqs.weight"] = factors
    with_factors = stored(writer.write())
    frequencies = [x.model.get_decoder().rotary_emb.inv_freq for x in (plain, with_factors)]
    assert torch.allclose(frequencies[0] / torch.from_numpy(factors), frequencies[1])
    scaled = TinyGGUF(tmp_path / "linear.gguf")
    scaled.scaling = ("linear", 4.0, CONTEXT)
    linear = stored(scaled.write())
    assert torch.allclose(linear.model.get_decoder().rotary_emb.inv_freq, frequencies[0] / 4)
    yarn = TinyGGUF(tmp_path / "yarn.gguf")
    yarn.scaling = ("yarn", 4.0, CONTEXT // 4)
    assert stored(yarn.write()).config.rope_parameters["rope_type"] == "yarn"
    unknown = TinyGGUF(tmp_path / "odd.gguf")
    unknown.scaling = ("spiral", 4.0, CONTEXT)
    with pytest.raises(UserError, match="scales RoPE as 'spiral'"):
        stored(unknown.write())


def test_linear_scaling_of_an_old_file(tmp_path: Path) -> None:
    plain = stored(TinyGGUF(tmp_path / "plain.gguf").write())
    # Old files have no scaling type.
    for key in (
        "llama.rope.scale_linear",
        "llama.rope.scaling.factor",
    ):
        writer = TinyGGUF(tmp_path / "old.gguf")
        writer.entries[key] = 4.0
        frequencies = [
            x.model.get_decoder().rotary_emb.inv_freq for x in (plain, stored(writer.write()))
        ]
        assert torch.allclose(frequencies[0] / 4, frequencies[1])


def test_gemma3_scales_rope_in_layers_with_full_attention(tmp_path: Path) -> None:
    writer = TinyGGUF(tmp_path / "m.gguf", "gemma3")
    writer.scaling = ("linear", 8.0, CONTEXT)
    target = stored(writer.write())
    rope = target.config.rope_parameters
    assert rope["full_attention"]["rope_type"] == "linear"
    assert rope["full_attention"]["factor"] == 8.0
    assert rope["sliding_attention"]["rope_type"] == "default"
    # All layers of the tiny file have a sliding window, so nothing is scaled.
    assert list(target.model.get_decoder().rotary_emb.layer_types) == ["sliding_attention"]
    plain = stored(TinyGGUF(tmp_path / "plain.gguf", "gemma3").write())
    assert torch.equal(target.forward(IDS).logits, plain.forward(IDS).logits)


def test_long_factors_of_rope_are_refused(tmp_path: Path) -> None:
    writer = TinyGGUF(tmp_path / "m.gguf")
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        writer.extra[name] = np.linspace(1, 8, HIDDEN // HEADS // 2, dtype=np.float32)
    with pytest.raises(UserError, match=r"scales RoPE with rope_factors_long.weight \(LongRoPE\)"):
        stored(writer.write())


def test_a_copy_of_the_model_shares_the_blocks(tmp_path: Path) -> None:
    target = stored(TinyGGUF(tmp_path / "m.gguf").write())
    copy = target.private_model()
    copies = [x for x in copy.modules() if isinstance(x, (StoredLinear, StoredEmbedding))]
    for own, copied in zip(matrices(target), copies, strict=True):
        assert own is copied.weight


def test_rows_are_read_from_the_mapped_file(tmp_path: Path) -> None:
    """Rows of queries and keys of a llama file are permuted, so they are copied."""
    file = TinyGGUF(tmp_path / "m.gguf").write()
    attention = stored(file).layers[0].self_attn
    size = file.stat().st_size
    sizes = {
        name: getattr(attention, name).weight.blocks.untyped_storage().nbytes()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert sizes["v_proj"] == sizes["o_proj"] == size
    assert sizes["q_proj"] < size and sizes["k_proj"] < size


def test_choice_between_stored_weights_and_safetensors(tmp_path: Path) -> None:
    file = TinyGGUF(tmp_path / "m.gguf").write()
    folder = tmp_path / "target"
    load_target(file, torch.float32, "cpu").model.save_pretrained(folder)
    measured: list[str | None] = []

    def measure(shapes: MatrixShapes, stored_format: str | None) -> dict[str, PassTimes]:
        measured.append(stored_format)
        assert shapes.hidden_size == HIDDEN
        milliseconds = {"float32": 3.0, "bfloat16": 2.0} | (
            {stored_format: 1.0} if stored_format else {}
        )
        return {name: dict.fromkeys(ROW_COUNTS, ms) for name, ms in milliseconds.items()}

    def choice(path: Path, dtype: str, device: str, allow: bool = True) -> tuple[object, ...]:
        return choose_weights(path, dtype, device, allow, measure, has_stored=True)[:2]

    assert choice(folder, "auto", "cpu") == (False, torch.bfloat16)
    shutil.copy(file, folder / "model.gguf")
    assert choice(folder, "auto", "cpu") == (True, torch.float32)
    assert measured == [None, "Q4_1"]
    unverified = choose_weights(folder, "auto", "cpu", measure=measure)
    assert unverified[:2] == (False, torch.bfloat16)
    assert choice(folder, "bfloat16", "cpu") == (False, torch.bfloat16)
    assert choice(folder, "auto", "cuda") == (False, torch.bfloat16)
    assert choice(folder, "auto", "cpu", False) == (False, torch.bfloat16)
    assert choice(file, "auto", "cpu") == (True, torch.float32)
    assert choice(file, "auto", "cpu", False) == (False, torch.bfloat16)
    assert choice(file, "bfloat16", "cpu") == (True, torch.bfloat16)
    assert choice(file, "auto", "cuda") == (False, torch.bfloat16)


def test_slower_stored_weights_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    file = TinyGGUF(tmp_path / "m.gguf").write()
    load_target(file, torch.float32, "cpu").model.save_pretrained(folder)
    shutil.copy(file, folder / "model.gguf")
    times = {"float32": 1.0, "bfloat16": 0.99, "Q4_1": 2.0}
    passes = {name: dict.fromkeys(ROW_COUNTS, ms) for name, ms in times.items()}
    chosen = choose_weights(folder, "auto", "cpu", measure=lambda *_: passes, has_stored=True)
    assert chosen[:2] == (False, torch.float32)
    assert chosen.speed is not None and chosen.speed.times == passes


def test_a_folder_with_a_gguf_file_can_use_stored_weights(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    file = TinyGGUF(tmp_path / "m.gguf").write()
    load_target(file, torch.float32, "cpu").model.save_pretrained(folder)
    shutil.copy(file, folder / "model.gguf")
    target = load_target(folder, torch.float32, "cpu", stored=True)
    check_logits(target, file)


def test_released_pages_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Split lm_head into three parts.
    monkeypatch.setattr("peagle.target.gguf.modules.MAX_OUTPUTS", 40)
    file = TinyGGUF(tmp_path / "m.gguf", "qwen2").write()
    target = stored(file)
    before = target.forward(IDS).logits
    target.release_pages()
    assert torch.equal(target.forward(IDS).logits, before)
    check_logits(target, file)


def test_bytes_of_weights(tmp_path: Path) -> None:
    """A tied table counts once."""
    target = stored(TinyGGUF(tmp_path / "m.gguf", "llama", "Q8_0").write())
    numbers = VOCAB_SIZE * HIDDEN + LAYERS * (2.5 * HIDDEN * HIDDEN + 0.5 * HIDDEN * HIDDEN)
    numbers += LAYERS * 3 * HIDDEN * INNER
    norms = (2 * LAYERS + 1) * HIDDEN
    assert weight_bytes(target.model) == numbers * 34 // 32 + 4 * norms


def test_only_a_file_from_the_receipt_replaces_the_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"float32": 3.0, "bfloat16": 3.0, "Q4_1": 1.0}

    def measure(shapes: MatrixShapes, stored_format: str | None) -> dict[str, PassTimes]:
        names = [name for name in times if name != "Q4_1" or stored_format]
        return {name: dict.fromkeys(ROW_COUNTS, times[name]) for name in names}

    monkeypatch.setattr(
        "peagle.model_pair.choose_weights", partial(choose_weights, measure=measure)
    )
    folder = tmp_path / "target"
    file = TinyGGUF(tmp_path / "m.gguf").write()
    load_target(file, torch.float32, "cpu").model.save_pretrained(folder)
    TinyGGUF(folder / "model.gguf", seed=9).write()  # weights of another model

    def stored_format() -> str | None:
        return load_models(str(folder), device="cpu").target.stored_format

    assert stored_format() is None
    write_receipt(folder, "hub", "main")  # This receipt says nothing about the content of the file.
    assert stored_format() is None
    (folder / RECEIPT).unlink()
    write_receipt(folder, "wheels", "1")
    assert stored_format() == "Q4_1"
    shutil.copy(TinyGGUF(file, format="Q8_0").write(), folder / "model.gguf")
    assert stored_format() is None  # The file was replaced.


def test_tokenizer_files_beside_the_file_are_not_read(tmp_path: Path) -> None:
    file = TinyGGUF(tmp_path / "m.gguf").write()
    expected = load_target(file, torch.float32, "cpu").config.vocab_size
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 7}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    shutil.rmtree(cache_home() / "gguf")
    assert load_target(file, torch.float32, "cpu").config.vocab_size == expected == VOCAB_SIZE
