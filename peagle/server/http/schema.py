"""Request bodies of the OpenAI API, as Pydantic models.

Unknown fields are ignored. Known fields that the server does not support are refused. Lists stop at
their first wrong item: the errors of a million items would take gigabytes and many seconds.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WrapValidator

from peagle.server.http.errors import ApiError

MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_IDS = 1024
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
MAX_GUIDED_CHOICES = 1 << 14
MAX_LOGIT_BIAS = 1 << 16
MAX_DETOKENIZE_IDS = 1 << 20
MAX_TOP_LOGPROBS = 20
MAX_K = 31
MAX_INT = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_NAME_CHARS = 512
MAX_TYPE_CHARS = 64
DICT_PART = 64  # Entries of a dictionary that are checked at once.
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions.

T = TypeVar("T")
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Items = Annotated[list[T], Field(fail_fast=True)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS)]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
GuidedChoices = Annotated[Items[str], Field(max_length=MAX_GUIDED_CHOICES)]
# Fields that other servers support, and what to do instead.
UNSUPPORTED = {
    "tools": "tools are not parsed by this server: leave them out",
    "functions": "functions are not parsed by this server: leave them out",
    "guided_decoding_backend": "llguidance is the only grammar backend: leave it out",
    "guided_whitespace_pattern": "up to 40 spaces are allowed between JSON tokens: leave it out,"
    " or use guided_regex",
    "structural_tag": "tools are not parsed by this server: leave it out",
    "suffix": "there is no infilling: leave it out",
    "use_beam_search": "there is no beam search: leave it out",
    "prompt_embeds": "prompts are text or token ids: use prompt",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias",
    "truncate_prompt_tokens": "prompts are never truncated: shorten the prompt",
    "chat_template": "the target's own template is used: leave it out",
    "continue_final_message": "an answer always begins a new message: leave it out",
    "documents": "chat templates receive messages only: leave them out",
    "audio": "only text is supported: leave it out",
    "return_token_ids": "use logprobs, whose entries are tokens",
    "return_tokens_as_token_ids": "use logprobs, whose entries are tokens",
}


def check_in_parts(value: Any, check: Callable[[Any], dict[int, float]]) -> dict[int, float]:
    """Check a dictionary part by part, and stop at the first part with a wrong entry.

    Pydantic before 2.14 always collects the errors of all entries of a dictionary.
    """
    if not isinstance(value, dict):
        return check(value)
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"there are {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    entries = list(value.items())
    checked: dict[int, float] = {}
    for start in range(0, len(entries), DICT_PART):
        checked |= check(dict(entries[start : start + DICT_PART]))
    return checked


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(RequestModel):
    name: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None  # Ignored: answers always follow the schema.


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`. Fields that are not listed here are refused."""

    model_config = ConfigDict(extra="allow")

    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: GuidedChoices | None = None
    grammar: str | None = None


class Extension(RequestModel):
    """The field `peagle`: method and K of this request, and whether its stream traces drafts."""

    method: Name | None = None
    k: Annotated[int, Field(ge=1, le=MAX_K)] | Literal["auto"] | None = None
    trace: bool | None = None


class GenerationRequest(RequestModel):
    """The fields that chat and completion requests share."""

    # Whether an answer that may not fit the context is refused, or ends where the context does.
    ends_with_context: ClassVar[bool] = False

    model: Name | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | Annotated[Items[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: Annotated[dict[TokenId, Bias], WrapValidator(check_in_parts)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: GuidedChoices | None = None
    guided_grammar: str | None = None
    user: Name | None = None
    cache_salt: Salt | None = None
    peagle: Extension | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """Check the rules that Pydantic cannot express."""
        if self.skip_special_tokens is False:
            raise ApiError(
                400,
                "skip_special_tokens: false is not supported: leave it out",
                "skip_special_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options requires stream: true", "stream_options")


class ContentPart(RequestModel):
    type: Annotated[str, StringConstraints(max_length=MAX_TYPE_CHARS)]
    text: str | None = None


class Message(RequestModel):
    role: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TYPE_CHARS)]
    content: str | Annotated[Items[ContentPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it: one text, no role "developer"."""
        role = "system" if self.role == "developer" else self.role
        if not isinstance(self.content, list):
            return {"role": role, "content": self.content or ""}
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise ApiError(
                    400,
                    f"messages: content of type {part.type!r} is not supported: use text only",
                    "messages",
                )
        return {"role": role, "content": "\n".join(part.text or "" for part in self.content)}


Messages = Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(GenerationRequest):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """None: up to the end of the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")


class AgentChatRequest(ChatRequest):
    """A chat request that stands for one of an API whose clients ask for very long answers."""

    ends_with_context = True


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | TokenIds
        | Annotated[Items[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[Items[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    add_special_tokens: bool | None = None

    @property
    def max_new_tokens(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.choices):
            raise ApiError(400, "best_of must equal n: answers are not ranked", "best_of")
        if self.max_new_tokens == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens: 0 requires echo: true; else use 1 or more", "max_tokens"
            )


class TokenizeRequest(RequestModel):
    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: Name | None = None
    tokens: Annotated[Items[TokenId], Field(max_length=MAX_DETOKENIZE_IDS)]


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Refuse fields that ask for something this server does not support."""
    for field, hint in UNSUPPORTED.items():
        if body.get(field):
            raise ApiError(400, f"{field} is not supported: {hint}", field)
    if body.get("tool_choice") not in (None, "none", "auto"):
        raise ApiError(400, f"tool_choice is not supported: {UNSUPPORTED['tools']}", "tool_choice")
    if body.get("modalities") not in (None, ["text"]):
        raise ApiError(400, "modalities: only text is supported", "modalities")
