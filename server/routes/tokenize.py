"""POST /tokenize: the token ids that the engine would run for a chat body, pictures included, or for a text prompt.
POST /detokenize: the text of token ids.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.answers import Text, Tokens
from server.protocol import DetokenizeRequest, TokenizeRequest
from server.service import read_json, service_of
from server.streaming import until_disconnect

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Tokens:
    body = await read_json(request, TokenizeRequest)
    service = service_of(request)
    service.check_model(body.model)
    if body.messages is not None:
        work = service.preparer.chat(body.messages, body.grounding)
    else:
        assert body.prompt is not None  # the protocol wants exactly one of the two
        work = service.preparer.completion(body.prompt)
    prompt = await until_disconnect(request, work)
    return Tokens(tokens=prompt.token_ids, count=len(prompt.token_ids), max_model_len=service.max_model_len)


@router.post("/detokenize")
async def detokenize(request: Request) -> Text:
    body = await read_json(request, DetokenizeRequest)
    service = service_of(request)
    service.check_model(body.model)
    return Text(prompt=await until_disconnect(request, service.preparer.text(body.tokens, body.skip_special_tokens)))
