"""The FastAPI application: routes, errors, middleware, and the service that lives as long as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from server import VERSION
from server.auth import KeyAuth
from server.errors import StartupError, install_handlers
from server.middleware import BodyLimit, RequestId
from server.openapi import ERRORS, describe
from server.routes import caption, chat, completions, health, metrics, models, responses, tokenize, version
from server.service import Service
from server.settings import Settings


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

    app = FastAPI(title="VL2", description="DeepSeek-VL2 behind the OpenAI API", version=VERSION, lifespan=lifespan)
    app.state.failure = None  # why the start failed, in words for a person
    for module in (chat, completions, responses, models, caption, tokenize, health, metrics, version):
        app.include_router(module.router, responses=ERRORS)
        _answer_head(app, module.router)
    install_handlers(app)
    # The last one added is the outermost: ids and the log see what auth and the limit refuse.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(KeyAuth, keys=[key.get_secret_value() for key in settings.api_key])
    app.add_middleware(RequestId)
    describe(app, settings.model_name)
    return app


def _answer_head(app: FastAPI, router: APIRouter) -> None:
    """Let every route that answers GET answer HEAD: some who ask after the server's health want no body."""
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
