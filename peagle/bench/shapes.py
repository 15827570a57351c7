"""SHAPES: configs of transformers, by the names that `peagle bench-step` knows."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    logging,
)

from peagle.errors import UserError, did_you_mean
from peagle.target.loading_error import loading_reason


def gpt_oss(layers: int, experts: int) -> GptOssConfig:
    return GptOssConfig(
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=4,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        vocab_size=201088,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    )


SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "llama-3.2-3b": LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
    "qwen3-8b": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "gpt-oss-20b": gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": gpt_oss(layers=36, experts=128),
    "tiny": LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "tiny-qwen3-moe": Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
    "tiny-gpt-oss": GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=32,
        vocab_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    ),
}
MXFP4_SHAPES = ("gpt-oss-120b",)  # whose experts do not fit one GPU in bfloat16
# Names in configs of transformers: the experts of a layer, and those of a row.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_PER_ROW = ("num_experts_per_tok", "experts_per_token")


def shape_config(shape: str) -> Any:
    """The config of a known shape, or of a transformers config file or its folder."""
    if shape in SHAPES:
        return deepcopy(SHAPES[shape])
    if not Path(shape).exists():
        raise UserError(
            f"unknown shape {shape!r}: use one of {', '.join(SHAPES)}, a config.json of"
            f" transformers or its folder.{did_you_mean(shape, list(SHAPES))}"
        )
    try:
        config = read_config(Path(shape))
    except Exception as error:  # transformers raises exceptions of any type
        raise UserError(
            f"{shape} is not a config of transformers: {loading_reason(error).rstrip('.')}."
            " Give a config.json or its folder"
        ) from error
    check_layers(config, shape)
    return config


def read_config(path: Path) -> PreTrainedConfig:
    file = path / "config.json" if path.is_dir() else path
    if not isinstance(json.loads(file.read_text()), dict):
        raise ValueError("it holds no JSON object")
    logging.set_verbosity_error()  # Warnings about the config are errors later.
    return AutoConfig.from_pretrained(file, trust_remote_code=False)


def check_layers(config: PreTrainedConfig, shape: str) -> None:
    """Refuse numbers that fail only in the first pass, or not at all on some devices."""
    text = config.get_text_config()
    if (getattr(text, "num_hidden_layers", 1) or 0) < 1:
        raise UserError(f"{shape} has no layers: set num_hidden_layers to 1 or more")
    experts = expert_count(text)
    per_row = first_number(text, EXPERTS_PER_ROW)
    if experts and per_row is not None and not 1 <= per_row <= experts:
        raise UserError(
            f"{shape} has {experts} experts, of which a row chooses {per_row}: set"
            f" num_experts_per_tok to 1 to {experts}"
        )


def expert_count(text: Any) -> int | None:
    """The experts of a layer; None for a dense model. `text`: the config of the language model."""
    return first_number(text, EXPERT_COUNTS) or None


def first_number(text: Any, names: tuple[str, ...]) -> int | None:
    """The first of these fields that is a number; some configs have one number for each layer."""
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def shape_name(shape: str) -> str:
    """The name of a known shape, of the folder of a config.json, or of a file of another name."""
    if shape in SHAPES:
        return shape
    path = Path(shape).resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.name == "config.json" else path.stem


def quantization_method(shape: str) -> str | None:
    """What the config of a shape says about its stored weights, such as mxfp4 or fp8."""
    quantization = getattr(shape_config(shape), "quantization_config", None)
    if not isinstance(quantization, dict):
        return None
    return quantization.get("quant_method", "a format without a name")
