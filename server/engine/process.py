"""One engine process and the socket to it, from its start to its end.

The process is spawned and sits at the other end of one ZeroMQ socket in a private folder. This module imports
no torch, and neither does the process that uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from server.engine.request import (
    EngineConfig,
    EngineError,
    EngineInfo,
    FromEngine,
    LoadFailed,
    Ready,
    Shutdown,
    ToEngine,
)
from server.logs import configure_logging

logger = logging.getLogger(__name__)

# A process that fails to load says why and exits; the exit may be noticed first.
LAST_WORDS_S = 1.0


class EngineProcess:
    """start() once, post() while it is alive, stop() at the end, also after it died."""

    def __init__(self, config: EngineConfig, receive: Callable[[FromEngine], None]) -> None:
        """`receive` gets every message after the one that says that the engine is ready."""
        self.config = config
        self.exited = asyncio.Event()
        self.ready_since: float | None = None  # of time.monotonic()
        self._receive = receive
        self._process: BaseProcess | None = None
        self._folder: Path | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._started: asyncio.Future[EngineInfo] | None = None
        self._load_failed = False
        self._stopped = False
        self._last_heard = 0.0
        self._listener: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether it is ready and has not ended."""
        return self.ready_since is not None and not self.exited.is_set()

    @property
    def silence_s(self) -> float:
        """How long ago it said something."""
        return time.monotonic() - self._last_heard

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exitcode(self) -> int | None:
        return None if self._process is None else self._process.exitcode

    async def start(self) -> EngineInfo:
        """Spawn the process and wait until the model is loaded.

        Raises EngineError with the process's own message if loading fails, or if it dies meanwhile.
        """
        loop = asyncio.get_running_loop()
        self._folder = Path(tempfile.mkdtemp(prefix="vl2-engine-"))  # mode 0700: nobody else can connect
        address = f"ipc://{self._folder}/socket"
        socket = self._socket = self._context.socket(zmq.PAIR)
        socket.bind(address)
        self._started = loop.create_future()
        process = multiprocessing.get_context("spawn").Process(
            target=_engine_process, args=(self.config, address, str(self._folder)), name="vl2-engine", daemon=True
        )
        self._process = process
        try:
            process.start()
            loop.add_reader(process.sentinel, self._on_exit, process)
            self._listener = asyncio.create_task(self._listen(socket))
            info = await self._started
            shutil.rmtree(self._folder)  # both ends are connected: the name is of no more use
        except BaseException:
            await self.stop()
            raise
        self.ready_since = time.monotonic()
        return info

    def post(self, message: ToEngine) -> None:
        """Send without waiting: ZeroMQ keeps the order, and sends at once unless its buffer is full."""
        assert self._socket is not None
        self._socket.send(self._encoder.encode(message), copy=False)  # megabytes, where there are pictures

    async def stop(self) -> None:
        """End the process, by force if it does not end by itself, and remove its socket. May be called twice."""
        process = self._process
        if process is None or self._stopped:
            return
        self._stopped = True
        try:
            if process.pid is not None:
                await self._end(process)
            if self._listener is not None:
                self._listener.cancel()
                await asyncio.gather(self._listener, return_exceptions=True)
        finally:  # also when cancelled: a context that is left would wait for its messages to be read
            self._context.destroy(linger=0)
            if self._folder is not None and self._folder.exists():
                shutil.rmtree(self._folder)

    async def _end(self, process: BaseProcess) -> None:
        if not self.exited.is_set():
            if self.ready_since is not None:
                self.post(Shutdown())
            elif not self._load_failed:  # then it ends by itself, and tidies up
                process.terminate()  # it loads, and reads no messages
            await self._wait_for_exit(process)
        process.join()

    async def _wait_for_exit(self, process: BaseProcess) -> None:
        for end_harder in (process.terminate, process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), self.config.stop_timeout_s)
                return
            logger.warning("the engine process did not end within %.0f s", self.config.stop_timeout_s)
            end_harder()
        await self.exited.wait()

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message: FromEngine = self._decoder.decode(await socket.recv())
            self._last_heard = time.monotonic()
            match message:
                case Ready(info):
                    self._settle_start(info)
                case LoadFailed(text):
                    self._load_failed = True
                    self._settle_start(EngineError(text))
                case _:
                    self._receive(message)

    def _on_exit(self, process: BaseProcess) -> None:
        """The process has ended, for whatever reason."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.sentinel)
        process.join(1.0)  # its end of a pipe has closed; the exit code follows within a moment
        self.exited.set()
        if not self._stopped:
            logger.error("the engine process ended by itself, exit code %s", process.exitcode)
        error = EngineError(f"the engine process died while it was starting, exit code {process.exitcode}")
        loop.call_later(LAST_WORDS_S, self._settle_start, error)

    def _settle_start(self, outcome: EngineInfo | Exception) -> None:
        assert self._started is not None
        if self._started.done():
            return
        if isinstance(outcome, Exception):
            self._started.set_exception(outcome)
        else:
            self._started.set_result(outcome)


def _engine_process(config: EngineConfig, address: str, folder: str) -> None:
    """What the spawned process runs."""
    configure_logging(config.log_level, config.log_format)
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()

    from server.engine.core import serve  # here, because it brings torch with it

    sys.exit(serve(config, address))


def _end_with_parent(folder: str) -> None:
    """Wait for the parent's death, in whatever manner, and end this process with it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
