"""What a client may send. Unknown fields are ignored; what is known and cannot be honored is refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from peagle.server.http.errors import ApiError

MOST_CHOICES, MOST_STOPS, MOST_PROMPTS, MOST_TOP = 128, 32, 1024, 20
LARGEST = 2**31 - 1
LONGEST_NAME = 512

TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Name = Annotated[str, StringConstraints(max_length=LONGEST_NAME)]
KEEPER = "llguidance keeps answers to their grammar: leave it out"
REFUSED = {  # fields that other servers know, when they hold something
    "tools": "tools are not parsed by this server: leave them out",
    "functions": "functions are not parsed by this server: leave them out",
    "guided_decoding_backend": KEEPER,
    "guided_whitespace_pattern": "JSON has up to 40 spaces between its tokens here: leave it out, or use guided_regex",
    "structural_tag": "tools are not parsed by this server: leave it out",
    "suffix": "there is no infilling: leave it out",
    "use_beam_search": "there is no beam search: leave it out",
    "prompt_embeds": "prompts are text or token ids: use prompt",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias",
    "truncate_prompt_tokens": "a prompt is never cut: shorten it",
    "chat_template": "the target's own template is used: leave it out",
    "continue_final_message": "an answer always begins a new message: leave it out",
    "documents": "templates get messages only: leave them out",
    "audio": "text only: leave it out",
    "return_token_ids": "use logprobs, whose entries are tokens",
    "return_tokens_as_token_ids": "use logprobs, whose entries are tokens",
}


class Model(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Model):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Model):
    name: str | None = None
    asked: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None  # either way the answer is kept to the schema


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Model):
    """vLLM's; what is not here is refused."""

    model_config = ConfigDict(extra="allow")

    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Extension(Model):
    """Ours: which method and K answers this request, and whether a stream tells how drafts fared."""

    method: Name | None = None
    k: Annotated[int, Field(ge=1, le=31)] | Literal["auto"] | None = None
    trace: bool | None = None


class GenerationRequest(Model):
    """What chat and completions share."""

    model: Name | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=LARGEST)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=LARGEST)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    user: Name | None = None
    peagle: Extension | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """What pydantic cannot say."""
        if self.skip_special_tokens is False:
            raise ApiError(
                400,
                "skip_special_tokens false: special tokens are never shown",
                "skip_special_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options goes with stream: true", "stream_options")


class Part(Model):
    type: str
    text: str | None = None


class Message(Model):
    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        if not isinstance(self.content, list):
            return {"role": role, "content": self.content or ""}
        if other := next(
            (part.type for part in self.content if part.type != "text" or part.text is None), None
        ):
            raise ApiError(
                400, f"messages: a part of type {other!r} cannot be read: text only", "messages"
            )
        return {"role": role, "content": "\n".join(part.text or "" for part in self.content)}


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: int | None = Field(None, ge=1, le=LARGEST)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most(self) -> int | None:
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs: true", "top_logprobs")


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    max_tokens: int | None = Field(None, ge=0, le=LARGEST)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    add_special_tokens: bool | None = None

    @property
    def most(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
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
            raise ApiError(400, "best_of must equal n: answers are not ranked here", "best_of")
        if self.most == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens 0 goes with echo: true; else use 1 or more", "max_tokens"
            )


class TokenizeRequest(Model):
    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Model):
    model: Name | None = None
    tokens: list[TokenId]


def refuse_unsupported(body: dict[str, Any]) -> None:
    for field, reason in REFUSED.items():
        if body.get(field):
            raise ApiError(400, f"{field} cannot be honored: {reason}", field)
    if body.get("tool_choice") not in (None, "none", "auto"):
        raise ApiError(400, f"tool_choice cannot be honored: {REFUSED['tools']}", "tool_choice")
    if body.get("modalities") not in (None, ["text"]):
        raise ApiError(400, "modalities: text only", "modalities")
