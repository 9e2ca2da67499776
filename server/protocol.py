"""What clients send: the OpenAI API's requests as pydantic models, and nothing else.

Every field is honoured, documented as ignored, or refused by name: an unknown one is an error. Values keep their JSON
type (no "1" for 1), and null means "not given". What depends on the model (vocabulary, context) is checked later.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
MAX_TOKENS = 1_000_000  # of which the text may be asked for
INT64_MAX = 2**63 - 1


def refused(reason: str, *harmless: Any) -> BeforeValidator:
    """A field that this server does not serve: null and the `harmless` values pass, anything else is a 400."""

    def check(value: Any) -> None:
        if value is not None and not any(type(value) is type(item) and value == item for item in harmless):
            raise PydanticCustomError("refused", "{reason}", {"reason": reason})

    return BeforeValidator(check, json_schema_input_type=Any)


def _not_longer(most: int) -> BeforeValidator:
    """Refuse a collection for its length before its items, of which each could be an error of its own."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise PydanticCustomError("too_long", "must have at most {most} items", {"most": most})
        return value

    return BeforeValidator(check)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_or_parts(value: Any) -> Any:
    """A plain string is one text part; null, which only an assistant's message may have, is none."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _url_or_object(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


def known(key: str, *values: str) -> BeforeValidator:
    """Name the known values of the key that tells a union's members apart when it has another."""

    def check(value: Any) -> Any:
        if isinstance(value, RequestModel):  # made by this server
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError("not_an_object", "must be an object with {key}", {"key": repr(key)})
        if value.get(key) not in values:
            context = {"key": key, "value": repr(value.get(key))[:80], "known": ", ".join(values)}
            raise PydanticCustomError("unknown_kind", "unsupported {key} {value}; supported: {known}", context)
        return value

    return BeforeValidator(check)


def contradiction(param: str, message: str) -> PydanticCustomError:
    """Two fields that cannot go together; `param` is the one to blame."""
    return PydanticCustomError("contradiction", "{message}", {"message": message, "param": param})


class RequestModel(BaseModel):
    """Base of everything that clients send."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, data: Any) -> Any:
        """Drop nulls. Of unknown fields one is enough to refuse the request: a million would be a million errors."""
        if not isinstance(data, dict):
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(({key: data[key]} for key in data if key not in names), {})
        known = {key: value for key, value in data.items() if key in names and value is not None}
        return known | unknown


# Messages


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class ImageURL(RequestModel):
    """A picture: a data URL, or a URL that the server fetches.

    `detail` is accepted and ignored: tiling follows the picture's size alone.
    """

    url: str
    detail: str | None = None


class ImagePart(RequestModel):
    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_url_or_object)]


TextParts = Annotated[
    list[Annotated[TextPart, known("type", "text")]],
    Field(fail_fast=True),
    BeforeValidator(_text_or_parts, json_schema_input_type=str | list[TextPart]),
]
UserPart = Annotated[TextPart | ImagePart, Field(discriminator="type"), known("type", "text", "image_url")]
UserParts = Annotated[
    list[UserPart],
    Field(fail_fast=True),
    BeforeValidator(_text_or_parts, json_schema_input_type=str | list[TextPart | ImagePart]),
]
NO_TOOLS = "tool calling is not supported by this server"


class SystemMessage(RequestModel):
    role: Literal["system", "developer"]
    content: TextParts
    name: str | None = None  # ignored: the template has no place for it


class UserMessage(RequestModel):
    role: Literal["user"]
    content: UserParts
    name: str | None = None  # ignored


class AssistantMessage(RequestModel):
    """An earlier answer, as the API returned it; as the last message, the beginning of the answer to continue."""

    role: Literal["assistant"]
    content: TextParts = []
    name: str | None = None  # ignored
    grounding: list[Any] = []  # as the API returned it; ignored
    parsed: Any = None  # ignored: OpenAI's client adds it when it reads streams and schemas
    refusal: Annotated[Any, refused("refusals are not supported in messages")] = None
    audio: Annotated[Any, refused("audio is not supported by this server")] = None
    annotations: Annotated[Any, refused("annotations are not supported in messages", [])] = None
    tool_calls: Annotated[Any, refused(NO_TOOLS, [])] = None
    function_call: Annotated[Any, refused(NO_TOOLS)] = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage,
    Field(discriminator="role"),
    known("role", "system", "developer", "user", "assistant"),
]


# Requests


class StreamOptions(RequestModel):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, refused("obfuscation is not supported by this server", False)] = None


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A JSON schema that the answer satisfies. `strict` changes nothing: it is always enforced."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None  # ignored: the model sees nothing of the schema
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat,
    Field(discriminator="type"),
    known("type", "text", "json_object", "json_schema"),
]


class StructuredOutputs(RequestModel):
    """The form of the answer by one of: a JSON schema, a regular expression, a list of texts, a Lark grammar."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1), _not_longer(1024)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one_form(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise contradiction("structured_outputs", "structured_outputs takes one of json, regex, choice, grammar")
        return self


class GroundingRequest(RequestModel):
    """A wish for boxes in the answer: where one thing is, or where all is that a description mentions.

    `image_index`: the picture that the boxes are in, counted from 0; by default the conversation's last.
    """

    locate: str | None = None
    describe: bool = False
    image_index: int | None = Field(None, ge=0)


