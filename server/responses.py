"""The Responses API as pydantic models: what a client sends, and what it gets. Nothing is stored between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from server.answers import TokenLogprob
from server.grounding import Grounding
from server.protocol import (
    MAX_LOGPROBS,
    NO_TOOLS,
    AssistantMessage,
    GroundingRequest,
    ImagePart,
    ImageURL,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    RequestModel,
    ResponseFormat,
    SamplingRequest,
    StreamOptions,
    SystemMessage,
    TextFormat,
    TextPart,
    UserMessage,
    check_one_form,
    contradiction,
    known,
    refused,
)

LOGPROBS = "message.output_text.logprobs"
_NO_STATE = "this server keeps nothing between requests; send the whole conversation as input"

# Input


class InputText(RequestModel):
    type: Literal["input_text"]
    text: str

    def as_part(self) -> TextPart:
        return TextPart(type="text", text=self.text)


class InputImage(RequestModel):
    """`detail` is accepted and ignored: tiling follows the picture's size alone."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None
    file_id: Annotated[Any, refused("this server stores no files; send image_url")] = None

    def as_part(self) -> ImagePart:
        return ImagePart(type="image_url", image_url=ImageURL(url=self.image_url))


class OutputText(RequestModel):
    """Text of an earlier answer, as the API returned it. Only the text counts."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field([])
    logprobs: list[Any] = Field([])

    def as_part(self) -> TextPart:
        return TextPart(type="text", text=self.text)


def _one_part(kind: str) -> BeforeValidator:
    """A plain string is one part of this kind."""

    def check(value: Any) -> Any:
        return [{"type": kind, "text": value}] if isinstance(value, str) else value

    return BeforeValidator(check, json_schema_input_type=str | list[Any])


class _InputMessage(RequestModel):
    """What messages have besides role and content. All of it is ignored but the type."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None


class InputSystem(_InputMessage):
    role: Literal["system", "developer"]
    content: Annotated[
        list[Annotated[InputText, known("type", "input_text")]], Field(fail_fast=True), _one_part("input_text")
    ]

    def as_message(self) -> SystemMessage:
        return SystemMessage(role="system", content=[part.as_part() for part in self.content])


class InputUser(_InputMessage):
    role: Literal["user"]
    content: Annotated[
        list[
            Annotated[InputText | InputImage, Field(discriminator="type"), known("type", "input_text", "input_image")]
        ],
        Field(fail_fast=True),
        _one_part("input_text"),
    ]

    def as_message(self) -> UserMessage:
        return UserMessage(role="user", content=[part.as_part() for part in self.content])


class InputAssistant(_InputMessage):
    """An earlier answer; as the last message, the beginning of the answer to continue."""

    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[OutputText, known("type", "output_text")]], Field(fail_fast=True), _one_part("output_text")
    ]
    grounding: list[Any] = Field([])  # as the API returned it; ignored

    def as_message(self) -> AssistantMessage:
        return AssistantMessage(role="assistant", content=[part.as_part() for part in self.content])


def _is_message(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "message"):
        context = {"kind": repr(kind)[:80]}
        raise PydanticCustomError("unknown_kind", "unsupported type {kind}; supported: message", context)
    return value


InputItem = Annotated[
    InputSystem | InputUser | InputAssistant,
    Field(discriminator="role"),
    known("role", "system", "developer", "user", "assistant"),
    BeforeValidator(_is_message),  # runs first
]


