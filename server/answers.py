"""What the server sends: the OpenAI API's answers as pydantic models, and nothing else.

Fields that only appear when they were asked for, or have something to say, are left out when None.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from server.grounding import Grounding


def _absent(value: Any) -> bool:
    return value is None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vl2"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    grounding: list[Grounding] | None = Field(default=None, exclude_if=_absent)


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = Field(default=None, exclude_if=_absent)


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=_absent)


class ChunkDelta(BaseModel):
    role: Literal["assistant"] | None = Field(default=None, exclude_if=_absent)
    content: str | None = Field(default=None, exclude_if=_absent)
    grounding: list[Grounding] | None = Field(default=None, exclude_if=_absent)


class ChunkChoice(BaseModel):
    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=_absent)


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=_absent)


class ChatChunkWithUsage(ChatChunk):
    """A chunk of a stream with include_usage: null in all but the last, which has no choices."""

    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=_absent)
    token_ids: list[int] | None = Field(default=None, exclude_if=_absent)


class CompletionChunk(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]


class Completion(CompletionChunk):
    """A whole text completion, or a chunk of a stream with include_usage."""

    usage: Usage | None = None


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Caption(BaseModel):
    caption: str
    grounding: list[Grounding] | None = Field(default=None, exclude_if=_absent)


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Text(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail
