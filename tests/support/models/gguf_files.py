"""Tiny GGUF files with random weights, in every block format."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers import modeling_gguf_pytorch_utils as hf_gguf

from peagle.target.gguf.config_folder import location

VOCAB_SIZE = 96
HIDDEN = 256  # a block of the K formats
INNER = 512
LAYERS = 4
HEADS = 4
KV_HEADS = 2
CONTEXT = 256
# Offsets of float16 numbers in blocks: the scale, and the minimum if there is one.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
# The second number of a block, relative to its scale, for which weights have a mean of about 0.
CENTERS = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
SCALES = {"Q8_0": 4e-4, "Q5_K": 4e-4, "Q4_K": 4e-4, "Q2_K": 4e-3, "Q3_K": 4e-4, "Q6_K": 4e-5}


def random_blocks(format: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """[rows, bytes of a row] uint8: random codes with small scales."""
    generator = np.random.default_rng(seed)
    block_inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    blocks = generator.integers(0, 256, (rows, inputs // block_inputs, size), dtype=np.uint8)
    scales = SCALES.get(format, 0.01) * generator.uniform(0.5, 1.5, (*blocks.shape[:2], 1))
    if format not in CENTERS:
        scales *= generator.choice([-1, 1], scales.shape)
    factors = (1.0, CENTERS.get(format, 1.0))
    for factor, start in zip(factors, HALVES.get(format, (0,)), strict=False):
        numbers = factor * scales
        blocks[..., start : start + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


class TinyGGUF:
    """Writes a file of an architecture; `formats`: formats by the last part of a tensor name."""

    def __init__(
        self,
        path: Path,
        architecture: str = "llama",
        format: str = "Q4_1",
        formats: dict[str, str] | None = None,
        tied: bool = True,
        seed: int = 0,
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> None:
        self.path = path
        self.architecture = architecture
        self.format = format
        self.formats = formats or {}
        self.tied = tied
        self.generator = np.random.default_rng(seed)
        self.tokenizer = tokenizer  # byte-level
        self.vocab_size = VOCAB_SIZE if tokenizer is None else len(tokenizer)
        self.extra: dict[str, np.ndarray] = {}  # more tensors, in float32
        self.entries: dict[str, int | float | str] = {}  # more metadata
        self.left_out: tuple[str, ...] = ()
        self.scaling: tuple[str, float, int] | None = None  # of RoPE: type, factor, context before

    def write(self) -> Path:
        writer = GGUFWriter(self.path, self.architecture)
        self.writer = writer
        writer.add_block_count(LAYERS)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(self.vocab_size)
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_value_length(HIDDEN // HEADS)
        self._add_tokenizer()
        writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
        writer.add_uint32("tokenizer.ggml.bos_token_id", 2)
        if self.scaling is not None:
            kind, factor, before = self.scaling
            writer.add_string(f"{self.architecture}.rope.scaling.type", kind)
            writer.add_float32(f"{self.architecture}.rope.scaling.factor", factor)
            key = f"{self.architecture}.rope.scaling.original_context_length"
            writer.add_uint32(key, before)
        self._add_entries()
        self._add_tensors()
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.path

    def _add_tokenizer(self) -> None:
        tokens = [f"w{i}" for i in range(self.vocab_size)]
        if self.tokenizer is not None:
            model = json.loads(self.tokenizer.backend_tokenizer.to_str())["model"]
            tokens = sorted(self.tokenizer.get_vocab(), key=self.tokenizer.get_vocab().__getitem__)
            self.writer.add_tokenizer_model("gpt2")
            self.writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
            self.writer.add_chat_template(self.tokenizer.chat_template)
        self.writer.add_array("tokenizer.ggml.tokens", tokens)

    def _add_entries(self) -> None:
        for key, value in self.entries.items():
            if isinstance(value, str):
                self.writer.add_string(key, value)
            elif isinstance(value, float):
                self.writer.add_float32(key, value)
            else:
                self.writer.add_uint32(key, value)

    def _add_tensors(self) -> None:
        kv = KV_HEADS * HIDDEN // HEADS
        self._matrix("token_embd", self.vocab_size, HIDDEN)
        self._vector("output_norm.weight", HIDDEN, 1.0)
        if not self.tied:
            self._matrix("output", self.vocab_size, HIDDEN)
        for i in range(LAYERS):
            block = f"blk.{i}."
            self._vector(f"{block}attn_norm.weight", HIDDEN, 1.0)
            self._vector(f"{block}ffn_norm.weight", HIDDEN, 1.0)
            for name, rows in (("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv)):
                self._matrix(block + name, rows, HIDDEN)
                if self.architecture == "qwen2":
                    self._vector(f"{block}{name}.bias", rows, 0.0)
            if self.architecture in ("qwen3", "gemma3"):
                self._vector(f"{block}attn_q_norm.weight", HIDDEN // HEADS, 1.0)
                self._vector(f"{block}attn_k_norm.weight", HIDDEN // HEADS, 1.0)
            if self.architecture in ("gemma2", "gemma3"):
                self._vector(f"{block}post_attention_norm.weight", HIDDEN, 1.0)
                self._vector(f"{block}post_ffw_norm.weight", HIDDEN, 1.0)
            self._matrix(f"{block}attn_output", HIDDEN, HIDDEN)
            self._matrix(f"{block}ffn_gate", INNER, HIDDEN)
            self._matrix(f"{block}ffn_up", INNER, HIDDEN)
            self._matrix(f"{block}ffn_down", HIDDEN, INNER)
        for name, values in self.extra.items():
            self.writer.add_tensor(name, values)

    def _vector(self, name: str, size: int, mean: float) -> None:
        if name not in self.left_out:
            values = mean + 0.1 * self.generator.standard_normal(size)
            self.writer.add_tensor(name, values.astype(np.float32))

    def _matrix(self, name: str, rows: int, inputs: int) -> None:
        format = self.formats.get(name.rpartition(".")[2], self.format)
        full_name = f"{name}.weight"
        if full_name in self.left_out:
            return
        if format in ("F32", "F16", "BF16"):
            values = 0.05 * self.generator.standard_normal((rows, inputs)).astype(np.float32)
            data = plain_data(values, format)
        else:
            data = random_blocks(format, rows, inputs, int(self.generator.integers(1 << 30)))
        self.writer.add_tensor(full_name, data, raw_dtype=GGMLQuantizationType[format])


def plain_data(values: np.ndarray, format: str) -> np.ndarray:
    if format == "BF16":
        return torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
    return values.astype(np.float16 if format == "F16" else np.float32)


def transformers_model(file: Path, **config_changes: Any) -> PreTrainedModel:
    """The dequantized model in float32, read by transformers."""
    with location(file) as source:
        config = AutoConfig.from_pretrained(**source)
    for name, value in config_changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = hf_gguf.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(tensors["tensors"], strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval().requires_grad_(False)
