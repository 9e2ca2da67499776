"""The async side of the engine, in the HTTP process: start it, submit, stream, abort, watch its health, stop it.

The engine is a spawned process at the other end of one ZeroMQ socket in a private folder. This module imports
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
from collections.abc import AsyncGenerator
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from server.engine.request import (
    Abort,
    EngineConfig,
    EngineDeadError,
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Events,
    FromEngine,
    LoadFailed,
    Ping,
    Pong,
    QueueFull,
    Ready,
    Rejected,
    RequestRejected,
    Shutdown,
    Submit,
    ToEngine,
    TokenEvent,
)

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# A process that fails to load says why and exits; the exit may be noticed first.
LAST_WORDS_S = 1.0


class EngineClient:
    """One engine process. start() once, generate() any number of times at once, stop() at the end."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._info: EngineInfo | None = None
        self._process: BaseProcess | None = None
        self._stopping = False
        self._folder: Path | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._streams: dict[str, asyncio.Queue[TokenEvent | Exception]] = {}
        self._pings: dict[int, asyncio.Future[EngineStats]] = {}
        self._num_pings = 0
        self._started: asyncio.Future[EngineInfo] | None = None
        self._exited = asyncio.Event()
        self._last_heard = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> EngineInfo:
        """What the engine reported when it was ready. RuntimeError before start()."""
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def healthy(self) -> bool:
        """Whether the process lives and has said something within the heartbeat timeout."""
        silence = time.monotonic() - self._last_heard
        return self._info is not None and not self._exited.is_set() and silence < self.config.heartbeat_timeout_s

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineInfo:
        """Spawn the process and wait until the model is loaded.

        Raises EngineError with the process's own message if loading fails, or if it dies meanwhile.
        """
        if self._process is not None:
            raise RuntimeError("the engine has been started already")
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
            self._tasks = [asyncio.create_task(self._receive(socket))]
            self._info = await self._started
            shutil.rmtree(self._folder)  # both ends are connected: the name is of no more use
        except BaseException:
            await self.stop()
            raise
        self._tasks.append(asyncio.create_task(self._heartbeat()))
        return self._info

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        """The request's events, the last of them with a finish_reason.

        Leaving early (closing the iterator, cancelling the task) aborts the request in the engine. Raises
        RequestRejected for a request that can't be served (QueueFull: not now), EngineDeadError when the process is
        gone or goes.
        """
        if self._info is None or self._exited.is_set():
            raise EngineDeadError("the engine is not running")
        if request.request_id in self._streams:
            raise RequestRejected(f"request id {request.request_id} is already in use")
        queue: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        self._post(Submit(request))
        self._streams[request.request_id] = queue
        ended = False
        try:
            while not ended:
                item = await queue.get()
                ended = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            del self._streams[request.request_id]
            if not ended and not self._exited.is_set():
                self._post(Abort(request.request_id))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets an event with finish_reason "abort" unless it ended before."""
        if not self._exited.is_set():
            self._post(Abort(request_id))

    async def stats(self) -> EngineStats:
        """The engine's gauges and counters now. EngineDeadError when the process is gone or goes."""
        if self._info is None or self._exited.is_set():
            raise EngineDeadError("the engine is not running")
        self._num_pings += 1
        number = self._num_pings
        self._pings[number] = asyncio.get_running_loop().create_future()
        try:
            self._post(Ping(number))
            return await self._pings[number]
        finally:
            del self._pings[number]

    async def stop(self) -> None:
        """End the process, by force if it does not end by itself, and remove its socket. May be called twice."""
        process = self._process
        if process is None or self._stopping:
            return
        self._stopping = True
        if process.pid is not None:
            if not self._exited.is_set():
                self._post(Shutdown())
                await self._wait_for_exit(process)
            process.join()
        self._fail_waiting(EngineDeadError("the engine was stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        if self._folder is not None and self._folder.exists():
            shutil.rmtree(self._folder)

    async def _wait_for_exit(self, process: BaseProcess) -> None:
        for end_harder in (process.terminate, process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), self.config.stop_timeout_s)
                return
            logger.warning("the engine process did not end within %.0f s", self.config.stop_timeout_s)
            end_harder()
        await self._exited.wait()

    def _post(self, message: ToEngine) -> None:
        """Send without waiting: ZeroMQ keeps the order, and sends at once unless its buffer is full."""
        assert self._socket is not None
        self._socket.send(self._encoder.encode(message))

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message: FromEngine = self._decoder.decode(await socket.recv())
            self._last_heard = time.monotonic()
            match message:
                case Events(events):
                    for event in events:
                        self._deliver(event.request_id, event)
                case Rejected(request_id, text, queue_full):
                    self._deliver(request_id, (QueueFull if queue_full else RequestRejected)(text))
                case Pong(number, stats):
                    ping = self._pings.get(number)
                    if ping is not None and not ping.done():
                        ping.set_result(stats)
                case Ready(info):
                    self._settle_start(info)
                case LoadFailed(text):
                    self._settle_start(EngineError(text))

    def _deliver(self, request_id: str, item: TokenEvent | Exception) -> None:
        queue = self._streams.get(request_id)
        if queue is not None:  # otherwise its consumer has left, and an abort is on its way
            queue.put_nowait(item)

    async def _heartbeat(self) -> None:
        while not self._exited.is_set():
            await asyncio.sleep(self.config.ping_interval_s)
            self._post(Ping(0))

    def _on_exit(self, process: BaseProcess) -> None:
        """The process has ended, for whatever reason: everyone who waits for it is told."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.sentinel)
        process.join(1.0)  # its end of a pipe has closed; the exit code follows within a moment
        self._exited.set()
        if not self._stopping:
            logger.error("the engine process ended by itself, exit code %s", process.exitcode)
        self._fail_waiting(EngineDeadError("the engine process died"))
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

    def _fail_waiting(self, error: EngineDeadError) -> None:
        for queue in self._streams.values():
            queue.put_nowait(error)
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(error)


def _engine_process(config: EngineConfig, address: str, folder: str) -> None:
    """What the spawned process runs."""
    logging.basicConfig(level=config.log_level, format=LOG_FORMAT)
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
