"""Random MXFP4 experts: sizes and standard deviations; they are never built as dense matrices."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from peagle.bench.random_experts import random_mxfp4_experts, random_mxfp4_model
from peagle.errors import UserError
from peagle.target import Target
from peagle.target.experts.stored_experts import StoredExperts
from tests.support.models.tiny_models import CONFIGS


def gpt_oss_config(**sizes: int):  # type: ignore[no-untyped-def]
    config = CONFIGS["gpt-oss"]()
    for name, value in {"hidden_size": 64, "intermediate_size": 96, **sizes}.items():
        setattr(config, name, value)
    return config


def test_weights_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    build = GptOssExperts.__init__

    def record(self: GptOssExperts, config: object) -> None:
        build(self, config)
        devices.append(self.gate_up_proj.device.type)

    config = gpt_oss_config()
    dense = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    monkeypatch.setattr(GptOssExperts, "__init__", record)
    torch.manual_seed(0)
    model = random_mxfp4_model(config, "cpu", torch.float32)
    assert set(devices) == {"meta"} and not any(x.is_meta for x in model.parameters())
    others = {name: x for name, x in dense.named_parameters() if ".experts." not in name}
    assert {name: x.shape for name, x in model.named_parameters()} == {
        name: x.shape for name, x in others.items()
    }
    for name, parameter in model.named_parameters():
        expected = others[name].detach()
        if expected.unique().numel() == 1:  # norms and biases
            assert torch.equal(parameter, expected), name
        elif expected.ndim > 1:
            assert float(parameter.std()) == pytest.approx(float(expected.std()), rel=0.15), name
        else:  # sinks and biases of routers
            assert 0 < float(parameter.std()) < 0.05, name
    for name, buffer in dense.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name


def test_experts_have_the_standard_deviation() -> None:
    torch.manual_seed(0)
    model = random_mxfp4_model(gpt_oss_config(num_hidden_layers=4), "cpu", torch.bfloat16)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        assert isinstance(experts, StoredExperts)
        for matrices, shape in ((experts.gate_up, (192, 64)), (experts.down, (64, 96))):
            dense = torch.stack([matrices.dense(i, torch.float32) for i in range(4)])
            assert dense.shape == (4, *shape)
            assert float(dense.std()) == pytest.approx(0.02, rel=0.05)
            assert matrices.bias is not None and matrices.bias.dtype == torch.bfloat16
    logits = Target(model).forward(torch.arange(8)).logits
    assert logits.isfinite().all() and logits.dtype == torch.bfloat16


def test_weights_depend_only_on_the_seed() -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = random_mxfp4_model(gpt_oss_config(), "cpu", torch.float32)
        weights.append((model.lm_head.weight, model.model.layers[3].mlp.experts.down.weight))
    assert all(torch.equal(x, y) for x, y in zip(weights[0], weights[1], strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(weights[0], weights[2], strict=True))


def test_other_models_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3-moe"]())
    with pytest.raises(UserError, match="experts of a qwen3_moe model cannot be mxfp4"):
        random_mxfp4_experts(model, "cpu")
