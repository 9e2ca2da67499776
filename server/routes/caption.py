"""POST /v1/caption: a picture from a shell, `curl -F image=@cat.jpg http://localhost:8000/v1/caption`."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from server.answers import Caption
from server.engine.request import EngineRequest, SamplingParams
from server.errors import APIError, ClientGone
from server.generation import Job, collect
from server.prepare import answer_room, place_boxes
from server.service import service_of
from server.streaming import AnswerDecoder, until_disconnect

router = APIRouter()

DEFAULT_PROMPT = "Describe this image."
FIELDS = ("image", "prompt", "max_tokens")
_EXAMPLE = "Send it as in: curl -F image=@picture.jpg URL"


@router.post("/v1/caption")
async def caption(request: Request) -> Caption:
    """Fields: `image` (a file), and if wanted `prompt` and `max_tokens`. The answer is greedy."""
    service = service_of(request)
    service.check_ready()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        message = f"The body must be a multipart/form-data form with the file field 'image'. {_EXAMPLE}"
        raise APIError(415, message, code="unsupported_media_type")
    form = await _parse(request)
    try:
        picture, prompt_text, wanted = await _read(form)
    finally:
        await form.close()
    prompt = await until_disconnect(request, service.preparer.question(picture, prompt_text))
    max_tokens = answer_room(prompt, service.max_model_len, wanted=wanted, least=0, param="prompt")
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    identity = f"caption-{uuid.uuid4().hex}"
    engine_request = EngineRequest(
        request_id=identity, token_ids=prompt.token_ids, images=prompt.images, sampling=sampling
    )
    decoder = AnswerDecoder(service.tokenizer, grounding=True)
    [answer] = await until_disconnect(request, collect(service.engine, [Job(engine_request, decoder)]))
    return Caption(caption=answer.text, grounding=place_boxes(answer.spans, prompt, None))


class _FormParser(MultiPartParser):
    """Notes whether the form has come to its end, which is a boundary of its own."""

    complete = False

    def on_end(self) -> None:
        self.complete = True


async def _parse(request: Request) -> FormData:
    """The form, to be closed. Raises APIError (400) when it cannot be read, ClientGone when it never comes whole."""
    parser = _FormParser(request.headers, request.stream(), max_files=1, max_fields=len(FIELDS))
    try:
        form = await parser.parse()
    except ClientDisconnect as error:
        raise ClientGone from error
    except MultiPartException as error:
        raise APIError(400, f"The multipart form cannot be read: {error.message}", code="invalid_form") from error
    if not parser.complete:
        await form.close()
        message = "The multipart form is incomplete: its body ends before its closing boundary."
        raise APIError(400, message, code="invalid_form")
    return form


async def _read(form: FormData) -> tuple[bytes, str, int | None]:
    """The picture, the prompt and the limit on tokens. Raises APIError (400) that names the field at fault."""
    for name in form:
        if name not in FIELDS:
            message = f"Unknown form field {name[:80]!r}; known are {', '.join(FIELDS)}."
            raise APIError(400, message, param=name[:80], code="unknown_parameter")
    image = form.get("image")
    if image is None:
        message = f"The form has no field 'image'. {_EXAMPLE}"
        raise APIError(400, message, param="image", code="missing_parameter")
    if not isinstance(image, UploadFile):
        message = f"The form field 'image' must be a file, not text. {_EXAMPLE}"
        raise APIError(400, message, param="image", code="invalid_value")
    prompt, limit = form.get("prompt", DEFAULT_PROMPT), form.get("max_tokens")
    if not isinstance(prompt, str):
        raise APIError(400, "The form field 'prompt' must be text.", param="prompt", code="invalid_value")
    wanted = None
    if limit is not None:
        if not (isinstance(limit, str) and limit.isascii() and limit.isdigit() and 0 < len(limit) < 10 and int(limit)):
            message = "The form field 'max_tokens' must be a whole number of at least 1."
            raise APIError(400, message, param="max_tokens", code="invalid_value")
        wanted = int(limit)
    return await image.read(), prompt, wanted
