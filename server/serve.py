"""Run the application under uvicorn: `vl2 serve` in the foreground, or in a thread for the other commands and tests."""

from __future__ import annotations

import errno
import logging
import shlex
import signal
import socket
import threading
import time
import types
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from server.app import create_app
from server.auth import KeyRing
from server.errors import StartupError
from server.logs import configure_logging
from server.settings import ConfigurationError, Settings
from server.wire import protocol_for

logger = logging.getLogger(__name__)

# How long connections may take to close once their answers have ended.
HANG_UP_S = 5


def serve(settings: Settings) -> None:
    """Serve until a signal ends it, or an engine that cannot be kept alive.

    Raises ConfigurationError when the address can't be had, StartupError when the application does not start, and
    EngineError when the engine is given up.
    """
    configure_logging(settings.log_level, settings.log_format)
    listener = bind(settings.host, settings.port)
    app = create_app(settings)
    _prepare_keys(settings, app.state.keys)
    server = _Server(app, settings.shutdown_timeout, banner=banner(settings, listener))
    try:
        server.run(sockets=[listener])
    except SystemExit as error:  # uvicorn's way to say that the application did not start
        raise StartupError(app.state.failure or "the server did not start; see its log") from error
    if app.state.service.engine.failure is not None:
        raise app.state.service.engine.failure


def _prepare_keys(settings: Settings, keys: KeyRing) -> None:
    """Read the keys again when the signal for it comes, and say so if there are none and anyone can call."""
    if settings.api_key_file is not None:
        signal.signal(signal.SIGHUP, lambda *_: keys.reload())
    if keys.is_empty and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("no API key is set: everyone who reaches %s can use this server", settings.host)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before the model takes its time to load. Raises ConfigurationError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigurationError(f"--host: {host!r} is not an address of this machine: {error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"--port: {port} on {host} is in use by another program; choose another"
            raise ConfigurationError(message) from error
        raise ConfigurationError(f"--host, --port: cannot listen on {host} port {port}: {error}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds a bound socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(settings: Settings, listener: socket.socket) -> str:
    """What is printed once requests are answered: the URL, and a command to paste."""
    url = url_of(listener)
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    return f"{settings.model_name} is ready at {url}\n    curl -F image=@{_example()}{key} {url}/v1/caption"


def _example() -> str:
    """A picture that is there when the server runs from its checkout, as it can be typed here."""
    folder = Path(__file__).resolve().parent.parent / "tests" / "data"
    pictures = sorted(folder.glob("*.png"))
    if not pictures:
        return "picture.jpg"
    here = Path.cwd()
    picture = pictures[0].relative_to(here) if pictures[0].is_relative_to(here) else pictures[0]
    return shlex.quote(str(picture))


class _Server(uvicorn.Server):
    """uvicorn with a banner, plain start-up errors, a start that a signal can end, and an end in steps.

    Told to stop, it goes on to listen: /health and new requests get a 503, so that whoever balances the load sends them
    elsewhere, while running requests end. When they have, or after `shutdown_timeout` seconds, it closes; answers that
    are not finished by then end with an error, rather than cut off. A second signal ends it at once.
    """

    def __init__(self, app: FastAPI, shutdown_timeout: float, banner: str | None = None) -> None:
        config = uvicorn.Config(
            _PlainStartup(app),
            lifespan="on",
            log_config=None,
            access_log=False,
            http=protocol_for(app.state.settings),
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=HANG_UP_S,
        )
        super().__init__(config)
        self._app = app
        self._banner = banner
        self._shutdown_timeout = shutdown_timeout
        self._stopping_since: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._banner is not None:
            print(self._banner, flush=True)

    def begin_stop(self) -> None:
        """Take nothing new; end once what runs has ended."""
        self._stopping_since = time.monotonic()
        self._app.state.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._is_done() or self._app.state.service.engine.failure is not None

    def _is_done(self) -> bool:
        if self._stopping_since is None:
            return False
        return not self.server_state.tasks or time.monotonic() - self._stopping_since >= self._shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.tasks:  # their clients are told
            await self._app.state.service.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        if not self.started:  # the model still loads: nothing is open that could be ended in peace
            raise KeyboardInterrupt
        if self._stopping_since is None:
            self.begin_stop()
        else:
            super().handle_exit(sig, frame)


class _PlainStartup:
    """Log why the application did not start as one line, where the reason is known; Starlette sends a stack trace."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and self.app.state.failure is not None:
                message = {"type": "lifespan.startup.failed", "message": ""}
            await send(message)

        await self.app(scope, receive, send_plain if scope["type"] == "lifespan" else send)


class BackgroundServer:
    """The same server in a thread, on a free port of the loopback address. A context manager.

    Raises StartupError on entry when the application does not start. `ended` is set when the server has ended, perhaps
    by itself.
    """

    def __init__(self, settings: Settings) -> None:
        self.app = create_app(settings)
        self._listener = bind("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self._server = _Server(self.app, settings.shutdown_timeout)
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vl2-server", daemon=True)

    def __enter__(self) -> BackgroundServer:
        self._thread.start()
        while not self._server.started:
            if self.ended.wait(0.05):
                raise StartupError(self.app.state.failure or "the server did not start; see its log")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Begin to end, as a signal would; leaving the context waits for the end."""
        self._server.begin_stop()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self.ended.set()
