"""GPT-OSS with published MXFP4 experts: logits of transformers, stored codes, rounding, errors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from peagle.engine.step.stepper import weight_count
from peagle.errors import UserError
from peagle.kernels.expert_matrices import MXFP4_VALUES, decode_mxfp4
from peagle.target import load_target
from peagle.target.experts.mxfp4_codes import quantize_mxfp4
from peagle.target.experts.stored_experts import StoredExperts
from peagle.target.gguf.modules import weight_bytes
from tests.support.engine.engines import ask, engine_of, pair_of
from tests.support.models.mxfp4_folders import save_mxfp4
from tests.support.models.tiny_models import make_drafter

IDS = torch.arange(3, 43)
FIRST = "model.layers.0.mlp.experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_mxfp4(tmp_path)
    return tmp_path


@pytest.mark.parametrize("files", [1, 3])
def test_logits_equal_transformers(files: int, tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path, files).eval()
    target = load_target(tmp_path, torch.float32, "cpu")
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    assert expected.std() > 0.1
    assert (target.forward(IDS).logits - expected).abs().max() <= 1e-5
    assert target.stop_ids == {1} and target.format == "mxfp4 experts"


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, tmp_path / "model.safetensors")
    target = load_target(tmp_path, torch.float32, "cpu")
    assert target.lm_head.data_ptr() == target.embedding.data_ptr()
    assert torch.equal(target.embedding, tensors["model.embed_tokens.weight"].float())


def test_experts_stay_as_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    build = GptOssExperts.__init__

    def record(self: GptOssExperts, config: object) -> None:
        build(self, config)
        devices.append(self.gate_up_proj.device.type)

    monkeypatch.setattr(GptOssExperts, "__init__", record)
    target = load_target(folder, torch.bfloat16, "cpu")
    assert set(devices) == {"meta"}
    stored = load_file(folder / "model.safetensors")
    experts = target.model.get_submodule(FIRST)
    assert isinstance(experts, StoredExperts) and target.dtype == torch.bfloat16
    for name, matrices in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
        prefix = f"{FIRST}.{name}"
        assert torch.equal(matrices.weight, stored[f"{prefix}_blocks"].flatten(-2))
        assert matrices.scales is not None and matrices.bias is not None
        assert torch.equal(matrices.scales, stored[f"{prefix}_scales"])
        assert torch.equal(matrices.bias, stored[f"{prefix}_bias"])
    assert weight_bytes(target.model) == sum(x.nbytes for x in stored.values())
    assert weight_count(nn.ModuleList([experts])) == 4 * (128 * 32 + 32 * 64)


def test_answers_of_an_engine_equal_transformers(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path).eval()
    target = load_target(tmp_path, torch.float32, "cpu")
    pair = pair_of(target, {"p-eagle": make_drafter(target, "p-eagle", 1)})
    prompt = [7, 9, 30, 4]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    for method in ("none", "p-eagle"):
        with engine_of(pair, method) as engine:
            assert engine.status()["weights"] == "mxfp4 experts, float32 elsewhere"
            tokens, _ = ask(engine, prompt, max_tokens=16)
        assert tokens == expected[0, 4:].tolist() and len(set(tokens)) > 2


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gate_up_proj_scales", None, "gate_up_proj_scales is missing"),
        ("down_proj_blocks", lambda x: x[:, :, :1], r"down_proj_blocks has shape \[4, 32, 1, 16\]"),
        ("down_proj_blocks", lambda x: x.to(torch.int8), "down_proj_blocks is torch.int8"),
        ("gate_up_proj_scales", lambda x: x.fill_(255), "gate_up_proj_scales has scales that"),
        ("down_proj_bias", lambda x: x.int(), "down_proj_bias is torch.int32"),
    ],
)
def test_malformed_experts(folder: Path, kind: str, change, message: str) -> None:  # type: ignore[no-untyped-def]
    change_tensor(folder, f"{FIRST}.{kind}", change)
    with pytest.raises(UserError, match=rf"tensor {FIRST}\.{message}.*download the target again"):
        load_target(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "lacks 1 tensors, the first is model.norm.weight"),
        (lambda x: x[:5], r"model.norm.weight has shape \[5\], but the config needs \[32\]"),
    ],
)
def test_malformed_weights(folder: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    change_tensor(folder, "model.norm.weight", change)
    with pytest.raises(UserError, match=rf"{message}: download the target again"):
        load_target(folder, torch.float32, "cpu")


def change_tensor(folder: Path, name: str, change) -> None:  # type: ignore[no-untyped-def]
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors")


def test_other_architectures_and_sizes_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    change = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match="a llama model in mxfp4, which is read for GPT-OSS only"):
        load_target(folder, torch.float32, "cpu")
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(UserError, match=r"multiples of 32.* experts are 48 wide: use fp8 or int8"):
        load_target(folder, torch.float32, "cpu")


def every_value() -> Tensor:
    """The values of all codes, twice: [32]."""
    values = torch.tensor(MXFP4_VALUES)
    return torch.cat([values, -values] * 2)


def test_values_of_codes_are_exact() -> None:
    weight = torch.stack([every_value() * 2.0**i for i in (-130, -20, -1, 0, 3, 100)])
    codes, scales = quantize_mxfp4(weight[None])
    assert (codes.shape, scales.shape) == ((1, 6, 16), (1, 6, 1))
    assert torch.equal(decode_mxfp4(codes, scales, torch.float32)[0, 1:], weight[1:])
    assert scales.flatten().tolist() == [0, 107, 126, 127, 130, 227]


def test_ties_are_rounded_to_the_even_code() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :9] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0])
    codes, scales = quantize_mxfp4(weight)
    rounded = decode_mxfp4(codes, scales, torch.float32)[0, :9].tolist()
    assert rounded == [0, 1, 1, 2, 2, 4, 4, -4, 6] and scales.item() == 127


def test_every_weight_is_rounded_to_the_nearest() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_mxfp4(weight)
    decoded = decode_mxfp4(codes, scales, torch.float32)
    steps = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    distances = (weight[..., None] - every_value() * steps[..., None]).abs().amin(-1)
    assert torch.allclose((weight - decoded).abs(), distances)
    assert (weight - decoded).norm() < 0.115 * weight.norm()


def test_the_largest_weight_of_a_block_may_choose_the_next_exponent() -> None:
    """A single 7.9 is closer to 8 = 4 * 2 than to 6, but with many values of 1.5, the smaller
    exponent has less error.
    """
    weight = torch.zeros(2, 32)
    weight[:, 0] = 7.9
    weight[1, 1:] = 1.5
    codes, scales = quantize_mxfp4(weight)
    assert scales.flatten().tolist() == [128, 127]
    assert decode_mxfp4(codes, scales, torch.float32)[:, 0].tolist() == [8, 6]


def test_zeros_stay_zeros() -> None:
    codes, scales = quantize_mxfp4(torch.zeros(2, 64))
    assert not decode_mxfp4(codes, scales, torch.float32).any()
