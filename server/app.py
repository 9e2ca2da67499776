"""The FastAPI application: routes, errors, middleware, and the service that lives as long as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from server.accesslog import log_request
from server.auth import KeyAuth, KeyRing
from server.errors import StartupError, install_handlers
from server.middleware import BodyLimit, HeadLimit, LastNet, Observe, SecurityHeaders
from server.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from server.ratelimit import ClientLimits
from server.request_metrics import RequestMetrics
from server.routes import caption, chat, completions, health, metrics, models, tokenize
from server.service import Service
from server.settings import Settings
from server.tracing import tracing_to

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
}


def create_app(settings: Settings) -> FastAPI:
    """The application for these settings. Its lifespan starts the engine and stops it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        try:
            app.state.service = await Service.start(settings)
        except StartupError as error:
            app.state.failure = str(error)
            raise
        except asyncio.CancelledError:
            app.state.failure = "interrupted while starting"
            raise
        try:
            yield
        finally:
            await app.state.service.stop()
            if app.state.tracing is not None:
                await asyncio.to_thread(app.state.tracing.close)

    app = FastAPI(title="VL2", description="DeepSeek-VL2 behind the OpenAI API", lifespan=lifespan)
    app.state.settings = settings
    app.state.failure = None  # why the start failed, in words for a person
    for module in (chat, completions, models, caption, tokenize, health, metrics):
        app.include_router(module.router)
    install_handlers(app)
    _guard(app, settings)
    _describe_bodies(app)
    return app


def _guard(app: FastAPI, settings: Settings) -> None:
    """The middleware. The last one added is the outermost: records, ids and headers see what the others refuse."""
    app.state.keys = KeyRing.of(settings)
    app.state.registry = CollectorRegistry()
    app.state.tracing = None if settings.otlp_endpoint is None else tracing_to(settings.otlp_endpoint)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, patience_s=settings.read_timeout)
    app.add_middleware(ClientLimits, rate=settings.rate_limit, at_once=settings.max_requests_per_client)
    app.add_middleware(KeyAuth, keys=app.state.keys)
    app.add_middleware(HeadLimit, max_bytes=settings.max_header_bytes)
    app.add_middleware(LastNet)
    if settings.allowed_origins:
        app.add_middleware(  # outside of the keys: a preflight has none
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    app.add_middleware(SecurityHeaders)
    observers = [log_request, RequestMetrics(app.state.registry).observe]
    if app.state.tracing is not None:
        observers.append(app.state.tracing.observe)
    app.add_middleware(Observe, observers=observers)


def _describe_bodies(app: FastAPI) -> None:
    """Put the request models, which the routes validate themselves, into the OpenAPI description."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            for path, model in _BODIES.items():
                described = model.model_json_schema(ref_template="#/components/schemas/{model}")
                components.update(described.pop("$defs", {}))
                components[model.__name__] = described
                reference = {"$ref": f"#/components/schemas/{model.__name__}"}
                content = {"application/json": {"schema": reference}}
                schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            form = {
                "type": "object",
                "required": ["image"],
                "properties": {
                    "image": {"type": "string", "format": "binary"},
                    "prompt": {"type": "string", "default": caption.DEFAULT_PROMPT},
                    "max_tokens": {"type": "integer", "minimum": 1},
                },
            }
            body = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
            schema["paths"]["/v1/caption"]["post"]["requestBody"] = body
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
