"""POST /v1/chat/completions: text and pictures in, text out, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from model.tokenizer import Tokenizer
from server.generation import Answer, Generation, collect, make_jobs, usage
from server.prepare import PreparedPrompt, answer_room
from server.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkWithUsage,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    ChunkChoice,
    ChunkDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from server.service import read_json, service_of
from server.streaming import EventStream, ScoredToken, json_response, until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    body = await read_json(request, ChatRequest)
    service = service_of(request)
    service.check_model(body.model)
    service.check_alive()
    prompt = await until_disconnect(request, service.preparer.chat(body.messages))
    body = body.model_copy(update={"messages": []})  # megabytes of pictures that the answer has no use for
    max_tokens = answer_room(
        prompt, service.max_model_len, wanted=body.answer_limit, least=body.min_tokens, param="messages"
    )
    identity = f"chatcmpl-{uuid.uuid4().hex}"
    jobs = make_jobs(
        body,
        prompt,
        service.tokenizer,
        request_id=identity,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        vocab_size=service.vocab_size,
    )
    form = _Form(body, identity, service.tokenizer)
    if body.stream:
        generation = Generation(service.engine, jobs)
        await until_disconnect(request, generation.begin())
        return EventStream(form.stream(prompt, generation), generation.close)
    answers = await until_disconnect(request, collect(service.engine, jobs))
    completion = ChatCompletion(
        id=identity,
        created=form.created,
        model=body.model,
        choices=[form.choice(index, answer) for index, answer in enumerate(answers)],
        usage=usage([prompt], sum(len(answer.token_ids) for answer in answers), answers[0].cached_tokens),
        prompt_token_ids=prompt.token_ids if body.return_token_ids else None,
    )
    return json_response(completion)


class _Form:
    """How the answers of one request are written down."""

    def __init__(self, body: ChatRequest, identity: str, tokenizer: Tokenizer) -> None:
        self._body = body
        self._identity = identity
        self._tokenizer = tokenizer
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self.created = int(time.time())

    def choice(self, index: int, answer: Answer) -> ChatChoice:
        """One whole answer."""
        return ChatChoice(
            index=index,
            message=AnswerMessage(content=answer.text),
            logprobs=self.logprobs(answer.scored),
            finish_reason=answer.finish_reason,
            token_ids=answer.token_ids if self._body.return_token_ids else None,
        )

    async def stream(self, prompt: PreparedPrompt, generation: Generation) -> AsyncGenerator[str, None]:
        """The events of a streamed answer: for each choice the role first and the finish_reason last; then usage."""
        body = self._body
        completion_tokens = cached_tokens = 0
        for index in range(body.n):
            first = ChunkChoice(index=index, delta=ChunkDelta(role="assistant", content=""))
            shown = prompt.token_ids if body.return_token_ids and index == 0 else None
            yield self._chunk([first], prompt_token_ids=shown)
        async for index, delta in generation.deltas():
            completion_tokens += len(delta.token_ids)
            cached_tokens += delta.cached_tokens if index == 0 else 0
            token_ids = delta.token_ids if body.return_token_ids and delta.token_ids else None
            if delta.text or token_ids:
                grown = ChunkChoice(index=index, delta=ChunkDelta(content=delta.text), token_ids=token_ids)
                grown.logprobs = self.logprobs(delta.scored)
                yield self._chunk([grown])
            if delta.finish_reason is not None:
                yield self._chunk([ChunkChoice(index=index, delta=ChunkDelta(), finish_reason=delta.finish_reason)])
        if self._with_usage:
            yield self._chunk([], usage=usage([prompt], completion_tokens, cached_tokens))

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
        return chunk.model_dump_json()

    def logprobs(self, scored: Sequence[ScoredToken]) -> ChoiceLogprobs | None:
        """Log probabilities of the tokens that made the text, or None when they were not asked for."""
        if not self._body.logprobs:
            return None
        content = []
        for item in scored:
            best = [self._logprob(token, value) for token, value in item.logprobs.top]
            own = self._logprob(item.token_id, item.logprobs.logprob)
            content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=best))
        return ChoiceLogprobs(content=content)

    def _logprob(self, token: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TopLogprob(token=raw.decode(errors="replace"), logprob=logprob, bytes=list(raw))
