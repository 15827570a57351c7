"""The tool formats by name, and which one a chat template uses."""

from peagle.errors import UserError, did_you_mean
from peagle.server.parsing.formats.harmony import HarmonyFormat
from peagle.server.parsing.formats.hermes import HermesFormat
from peagle.server.parsing.formats.llama import LlamaFormat
from peagle.server.parsing.formats.mistral import MistralFormat
from peagle.server.parsing.formats.qwen_xml import QwenXmlFormat
from peagle.server.parsing.tool_format import ToolFormat

ALL_FORMATS: tuple[ToolFormat, ...] = (
    HermesFormat(),
    QwenXmlFormat(),
    LlamaFormat(),
    MistralFormat(),
    HarmonyFormat(),
)
TOOL_FORMATS = {tool_format.name: tool_format for tool_format in ALL_FORMATS}
VLLM_NAMES = {
    "qwen3_coder": "qwen-xml",
    "qwen3_xml": "qwen-xml",
    "llama3_json": "llama",
    "openai": "harmony",
}


def find_tool_format(name: str) -> ToolFormat:
    """The format of this name, which may be one of vLLM's."""
    name = VLLM_NAMES.get(name, name)
    if name not in TOOL_FORMATS:
        known = list(TOOL_FORMATS)
        raise UserError(
            f"there is no tool parser {name!r}: use one of {', '.join(known)}."
            f"{did_you_mean(name, known)}"
        )
    return TOOL_FORMATS[name]


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """The format that a chat template shows to its target; None: no known one."""
    name = _detect(chat_template)
    return TOOL_FORMATS[name] if name else None


def _detect(template: str) -> str:
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template and "<parameter=" in template:
        return "qwen-xml"
    # GLM writes keys and values in tags of their own.
    if "<tool_call>" in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama"
    return ""
