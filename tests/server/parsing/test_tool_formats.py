"""The tool format of a chat template is detected; an unknown name is an error with the list."""

import pytest

from peagle.errors import UserError
from peagle.server.parsing.tool_formats import TOOL_FORMATS, detect_tool_format, find_tool_format


def test_names_of_formats() -> None:
    assert list(TOOL_FORMATS) == ["hermes", "qwen-xml", "llama", "mistral", "harmony"]
    assert find_tool_format("llama") is TOOL_FORMATS["llama"]
    assert find_tool_format("qwen3_coder") is TOOL_FORMATS["qwen-xml"]  # the name in vLLM


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(UserError, match=r"hermes, qwen-xml, llama, mistral, harmony.*'hermes'"):
        find_tool_format("herms")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>", "qwen-xml"),
        ('Environment: ipython {"name": name, "parameters": values}', "llama"),
        ("{{ '<|python_tag|>' + call }}", "llama"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<tool_call>name\n<arg_key>key</arg_key>", None),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_the_format_of_a_template_is_detected(template: str, name: str | None) -> None:
    tool_format = detect_tool_format(template)
    assert (tool_format.name if tool_format else None) == name
