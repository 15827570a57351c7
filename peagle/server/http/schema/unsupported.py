"""Fields that other servers support and this one does not, and what to do instead."""

from typing import Any

from peagle.server.http.errors import ApiError

UNSUPPORTED = {
    "functions": "it was replaced by tools: use tools",
    "function_call": "it was replaced by tool_choice: use tools and tool_choice",
    "guided_decoding_backend": "llguidance is the only grammar backend: leave it out",
    "guided_whitespace_pattern": "up to 40 spaces are allowed between JSON tokens: leave it out,"
    " or use guided_regex",
    "structural_tag": "use tools with strict: true, or response_format",
    "suffix": "there is no infilling: leave it out",
    "use_beam_search": "there is no beam search: leave it out",
    "prompt_embeds": "prompts are text or token ids: use prompt",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias",
    "truncate_prompt_tokens": "prompts are never truncated: shorten the prompt",
    "chat_template": "the target's own template is used: leave it out",
    "continue_final_message": "an answer always begins a new message: leave it out",
    "documents": "chat templates receive messages and tools only: leave them out",
    "audio": "only text is supported: leave it out",
    "return_token_ids": "use logprobs, whose entries are tokens",
    "return_tokens_as_token_ids": "use logprobs, whose entries are tokens",
}


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Refuse fields that ask for something this server does not support."""
    for field, hint in UNSUPPORTED.items():
        if body.get(field):
            raise ApiError(400, f"{field} is not supported: {hint}", field)
    if body.get("modalities") not in (None, ["text"]):
        raise ApiError(400, "modalities: only text is supported", "modalities")
