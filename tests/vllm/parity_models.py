"""Tiny random targets and drafters in which every part affects the drafts."""

from pathlib import Path
from typing import Any

import torch
from parity_cases import MASK_ID, VOCAB, Case
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.formats.checkpoint import load
from peagle.drafter.untrained import untrained_drafter
from peagle.target import Target, load_target

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    # Not the default, so that a lost value changes the drafts. The same applies to eps.
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "rms_norm_eps": 0.01,
    "initializer_range": 0.15,  # With the usual 0.02, answers repeat one token.
}


def tiny_target(case: Case, folder: Path, seed: int = 0) -> Target:
    """A target with random norms and biases, saved in fp32 and loaded as usual."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(case.architecture, **(SIZES | case.sizes))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return load_target(folder, torch.float32, "cpu")


def tiny_drafter(case: Case, target: Target, seed: int = 1) -> Drafter:
    config = config_for(
        target,
        case.method,
        case.num_layers,
        case.aux_layer_ids,
        mask_token_id=MASK_ID,
        draft_vocab_size=case.draft_vocab,
        **case.switches,
    )
    generator = torch.Generator().manual_seed(seed)
    kept = (
        torch.randperm(VOCAB, generator=generator)[: case.draft_vocab] if case.draft_vocab else None
    )
    drafter = untrained_drafter(config, target, seed, kept)
    randomize(drafter, generator)
    if case.own_tables:
        drafter.set_embed_and_head(
            drafter.embed_tokens.roll(1, 0), drafter.lm_head.roll(1, 0), kept
        )
    return drafter


def randomize(drafter: Drafter, generator: torch.Generator) -> None:
    """Give the drafter weights so large that context, positions and masks decide the drafts.

    An untrained drafter predicts nearly the same tokens at every mask row, so that wrong rows would
    not be detected.
    """

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(normal(module.weight, 2 * module.in_features**-0.5))
            if module.bias is not None:
                module.bias.copy_(normal(module.bias, 0.5))
        elif isinstance(module, nn.RMSNorm):
            module.weight.copy_(torch.rand(module.weight.shape, generator=generator) + 0.5)
    if drafter.mask_embedding is not None and drafter.mask_hidden is not None:
        drafter.mask_embedding.copy_(normal(drafter.mask_embedding, 0.15))
        drafter.mask_hidden.copy_(normal(drafter.mask_hidden, 1.0))


def tiny_prompts(case: Case, seed: int = 2) -> list[list[int]]:
    """Random ids; the longer prompts start with the same `shared_prefix` tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(VOCAB, (case.shared_prefix,), generator=generator).tolist()
    prompts = []
    for length in case.prompts:
        ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        prompts.append(prefix + ids[len(prefix) :] if length > len(prefix) else ids)
    return prompts


def real_drafter(target: Target, folder: str) -> Drafter:
    """The drafter in `folder`, or four random layers with the taps of SmolLM2.

    The mask id is one that SmolLM2 never generates.
    """
    if folder:
        return load(Path(folder), target, torch.float32)
    config = config_for(target, "p-eagle", 4, aux_layer_ids=(2, 15, 27), mask_token_id=16)
    drafter = untrained_drafter(config, target)
    randomize(drafter, torch.Generator().manual_seed(1))
    return drafter


def real_prompts(target: Target) -> list[list[int]]:
    questions = ("Write a Python function that reverses a string.", "Why is the sky blue?")
    return [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
