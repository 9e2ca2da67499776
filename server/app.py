"""The FastAPI application: routes, errors, middleware, and the service that lives as long as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from server import VERSION
from server.accesslog import log_request
from server.auth import KeyAuth, KeyRing
from server.errors import StartupError, install_handlers
from server.middleware import BodyLimit, HeadLimit, LastNet, Observe, SecurityHeaders
from server.openapi import ERRORS, describe
from server.ratelimit import ClientLimits
from server.request_metrics import RequestMetrics
from server.routes import caption, chat, completions, health, metrics, models, responses, tokenize, version
from server.service import Service
from server.settings import Settings
from server.tracing import tracing_to


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

    app = FastAPI(title="VL2", description="DeepSeek-VL2 behind the OpenAI API", version=VERSION, lifespan=lifespan)
    app.state.settings = settings
    app.state.failure = None  # why the start failed, in words for a person
    for module in (chat, completions, responses, models, caption, tokenize, health, metrics, version):
        app.include_router(module.router, responses=ERRORS)
        _answer_head(app, module.router)
    install_handlers(app)
    _guard(app, settings)
    describe(app, settings.model_name)
    return app


def _answer_head(app: FastAPI, router: APIRouter) -> None:
    """Let every route that answers GET answer HEAD: some who ask after the server's health want no body."""
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


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
