"""A tiny target with a chat template."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.target import Target
from tests.support.models.tiny_models import make_target

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['content'] == 'w66' %}{{ raise_exception('no w66') }}{% endif %}"
    "{% if m['role'] == 'user' %}<user> {{ m['content'] }} <end> "
    "{% else %}<bot> {{ m['content'] }} w1 {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)


def make_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    vocab = {f"w{i}": i for i in range(93)} | {"<user>": 93, "<end>": 94, "<bot>": 95}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    tokenizer.chat_template = template
    return tokenizer


def make_chat_target(template: str = TEMPLATE) -> Target:
    """A tiny target with a chat template, which often generates its stop token."""
    target = make_target()
    target.model.lm_head.weight.data[1] *= 3
    target.tokenizer = make_tokenizer(template)
    return target


def save_chat_target(folder: Path) -> Target:
    target = make_chat_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return target


def plain(target: Target, ids: list[int], tokens: int) -> list[int]:
    """Greedy generation of transformers."""
    out = target.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=tokens,
        do_sample=False,
    )
    return out[0, len(ids) :].tolist()
