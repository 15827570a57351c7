"""A tiny pair whose tokens can form any text, and tools with short constrained calls."""

from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from peagle.catalog.pair import DrafterSource, Pair, TargetSource
from peagle.core import Method
from peagle.drafter import Drafter
from peagle.loaded import LoadedPair
from peagle.target import Target
from tests.support.models.byte_level import CONTEXT, VOCAB_SIZE, byte_level_tokenizer
from tests.support.models.tiny_models import make_drafter, make_target

# Like the template of a target that supports tools, calls and results.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}tool {{ t | tojson }}\n{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{% for key, value in c.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}"
    "{% endfor %}{{ '\\n' }}{% endfor %}assistant:"
)
# Like the template of a reasoning target, whose thinking part is opened by the prompt.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    "{% if thinks is defined and thinks == 'inside' %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"the {name}", "parameters": parameters} | fields
    return {"type": "function", "function": function}


TOOLS = [tool("weather", WEATHER), tool("clock", CLOCK)]
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}


MARKERS = (
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
)


def tool_tokenizer(template: str, markers: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """`markers` are special tokens, besides bytes and a few words."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(markers)})
    return tokenizer


@cache
def tool_pair(template: str = TEMPLATE, markers: tuple[str, ...] = ()) -> LoadedPair:
    vocab = VOCAB_SIZE + len(MARKERS)
    model = make_target(vocab_size=vocab, max_position_embeddings=CONTEXT).model
    tokenizer = tool_tokenizer(template, markers)
    target = Target(model, tokenizer, "tiny")
    drafters: dict[Method, Drafter] = {
        "p-eagle": make_drafter(target, "p-eagle", 2),
        "eagle3": make_drafter(target, "eagle3", 1),
    }
    pair = Pair("tiny", TargetSource(order=("folder",)), dict.fromkeys(drafters, DrafterSource()))
    return LoadedPair(pair, target, drafters)
