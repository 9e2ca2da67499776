"""What the routes share: settings, tokenizer, prompt preparation and the engine, started and stopped together."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from model.config import ConfigError, load_config
from model.tokenizer import Tokenizer, TokenizerError
from server.engine.client import EngineClient
from server.engine.request import EngineConfig, EngineError
from server.errors import APIError, ClientGone, StartupError, validation_error
from server.fetch import MediaFetcher
from server.generation import engine_dead
from server.prepare import Preparer
from server.protocol import RequestModel
from server.settings import ConfigurationError, Settings, resolve_device

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=RequestModel)


class Service:
    """The running application. Build it with `start`."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, preparer: Preparer, engine: EngineClient) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.preparer = preparer
        self.engine = engine
        self.created = int(time.time())
        self.draining = False  # told to stop: what runs may end, nothing new begins

    @classmethod
    async def start(cls, settings: Settings) -> Service:
        """Read the checkpoint's configuration and tokenizer, and start the engine. Raises StartupError."""
        try:
            folder = await asyncio.to_thread(_checkpoint_folder, settings.model_source)
            config = load_config(folder)
            tokenizer = Tokenizer.from_folder(folder)
            engine = EngineClient(engine_config(settings))
            await engine.start()
        except ConfigurationError as error:
            raise StartupError(str(error)) from error
        except (ConfigError, TokenizerError, EngineError, ValueError) as error:
            raise StartupError(f"cannot serve {settings.model_source}: {error}") from error
        info = engine.info
        logger.info(
            "model %s: %.1f M parameters, %s on %s, context %d, KV cache %d tokens",
            settings.model_name,
            info.num_parameters / 1e6,
            info.dtype,
            info.device,
            info.max_model_len,
            info.kv_cache_tokens,
        )
        preparer = Preparer(settings, config, tokenizer, MediaFetcher(settings.fetch_policy))
        return cls(settings, tokenizer, preparer, engine)

    async def stop(self) -> None:
        await self.preparer.close()
        await self.engine.stop()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer in tokens, as the engine was built."""
        return self.engine.info.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows: 0 up to this."""
        return self.engine.info.vocab_size

    def check_model(self, name: str | None) -> None:
        """Raises APIError (404) when a client asks for another model than the one served."""
        served = self.settings.model_name
        if name is not None and name != served:
            message = f"The model {name[:200]!r} does not exist; this server serves {served!r}."
            raise APIError(404, message, param="model", code="model_not_found")

    def check_alive(self) -> None:
        """Raises APIError (503) while the engine is dead or hung."""
        if not self.engine.healthy:
            raise engine_dead()

    def check_ready(self) -> None:
        """Raises APIError (503) when nothing new can be served: waiting for it would help nobody.

        That is while the engine is not alive, and once the server has been told to stop.
        """
        if self.draining:
            raise APIError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "10"})
        self.check_alive()


def _checkpoint_folder(source: str) -> Path:
    """Where the configuration and the tokenizer are; they are fetched if need be. Raises ValueError."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    # Brings torch with it, which this process needs for nothing else: a second and 200 MB.
    from model.checkpoint import resolve_model

    return resolve_model(source, weights=False)


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's share of the settings, with `auto` resolved for this machine."""
    device = resolve_device(settings.device)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return EngineConfig(
        model_path=settings.model_source,
        device=device,
        dtype=dtype,
        load_format=settings.load_format,
        attention_backend=settings.attention_backend,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_tokens=settings.kv_cache_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        vision_tile_budget=settings.vision_tile_budget,
        prefix_caching=not settings.no_prefix_caching,
        deterministic=settings.deterministic,
        vision_cache_bytes=settings.vision_cache_bytes,
        max_queued_requests=settings.max_queued_requests,
        seed=settings.seed,
        log_level=settings.log_level.upper(),
        log_format=settings.log_format,
    )


def service_of(request: Request) -> Service:
    """The service behind a request's application."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def read_json(request: Request, model: type[Body]) -> Body:
    """The validated body of a JSON request. Raises APIError (400, 415), or ClientGone when it never comes whole."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"The body must be JSON, sent with `Content-Type: application/json`, not {media_type[:80]!r}."
        raise APIError(415, message, code="unsupported_media_type")
    try:
        # `request.body()` would keep the bytes for as long as the answer takes.
        return model.model_validate_json(b"".join([chunk async for chunk in request.stream()]))
    except ClientDisconnect as error:
        raise ClientGone from error
    except ValidationError as error:
        # The exception's own text may quote the body, so it is not kept as the cause.
        raise validation_error(error) from None
