"""POST /v1/chat/completions: text and pictures in, text out, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from model.tokenizer import Tokenizer
from server.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkWithUsage,
    ChatCompletion,
    ChoiceLogprobs,
    ChunkChoice,
    ChunkDelta,
    Usage,
)
from server.generation import Answer, Generation, Tally, collect, make_jobs, usage_of
from server.logprobs import token_logprobs
from server.prepare import PreparedPrompt, answer_room, place_boxes
from server.protocol import ChatRequest
from server.service import read_json, service_of
from server.streaming import EventStream, ScoredToken, frame, json_response, until_disconnect

router = APIRouter()

_PLACE = "\0"  # stands for the text in the form of a chunk


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def chat_completions(request: Request) -> Response:
    body = await read_json(request, ChatRequest)
    service = service_of(request)
    service.check_model(body.model)
    service.check_ready()
    prompt = await until_disconnect(
        request, service.preparer.chat(body.messages, body.grounding, cache_salt=body.cache_salt or "")
    )
    body = body.model_copy(update={"messages": []})  # megabytes of pictures that the answer has no use for
    max_tokens = answer_room(
        prompt,
        service.max_model_len,
        wanted=body.answer_limit,
        least=body.min_tokens,
        param="messages",
        wanted_param=body.answer_limit_name,
    )
    grammar = await until_disconnect(request, service.preparer.grammar(body.response_format, body.structured_outputs))
    identity = f"chatcmpl-{uuid.uuid4().hex}"
    jobs = make_jobs(
        body,
        prompt,
        service.tokenizer,
        request_id=identity,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        vocab_size=service.vocab_size,
        num_choices=body.n,
        grammar=grammar,
    )
    form = _Form(body, prompt, identity, service.tokenizer)
    if body.stream:
        generation = Generation(service.engine, jobs)
        await until_disconnect(request, generation.begin())
        return EventStream(form.stream(generation), generation.close)
    answers = await until_disconnect(request, collect(service.engine, jobs))
    completion = ChatCompletion(
        id=identity,
        created=form.created,
        model=body.model,
        choices=[form.choice(index, answer) for index, answer in enumerate(answers)],
        usage=usage_of([prompt], body.n, answers),
        prompt_token_ids=prompt.token_ids if body.return_token_ids else None,
    )
    return json_response(completion)


class _Form:
    """How the answers of one request are written down."""

    def __init__(self, body: ChatRequest, prompt: PreparedPrompt, identity: str, tokenizer: Tokenizer) -> None:
        self._body = body
        self._prompt = prompt
        self._identity = identity
        self._tokenizer = tokenizer
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._text_forms: dict[int, tuple[str, str]] = {}
        self.created = int(time.time())

    def choice(self, index: int, answer: Answer) -> ChatChoice:
        """One whole answer."""
        return ChatChoice(
            index=index,
            message=AnswerMessage(
                content=answer.text, grounding=place_boxes(answer.spans, self._prompt, self._body.grounding)
            ),
            logprobs=self.logprobs(answer.scored),
            finish_reason=answer.finish_reason,
            token_ids=answer.token_ids if self._body.return_token_ids else None,
        )

    async def stream(self, generation: Generation) -> AsyncGenerator[str, None]:
        """The events of a streamed answer: for each choice the role first and the finish_reason last; then usage."""
        body = self._body
        tally = Tally([self._prompt], body.n)
        for index in range(body.n):
            first = ChunkChoice(index=index, delta=ChunkDelta(role="assistant", content=""))
            shown = self._prompt.token_ids if body.return_token_ids and index == 0 else None
            yield self._chunk([first], prompt_token_ids=shown)
        async for index, delta in generation.deltas():
            tally.add(index, delta)
            token_ids = delta.token_ids if body.return_token_ids and delta.token_ids else None
            if delta.text and not (body.return_token_ids or body.logprobs):
                yield self._text_chunk(index, delta.text)
            elif delta.text or token_ids or (body.logprobs and delta.scored):
                grown = ChunkChoice(index=index, delta=ChunkDelta(content=delta.text), token_ids=token_ids)
                grown.logprobs = self.logprobs(delta.scored)
                yield self._chunk([grown])
            if delta.finish_reason is not None:
                end = ChunkDelta(grounding=place_boxes(delta.spans, self._prompt, body.grounding))
                yield self._chunk([ChunkChoice(index=index, delta=end, finish_reason=delta.finish_reason)])
        if self._with_usage:
            yield self._chunk([], usage=tally.usage())

    def _chunk(
        self, choices: list[ChunkChoice], *, usage: Usage | None = None, prompt_token_ids: list[int] | None = None
    ) -> str:
        form = ChatChunkWithUsage if self._with_usage else ChatChunk
        chunk = form(
            id=self._identity,
            created=self.created,
            model=self._body.model,
            choices=choices,
            prompt_token_ids=prompt_token_ids,
        )
        if isinstance(chunk, ChatChunkWithUsage):
            chunk.usage = usage
        return frame(chunk.model_dump_json())

    def _text_chunk(self, index: int, text: str) -> str:
        """The chunk of text alone. Those of a choice differ in nothing else, so that its form is made once."""
        if index not in self._text_forms:
            chunk = self._chunk([ChunkChoice(index=index, delta=ChunkDelta(content=_PLACE))])
            before, _, after = chunk.rpartition(_json(_PLACE))
            self._text_forms[index] = before, after
        before, after = self._text_forms[index]
        return before + _json(text) + after

    def logprobs(self, scored: Sequence[ScoredToken]) -> ChoiceLogprobs | None:
        """Log probabilities of the tokens that made the text, or None when they were not asked for."""
        if not self._body.logprobs:
            return None
        return ChoiceLogprobs(content=token_logprobs(scored, self._tokenizer))


def _json(text: str) -> str:
    """A string in JSON, as the models write it."""
    return to_json(text).decode()
