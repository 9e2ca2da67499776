"""The OpenAPI description: what FastAPI finds out by itself, the bodies that the routes validate, and examples."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from server.answers import ErrorBody
from server.auth import OPEN_PATHS
from server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.responses import ResponsesRequest
from server.routes.caption import DEFAULT_PROMPT

# What every route can answer besides what it is for.
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is not valid; `param` names the field at fault"},
    401: {"model": ErrorBody, "description": "No valid API key"},
    404: {"model": ErrorBody, "description": "No such model or route"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    415: {"model": ErrorBody, "description": "The body has the wrong content type"},
    429: {"model": ErrorBody, "description": "Too many requests; try again after `Retry-After` seconds"},
    500: {"model": ErrorBody, "description": "The server failed"},
    503: {"model": ErrorBody, "description": "The engine does not answer, or the server stops"},
}

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

# The smallest picture, so that an example can be sent as it is.
_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
_QUESTION = [
    {"type": "image_url", "image_url": {"url": _PIXEL}},
    {"type": "text", "text": "What colour is this?"},
]


def examples(model: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Bodies that can be sent as they are, by route and by what they show. `model` is the served name."""
    picture = [{"role": "user", "content": _QUESTION}]
    return {
        "/v1/chat/completions": {
            "text": {"model": model, "messages": [{"role": "user", "content": "Hello!"}]},
            "picture": {"model": model, "messages": picture, "max_completion_tokens": 64, "temperature": 0},
            "stream": {
                "model": model,
                "messages": picture,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            "boxes": {"model": model, "messages": picture, "grounding": {"locate": "the red circle"}},
            "log probabilities": {"model": model, "messages": picture, "logprobs": True, "top_logprobs": 3},
        },
        "/v1/completions": {
            "text": {"model": model, "prompt": "The picture shows", "max_tokens": 16},
            "several": {"model": model, "prompt": ["One,", "Two,"], "n": 2, "echo": True, "seed": 7},
        },
        "/v1/responses": {
            "text": {"model": model, "input": "Hello!"},
            "picture": {
                "model": model,
                "instructions": "Be brief.",
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": _PIXEL},
                            {"type": "input_text", "text": "What colour is this?"},
                        ],
                    }
                ],
                "max_output_tokens": 64,
            },
        },
        "/tokenize": {"chat": {"messages": picture}, "text": {"prompt": "Hello!"}},
        "/detokenize": {"text": {"tokens": [300, 301, 302]}},
    }


def describe(app: FastAPI, model: str) -> None:
    """Have the application describe itself. `model` is the served name, for the examples."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, model)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI, model: str) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    shown = examples(model)
    for path, body in _BODIES.items():
        described = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(described.pop("$defs", {}))
        schemas[body.__name__] = described
        content = {
            "schema": {"$ref": f"#/components/schemas/{body.__name__}"},
            "examples": {name: {"value": value} for name, value in shown[path].items()},
        }
        schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": {"application/json": content}}
    form = {
        "type": "object",
        "required": ["image"],
        "properties": {
            "image": {"type": "string", "format": "binary"},
            "prompt": {"type": "string", "default": DEFAULT_PROMPT},
            "max_tokens": {"type": "integer", "minimum": 1},
        },
    }
    caption = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    schema["paths"]["/v1/caption"]["post"]["requestBody"] = caption
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}, {}]  # a server may be open
    for path in OPEN_PATHS & schema["paths"].keys():
        schema["paths"][path]["get"]["security"] = []
    return schema