class SamplingRequest(RequestModel):
    """What every request for generated text can say."""

    model: str
    stream: bool = False
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        _not_longer(4),
        BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
    ] = []
    stop_token_ids: Annotated[list[int], _not_longer(256)] = []
    seed: int | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1)  # 0 and -1: off
    min_p: float = Field(0.0, ge=0, le=1)
    # The model API's bounds: beyond them a scaled logit leaves the range of float32.
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], Annotated[float, Field(ge=-100, le=100)]],
        _not_longer(4096),
    ] = {}
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(0, ge=-INT64_MAX - 1, le=INT64_MAX)  # lower runs earlier
    cache_salt: str | None = Field(None, min_length=1, max_length=256)  # reuse nothing but what has the same salt

    # Accepted and ignored: they change nothing in an answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    # Refused, but for what changes nothing.
    prompt_cache_options: Annotated[Any, refused("every prompt is cached; cache_salt parts caches")] = None
    moderation: Annotated[Any, refused("moderation is not supported by this server")] = None
    store: Annotated[Any, refused("answers are never stored", False)] = None


class GenerationRequest(SamplingRequest):
    """What chat and text completion share."""

    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options", "stream_options is only allowed with stream: true")
        return self


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def check_one_form(
    structured: StructuredOutputs | None, form: object, grounding: GroundingRequest | None, name: str
) -> None:
    """An answer has one form at most. `form` is the field `name`, of which plain text is none."""
    formed = not isinstance(form, TextFormat | None)
    if formed and structured is not None:
        raise contradiction("structured_outputs", f"give either structured_outputs or {name}")
    if grounding is not None and (formed or structured is not None):
        raise contradiction("grounding", "grounding and structured output cannot go together")


class ChatOptions(GenerationRequest):
    """A chat request but for its messages."""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # wins over max_tokens, the older name
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    grounding: GroundingRequest | None = None

    tools: Annotated[Any, refused(NO_TOOLS, [])] = None
    tool_choice: Annotated[Any, refused(NO_TOOLS, "none")] = None
    parallel_tool_calls: Annotated[Any, refused(NO_TOOLS)] = None
    functions: Annotated[Any, refused(NO_TOOLS, [])] = None
    function_call: Annotated[Any, refused(NO_TOOLS, "none")] = None
    modalities: Annotated[Any, refused("only text answers are supported", ["text"])] = None
    audio: Annotated[Any, refused("audio is not supported by this server")] = None
    prediction: Annotated[Any, refused("predicted outputs are not supported by this server")] = None
    reasoning_effort: Annotated[Any, refused("this is not a reasoning model")] = None
    verbosity: Annotated[Any, refused("verbosity is not supported by this model")] = None
    web_search_options: Annotated[Any, refused("web search is not supported by this server")] = None

    @property
    def answer_limit(self) -> int | None:
        """The most tokens that the client wants, or None."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def answer_limit_name(self) -> str:
        """The field that has it."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @model_validator(mode="after")
    def _no_contradictions(self) -> ChatOptions:
        if self.top_logprobs is not None and not self.logprobs:
            raise contradiction("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        check_one_form(self.structured_outputs, self.response_format, self.grounding, "response_format")
        _check_min_tokens(self.min_tokens, self.answer_limit)
        return self


class ChatRequest(ChatOptions):
    """POST /v1/chat/completions."""

    messages: Messages


class TokenizeRequest(ChatOptions):
    """POST /tokenize: the body of a chat completion, or a text prompt as /v1/completions would run it."""

    model: str | None = None  # type: ignore[assignment]
    messages: Messages | None = None
    prompt: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.messages is None) == (self.prompt is None):
            raise contradiction("messages", "give either messages or prompt")
        return self


class DetokenizeRequest(RequestModel):
    """POST /detokenize: token ids whose text is wanted, control tokens included unless they are to be skipped."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=MAX_TOKENS)]
    skip_special_tokens: bool = False


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """The four forms of a prompt become one: a list of texts, or of lists of token ids."""
    prompts = [value] if isinstance(value, str) or (isinstance(value, list) and _are_ids(value)) else value
    if isinstance(prompts, list) and 1 <= len(prompts) <= MAX_PROMPTS:
        if all(isinstance(prompt, str) for prompt in prompts):
            return prompts
        if all(isinstance(prompt, list) and _are_ids(prompt) for prompt in prompts):
            return prompts
    message = "must be a text, a list of token ids, or a list of 1 to {most} of either; none may be an empty list"
    raise PydanticCustomError("prompt_form", message, {"most": MAX_PROMPTS})


def _are_ids(items: list[Any]) -> bool:
    """Whether these are token ids, and at least one. (A JSON true is no number here.)"""
    return bool(items) and all(type(item) is int and item >= 0 for item in items)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: text, or token ids that run as they are. Several prompts make n choices each."""

    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: int = Field(16, ge=1)  # the API's own default, of which the context may leave less
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    suffix: Annotated[Any, refused("inserting text before a suffix is not supported by this model")] = None
    best_of: Annotated[Any, refused("only best_of 1 is supported", 1)] = None

    @model_validator(mode="after")
    def _no_contradictions(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise contradiction("echo", "echo with logprobs is not supported: prompts have no logprobs")
        _check_min_tokens(self.min_tokens, self.max_tokens)
        return self


def _check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        raise contradiction("min_tokens", f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})")
