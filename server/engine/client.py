"""The async side of the engine, in the HTTP process: submit, stream, abort, watch its health, restart it, stop it.

An engine process that dies takes its requests with it: each of them is told at once. Then a new process is
started, and requests are served again when its model is loaded. A process that dies again and again without
having served anything would do so for ever: after `max_crashes` of them in a row the client gives up, and
`failure` says so.

A stream whose consumer is slow is kept for it, up to `max_unread_events` events; then the request is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from server.engine.process import EngineProcess
from server.engine.request import (
    Abort,
    EngineConfig,
    EngineDeadError,
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineStats,
    EngineStopped,
    Events,
    FromEngine,
    Ping,
    Pong,
    QueueFull,
    Rejected,
    RequestRejected,
    Submit,
    TokenEvent,
)

logger = logging.getLogger(__name__)

TOO_SLOW = "the answer was not read as fast as it was made"


class EngineClient:
    """An engine that is kept running. start() once, generate() any number of times at once, stop() at the end."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.num_restarts = 0
        self.failure: EngineError | None = None  # why the engine is not started again
        self._info: EngineInfo | None = None
        self._process: EngineProcess | None = None
        self._stopped = False
        self._has_served = False  # whether the process now running has generated anything
        self._streams: dict[str, asyncio.Queue[TokenEvent | Exception]] = {}
        self._pings: dict[int, asyncio.Future[EngineStats]] = {}
        self._num_pings = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> EngineInfo:
        """What the engine reported when it was ready. RuntimeError before start()."""
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def healthy(self) -> bool:
        """Whether the process is ready, lives and has said something within the heartbeat timeout."""
        process = self._process
        return process is not None and process.alive and process.silence_s < self.config.heartbeat_timeout_s

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineInfo:
        """Start the engine and wait until the model is loaded.

        Raises EngineError with the process's own message if loading fails, or if it dies meanwhile.
        """
        if self._process is not None:
            raise RuntimeError("the engine has been started already")
        info = await self._launch()
        self._tasks = [asyncio.create_task(self._heartbeat()), asyncio.create_task(self._supervise())]
        return info

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        """The request's events, the last of them with a finish_reason.

        Leaving early (closing the iterator, cancelling the task) aborts the request in the engine. Raises
        RequestRejected for a request that can't be served (QueueFull: not now), EngineDeadError when the process is
        gone or goes.
        """
        process = self._living()
        if request.request_id in self._streams:
            raise RequestRejected(f"request id {request.request_id} is already in use")
        queue: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        process.post(Submit(request))
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
            if self._streams.get(request.request_id) is queue:
                del self._streams[request.request_id]
                if not ended:
                    self._post_abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets an event with finish_reason "abort" unless it ended before."""
        self._post_abort(request_id)

    async def stats(self) -> EngineStats:
        """The engine's gauges and counters now. EngineDeadError when the process is gone or goes."""
        process = self._living()
        self._num_pings += 1
        number = self._num_pings
        self._pings[number] = asyncio.get_running_loop().create_future()
        try:
            process.post(Ping(number))
            return await self._pings[number]
        finally:
            del self._pings[number]

    async def stop(self) -> None:
        """Tell who waits for the process, and end it, by force if it does not by itself. May be called twice."""
        self._stopped = True
        self._fail_waiting(EngineStopped("the engine was stopped"))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()

    def _living(self) -> EngineProcess:
        """The process, if it can take messages. Raises EngineDeadError."""
        if self._stopped:
            raise EngineStopped("the engine was stopped")
        if self._process is None or not self._process.alive:
            raise EngineDeadError("the engine is not running")
        return self._process

    def _post_abort(self, request_id: str) -> None:
        if self._process is not None and self._process.alive:
            self._process.post(Abort(request_id))

    async def _launch(self) -> EngineInfo:
        self._has_served = False
        self._process = EngineProcess(self.config, self._receive)
        self._info = await self._process.start()
        return self._info

    async def _supervise(self) -> None:
        """Start the engine again whenever it dies, unless it does nothing else."""
        crashes = 0
        while True:
            process = self._process
            assert process is not None
            await process.exited.wait()
            self._fail_waiting(EngineDeadError("the engine process died"))
            crashes = 1 if self._was_stable(process) else crashes + 1
            await process.stop()
            if crashes >= self.config.max_crashes:
                self.failure = EngineError(f"the engine died {crashes} times in a row without serving anything")
                logger.critical("%s, the last time with exit code %s", self.failure, process.exitcode)
                return
            self.num_restarts += 1
            logger.warning("starting the engine again")
            try:
                await self._launch()
            except EngineError as error:  # its end counts as one more crash
                logger.error("the engine could not start again: %s", error)

    def _was_stable(self, process: EngineProcess) -> bool:
        if process.ready_since is None:
            return False
        return self._has_served or time.monotonic() - process.ready_since >= self.config.stable_after_s

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Events(events):
                for event in events:
                    self._has_served = self._has_served or bool(event.token_ids)
                    self._deliver(event.request_id, event)
            case Rejected(request_id, text, queue_full):
                self._deliver(request_id, (QueueFull if queue_full else RequestRejected)(text))
            case Pong(number, stats):
                ping = self._pings.get(number)
                if ping is not None and not ping.done():
                    ping.set_result(stats)

    def _deliver(self, request_id: str, item: TokenEvent | Exception) -> None:
        queue = self._streams.get(request_id)
        if queue is None:  # its consumer has left, and an abort is on its way
            return
        if queue.qsize() >= self.config.max_unread_events:
            del self._streams[request_id]
            logger.warning("request %s is aborted: %s", request_id, TOO_SLOW)
            self._post_abort(request_id)
            item = TokenEvent(request_id=request_id, finish_reason="abort", error=TOO_SLOW)
        queue.put_nowait(item)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.config.ping_interval_s)
            if self._process is not None and self._process.alive:
                self._process.post(Ping(0))

    def _fail_waiting(self, error: EngineDeadError) -> None:
        for queue in self._streams.values():
            queue.put_nowait(error)
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(error)