def _text_is_a_question(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextConfig(RequestModel):
    """The form of the answer. Chat's `response_format`, but for a schema, which has no object around it here."""

    format: (
        Annotated[
            TextFormat | JsonObjectFormat | TextSchemaFormat,
            Field(discriminator="type"),
            known("type", "text", "json_object", "json_schema"),
        ]
        | None
    ) = None
    verbosity: Annotated[Any, refused("verbosity is not supported by this model", "medium")] = None


class ResponsesRequest(SamplingRequest):
    """POST /v1/responses."""

    input: Annotated[
        list[InputItem],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_text_is_a_question, json_schema_input_type=str | list[InputItem]),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs"]] = Field([], fail_fast=True)
    text: TextConfig = TextConfig()
    grounding: GroundingRequest | None = None
    stream_options: StreamOptions | None = None

    # There are no tools, so how to choose among them changes nothing.
    tools: Annotated[Any, refused(NO_TOOLS, [])] = None
    tool_choice: Annotated[Any, refused(NO_TOOLS, "none", "auto")] = None
    parallel_tool_calls: bool | None = None

    max_tool_calls: Annotated[Any, refused(NO_TOOLS)] = None

    background: Annotated[Any, refused(_NO_STATE, False)] = None
    background_options: Annotated[Any, refused(_NO_STATE)] = None
    context_management: Annotated[Any, refused(_NO_STATE)] = None
    conversation: Annotated[Any, refused(_NO_STATE)] = None
    previous_response_id: Annotated[Any, refused(_NO_STATE)] = None
    access_programs: Annotated[Any, refused("access programs are not supported by this server")] = None
    image: Annotated[Any, refused("pictures are read as they were sent")] = None
    prompt: Annotated[Any, refused("prompt templates are not supported by this server")] = None
    reasoning: Annotated[Any, refused("this is not a reasoning model")] = None
    truncation: Annotated[Any, refused("a conversation that is too long is refused, not cut", "disabled")] = None

    @property
    def messages(self) -> list[Message]:
        """The conversation; a system message that begins it comes after the instructions, in one with them."""
        messages: list[Message] = [item.as_message() for item in self.input]
        if self.instructions is None:
            return messages
        first = messages[0]
        if not isinstance(first, SystemMessage):
            return [self._system(self.instructions), *messages]
        text = "".join(part.text for part in first.content)
        return [self._system(f"{self.instructions}\n\n{text}"), *messages[1:]]

    @property
    def response_format(self) -> ResponseFormat | None:
        """`text.format` as chat has it."""
        form = self.text.format
        if isinstance(form, TextSchemaFormat):
            return JsonSchemaFormat(type="json_schema", json_schema=form)
        return form

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens to report for each, or None for no log probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in self.include else None

    @staticmethod
    def _system(text: str) -> SystemMessage:
        return SystemMessage(role="system", content=[TextPart(type="text", text=text)])

    @model_validator(mode="after")
    def _no_contradictions(self) -> ResponsesRequest:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise contradiction("top_logprobs", f"top_logprobs is only allowed with include: [{LOGPROBS!r}]")
        if self.max_output_tokens is not None and self.min_tokens > self.max_output_tokens:
            message = f"min_tokens ({self.min_tokens}) is more than max_output_tokens ({self.max_output_tokens})"
            raise contradiction("min_tokens", message)
        check_one_form(self.structured_outputs, self.text.format, self.grounding, "text.format")
        return self


# Output


def _absent(value: Any) -> bool:
    return value is None


class OutputPart(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputPart]
    grounding: list[Grounding] | None = Field(default=None, exclude_if=_absent)


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class ResponseError(BaseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(BaseModel):
    """An answer, or its state within a stream. What has no meaning here, but clients expect, is constant."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage] = []
    temperature: float
    text: dict[str, Any]
    top_p: float
    top_logprobs: int
    usage: ResponseUsage | None = None
    user: str | None

    background: Literal[False] = False
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, None] = {"effort": None, "summary": None}
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    truncation: Literal["disabled"] = "disabled"


class Event(BaseModel):
    """One event of a stream; which of the fields it has follows from its type."""

    type: str
    sequence_number: int
    response: Response | None = Field(default=None, exclude_if=_absent)
    output_index: int | None = Field(default=None, exclude_if=_absent)
    content_index: int | None = Field(default=None, exclude_if=_absent)
    item_id: str | None = Field(default=None, exclude_if=_absent)
    item: OutputMessage | None = Field(default=None, exclude_if=_absent)
    part: OutputPart | None = Field(default=None, exclude_if=_absent)
    delta: str | None = Field(default=None, exclude_if=_absent)
    text: str | None = Field(default=None, exclude_if=_absent)
    logprobs: list[TokenLogprob] | None = Field(default=None, exclude_if=_absent)
