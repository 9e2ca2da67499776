"""Errors as clients see them: OpenAI error objects with the right status, and never a stack trace."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
CLIENT_CLOSED_REQUEST = 499


class APIError(Exception):
    """A failure that the client is told about.

    `status` is the HTTP status, `param` the field at fault, `code` a word for programs; `headers` go with the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"
        self.param = None if param is None else param[:MAX_PARAM_CHARS]  # it may be a key that the client made up
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StartupError(RuntimeError):
    """The service cannot start; the message says why in words meant for a person."""


class ClientGone(Exception):
    """The client closed its connection before the answer was ready."""


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_INTERNAL = "The server had an internal error; its log has the details."


def error_response(error: APIError) -> JSONResponse:
    """The HTTP answer for an error."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


def internal_error() -> APIError:
    """What a client learns of a bug: nothing but that there was one."""
    return APIError(500, _INTERNAL, code="internal_error")


def validation_error(error: ValidationError) -> APIError:
    """A 400 that names the first field at fault.

    Messages are pydantic's, which name limits and choices; the client's own values are left out but for a wrong tag.
    """
    problem = error.errors(include_url=False, include_input=False)[0]
    kind, message, path = problem["type"], problem["msg"], problem["loc"]
    if path[-1:] == ("[key]",) and kind != "extra_forbidden":  # pydantic's mark for the key itself, not its value
        path = path[:-1]
    location = _parameter(path)
    if kind == "json_invalid":
        return APIError(400, message, code="invalid_json")
    if kind == "extra_forbidden":
        return APIError(400, f"Unknown field: {location}", param=location, code="unknown_parameter")
    if kind == "missing":
        return APIError(400, f"Missing required field: {location}", param=location, code="missing_parameter")
    if kind == "refused":
        return APIError(400, f"{location}: {message}", param=location, code="unsupported_parameter")
    if not location:  # fields that contradict each other: the error names the one to blame
        return APIError(400, message, param=problem.get("ctx", {}).get("param"), code="invalid_value")
    return APIError(400, f"{location}: {message}", param=location, code="invalid_value")


def _parameter(location: Sequence[int | str]) -> str:
    """("messages", 0, "user", "content") -> "messages[0].content": a union's tag is no part of it."""
    path = ""
    for place, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        in_union = place > 0 and (isinstance(location[place - 1], int) or location[place - 1] in _UNIONS)
        if in_union and part in _UNION_TAGS and place + 1 < len(location):
            continue
        path += f".{part}" if path else part
    return path


_UNIONS = {"response_format", "format"}  # beside the items of lists
_UNION_TAGS = {
    *("system", "developer", "user", "assistant"),
    *("text", "image_url", "input_text", "input_image"),
    *("json_object", "json_schema"),
}


def install_handlers(app: FastAPI) -> None:
    """Turn every exception that reaches the application into an OpenAI error object."""

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers) if error.headers else None
        if error.status_code == 404:
            return error_response(APIError(404, f"There is no route {request.url.path}", code="unknown_url"))
        if error.status_code == 405:
            message = f"{request.method} is not allowed on {request.url.path}"
            return error_response(APIError(405, message, code="method_not_allowed", headers=headers))
        return error_response(APIError(error.status_code, str(error.detail), headers=headers))

    async def client_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unexpected(_: Request, __: Exception) -> Response:
        # Starlette raises the exception again after this answer, and the server logs it with its stack.
        return error_response(internal_error())

    app.add_exception_handler(APIError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(Exception, unexpected)
