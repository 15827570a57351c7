"""The fields that chat and completion requests share."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints, WrapValidator

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.base import (
    MAX_INT,
    MAX_NAME_CHARS,
    Items,
    Name,
    RequestModel,
    TokenId,
    check_in_parts,
)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_IDS = 1024
MAX_GUIDED_CHOICES = 1 << 14
MAX_TOP_LOGPROBS = 20
MAX_K = 31
MAX_SEED = 2**63 - 1

Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Salt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
GuidedChoices = Annotated[Items[str], Field(max_length=MAX_GUIDED_CHOICES)]


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
    """The field `peagle`: method and K of a request, a trace of its drafts, and an opt-out."""

    method: Name | None = None
    k: Annotated[int, Field(ge=1, le=MAX_K)] | Literal["auto"] | None = None
    trace: bool | None = None
    learn: bool | None = None  # False: the request and its answer are not stored.


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
