"""POST /v1/completions: text or token ids in, their continuation out, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from model.tokenizer import Tokenizer
from server.answers import Completion, CompletionChoice, CompletionChunk, CompletionLogprobs, Usage
from server.engine.request import Grammar
from server.generation import Answer, Generation, Job, Tally, collect, make_jobs, usage_of
from server.prepare import PreparedPrompt, answer_room
from server.protocol import CompletionRequest
from server.service import Service, read_json, service_of
from server.streaming import EventStream, ScoredToken, frame, json_response, until_disconnect

router = APIRouter()


@router.post("/v1/completions", response_model=Completion)
async def completions(request: Request) -> Response:
    body = await read_json(request, CompletionRequest)
    service = service_of(request)
    service.check_model(body.model)
    service.check_ready()
    prompts = [await until_disconnect(request, service.preparer.completion(prompt)) for prompt in body.prompt]
    grammar = await until_disconnect(request, service.preparer.grammar(None, body.structured_outputs))
    form = _Form(body, prompts, service.tokenizer)
    jobs = [
        job
        for index, prompt in enumerate(prompts)
        for job in _jobs(service, body, prompt, grammar, f"{form.identity}-{index}")
    ]
    if body.stream:
        generation = Generation(service.engine, jobs)
        await until_disconnect(request, generation.begin())
        return EventStream(form.stream(generation), generation.close)
    return json_response(form.whole(await until_disconnect(request, collect(service.engine, jobs))))


def _jobs(
    service: Service, body: CompletionRequest, prompt: PreparedPrompt, grammar: Grammar | None, identity: str
) -> list[Job]:
    wanted = body.max_tokens if "max_tokens" in body.model_fields_set else None
    max_tokens = answer_room(prompt, service.max_model_len, wanted=wanted, least=body.min_tokens, param="prompt")
    return make_jobs(
        body,
        prompt,
        service.tokenizer,
        request_id=identity,
        max_tokens=min(max_tokens, body.max_tokens),  # nobody wanted the default: it takes what is left
        logprobs=body.logprobs,
        vocab_size=service.vocab_size,
        num_choices=body.n,
        grammar=grammar,
    )


class _Form:
    """How the answers of one request are written down. Choice i belongs to prompt i // n."""

    def __init__(self, body: CompletionRequest, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer) -> None:
        self.identity = f"cmpl-{uuid.uuid4().hex}"
        self._body = body
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage

    def whole(self, answers: Sequence[Answer]) -> Completion:
        """All choices at once."""
        choices = []
        for index, answer in enumerate(answers):
            choice = CompletionChoice(
                index=index,
                text=self._echo(index) + answer.text,
                logprobs=self._logprobs(answer.scored),
                finish_reason=answer.finish_reason,
            )
            if self._body.return_token_ids:
                choice.prompt_token_ids = self._prompts[index // self._body.n].token_ids
                choice.token_ids = answer.token_ids
            choices.append(choice)
        return Completion(
            id=self.identity,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=usage_of(self._prompts, self._body.n, answers),
        )

    async def stream(self, generation: Generation) -> AsyncGenerator[str, None]:
        """The events of a streamed answer; the last of each choice has its finish_reason, then comes the usage."""
        tally = Tally(self._prompts, self._body.n)
        begun: set[int] = set()
        async for index, delta in generation.deltas():
            tally.add(index, delta)
            choice = CompletionChoice(index=index, text=delta.text, finish_reason=delta.finish_reason)
            choice.logprobs = self._logprobs(delta.scored)
            if index not in begun:
                choice.text = self._echo(index) + choice.text
            if self._body.return_token_ids:
                choice.token_ids = delta.token_ids
                if index not in begun:
                    choice.prompt_token_ids = self._prompts[index // self._body.n].token_ids
            if choice.text or choice.token_ids or choice.finish_reason is not None:
                begun.add(index)
                yield self._chunk([choice])
        if self._with_usage:
            yield self._chunk([], tally.usage())

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> str:
        form = Completion if self._with_usage else CompletionChunk
        chunk = form(id=self.identity, created=self._created, model=self._body.model, choices=choices)
        if isinstance(chunk, Completion):
            chunk.usage = usage
        return frame(chunk.model_dump_json())

    def _echo(self, index: int) -> str:
        """The prompt's text, when it is wanted before the answer's."""
        if not self._body.echo:
            return ""
        prompt = self._body.prompt[index // self._body.n]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=self._body.skip_special_tokens)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs | None:
        """Log probabilities of the tokens that made the text, or None when they were not asked for."""
        if self._body.logprobs is None:
            return None
        return CompletionLogprobs(
            tokens=[self._name(item.token_id) for item in scored],
            token_logprobs=[item.logprobs.logprob for item in scored],
            top_logprobs=[{self._name(token): value for token, value in item.logprobs.top} for item in scored],
            text_offset=[item.offset for item in scored],
        )

    def _name(self, token: int) -> str:
        """A token's text; one that is no whole characters is spelt as bytes, so that no two have one name."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
