"""POST /v1/responses: the API that new OpenAI clients speak. Text and pictures in, text out, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response as HTTPResponse

from model.tokenizer import Tokenizer
from server.answers import TokenLogprob
from server.errors import APIError
from server.generation import Answer, Generation, Tally, collect, make_jobs
from server.grounding import Span
from server.logprobs import token_logprobs
from server.prepare import PreparedPrompt, answer_room, place_boxes
from server.responses import (
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputPart,
    Response,
    ResponseError,
    ResponsesRequest,
    ResponseUsage,
)
from server.service import read_json, service_of
from server.streaming import EventStream, FinishReason, ScoredToken, frame, json_response, until_disconnect
from server.telemetry import current

router = APIRouter()


@router.post("/v1/responses", response_model=Response)
async def responses(request: Request) -> HTTPResponse:
    body = await read_json(request, ResponsesRequest)
    service = service_of(request)
    service.check_model(body.model)
    service.check_ready()
    messages = body.messages
    work = service.preparer.chat(
        messages,
        body.grounding,
        field="input",
        offset=len(messages) - len(body.input),
        cache_salt=body.cache_salt or "",
    )
    prompt = await until_disconnect(request, work)
    form_of_answer = service.preparer.grammar(
        body.response_format, body.structured_outputs, schema_field="text.format.schema"
    )
    grammar = await until_disconnect(request, form_of_answer)
    # Megabytes of pictures that the answer has no use for.
    body, messages = body.model_copy(update={"input": []}), []
    max_tokens = answer_room(
        prompt,
        service.max_model_len,
        wanted=body.max_output_tokens,
        least=body.min_tokens,
        param="input",
        wanted_param="max_output_tokens",
    )
    identity = uuid.uuid4().hex
    jobs = make_jobs(
        body,
        prompt,
        service.tokenizer,
        request_id=f"resp-{identity}",
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        vocab_size=service.vocab_size,
        grammar=grammar,
    )
    form = _Form(body, prompt, identity, service.tokenizer)
    if body.stream:
        generation = Generation(service.engine, jobs)
        await until_disconnect(request, generation.begin())
        return EventStream(form.stream(generation), generation.close, end="")
    [answer] = await until_disconnect(request, collect(service.engine, jobs))
    return json_response(form.whole(answer))


class _Form:
    """How the answer of one request is written down: one response with one message with one part."""

    def __init__(self, body: ResponsesRequest, prompt: PreparedPrompt, identity: str, tokenizer: Tokenizer) -> None:
        self._body = body
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._item_id = f"msg_{identity}"
        self._num_events = 0
        self._tally = Tally([prompt], 1)
        form = body.text.format
        self._begun = Response(
            id=f"resp_{identity}",
            created_at=int(time.time()),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            temperature=body.temperature,
            text={"format": form.model_dump(by_alias=True) if form is not None else {"type": "text"}},
            top_p=body.top_p,
            top_logprobs=body.top_logprobs or 0,
            user=body.user,
        )

    def whole(self, answer: Answer) -> Response:
        """The answer at once."""
        self._tally.add(0, answer)
        part = OutputPart(text=answer.text, logprobs=self._logprobs(answer.scored))
        return self._ended(self._message(part, answer.finish_reason, answer.spans), answer.finish_reason)

    async def stream(self, generation: Generation) -> AsyncGenerator[str, None]:
        """The events of a streamed answer, the whole response last."""
        part = OutputPart()
        try:
            for state in ("created", "in_progress"):
                yield self._event(f"response.{state}", response=self._begun)
            empty = OutputMessage(id=self._item_id, status="in_progress", content=[])
            yield self._event("response.output_item.added", output_index=0, item=empty)
            yield self._part_event("response.content_part.added", part=part)
            async for _, delta in generation.deltas():
                self._tally.add(0, delta)
                logprobs = self._logprobs(delta.scored)
                part.text += delta.text
                part.logprobs += logprobs
                if delta.text or logprobs:
                    yield self._part_event("response.output_text.delta", delta=delta.text, logprobs=logprobs)
                if delta.finish_reason is not None:
                    message = self._message(part, delta.finish_reason, delta.spans)
                    yield self._part_event("response.output_text.done", text=part.text, logprobs=part.logprobs)
                    yield self._part_event("response.content_part.done", part=part)
                    yield self._event("response.output_item.done", output_index=0, item=message)
                    ended = self._ended(message, delta.finish_reason)
                    yield self._event(f"response.{ended.status}", response=ended)
        except APIError as error:
            current().broken = True
            failed = {"status": "failed", "error": ResponseError(message=error.message)}
            yield self._event("response.failed", response=self._begun.model_copy(update=failed))

    def _message(self, part: OutputPart, reason: FinishReason, spans: Sequence[Span]) -> OutputMessage:
        return OutputMessage(
            id=self._item_id,
            status="completed" if reason == "stop" else "incomplete",
            content=[part],
            grounding=place_boxes(spans, self._prompt, self._body.grounding),
        )

    def _ended(self, message: OutputMessage, reason: FinishReason) -> Response:
        usage = self._tally.usage()
        changes = {
            "status": message.status,
            "completed_at": int(time.time()),
            "incomplete_details": IncompleteDetails() if reason == "length" else None,
            "output": [message],
            "usage": ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
        }
        return self._begun.model_copy(update=changes)

    def _part_event(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        event = Event(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return frame(event.model_dump_json(), kind)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> list[TokenLogprob]:
        return [] if self._body.logprobs is None else token_logprobs(scored, self._tokenizer)
