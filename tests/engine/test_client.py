"""A live engine process: streams, aborts, death, silence, and what is left when it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from server.engine.client import TOO_SLOW, EngineClient
from server.engine.request import (
    EngineConfig,
    EngineDeadError,
    EngineError,
    EngineRequest,
    EngineStopped,
    RequestRejected,
    SamplingParams,
    TokenEvent,
)
from tests.engine.support import case_request, engine_config, greedy_tokens, tokens_of

VARIANT = "mha"


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine_config(VARIANT, **settings))
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def collect(client: EngineClient, request: EngineRequest) -> list[TokenEvent]:
    return [event async for event in client.generate(request)]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that must come; the test's own timeout is the limit."""
    while not await condition():
        await asyncio.sleep(0.01)


def endless(request_id: str) -> EngineRequest:
    """Long enough to be running still whenever a test looks."""
    return case_request(VARIANT, "text_short", request_id=request_id, max_tokens=4000)


async def first_event(client: EngineClient, request_id: str) -> tuple[asyncio.Task[list[TokenEvent]], asyncio.Event]:
    """A task that consumes an endless request, returned once the first token has come."""
    began = asyncio.Event()

    async def consume() -> list[TokenEvent]:
        events = []
        async for event in client.generate(endless(request_id)):
            events.append(event)
            began.set()
        return events

    task = asyncio.create_task(consume())
    await began.wait()
    return task, began


def test_streams_rejections_aborts_and_departures() -> None:
    async def scenario() -> None:
        async with running() as client:
            assert client.healthy
            assert client.info.vocab_size == 1280 and client.info.device == "cpu"
            names = ("text_short", "image_rgba", "multi_turn")
            answers = await asyncio.gather(*(collect(client, case_request(VARIANT, name)) for name in names))
            assert [tokens_of(events) for events in answers] == [greedy_tokens(VARIANT, name) for name in names]
            assert all(events[-1].finish_reason == "length" for events in answers)

            with pytest.raises(RequestRejected, match="more than the context of 4096"):
                await collect(client, case_request(VARIANT, "text_short", max_tokens=5000))
            with pytest.raises(RequestRejected, match="temperature must not be negative"):
                await collect(client, case_request(VARIANT, "text_short", temperature=-1.0))

            task, _ = await first_event(client, "aborted")
            with pytest.raises(RequestRejected, match="already in use"):
                await collect(client, endless("aborted"))
            await client.abort("aborted")
            assert (await task)[-1].finish_reason == "abort"

            task, _ = await first_event(client, "cancelled")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with aclosing(client.generate(endless("closed"))) as stream:
                async for _ in stream:
                    break

            async def idle() -> bool:
                stats = await client.stats()
                return stats.running == stats.waiting == 0 and stats.pages_free == stats.pages_total

            await eventually(idle)
            assert (await client.stats()).integrity_errors == 0
            assert client._streams == {}
            waiting = asyncio.create_task(collect(client, endless("open")))
            while "open" not in client._streams:
                await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            await waiting
        with pytest.raises(EngineStopped):
            await collect(client, endless("late"))
        await client.stop()

    asyncio.run(scenario())


def kill(client: EngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)


def test_a_killed_engine_is_reported_at_once_and_started_again() -> None:
    async def scenario() -> None:
        async with running() as client:
            tasks = [(await first_event(client, str(i)))[0] for i in range(3)]
            kill(client)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 3
            assert not client.healthy
            with pytest.raises(EngineDeadError):
                await collect(client, endless("late"))
            with pytest.raises(EngineDeadError):
                await client.stats()

            async def healthy() -> bool:
                return client.healthy

            await eventually(healthy)
            events = await collect(client, case_request(VARIANT, "text_short"))
            assert tokens_of(events) == greedy_tokens(VARIANT, "text_short")
            assert (client.num_restarts, client.failure, client._streams) == (1, None, {})
            kill(client)
            await client.stop()  # in the middle of a restart, perhaps

    asyncio.run(scenario())


def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    async def scenario() -> None:
        async with running(max_crashes=2) as client:
            kill(client)

            async def restarted() -> bool:
                return client.num_restarts == 1 and client.healthy

            await eventually(restarted)
            kill(client)

            async def failed() -> bool:
                return client.failure is not None

            await eventually(failed)
            assert "died 2 times in a row" in str(client.failure)
            assert not client.healthy

    asyncio.run(scenario())


def test_a_reader_that_does_not_read_loses_its_request_alone() -> None:
    async def scenario() -> None:
        async with running(max_unread_events=5) as client, aclosing(client.generate(endless("slow"))) as stream:
            await anext(stream)

            async def idle() -> bool:
                return (await client.stats()).running == 0

            await eventually(idle)
            events = [event async for event in stream]
            assert len(events) == 6
            assert events[-1].finish_reason == "abort" and events[-1].error == TOO_SLOW
            assert len(await collect(client, case_request(VARIANT, "text_short", max_tokens=3))) == 3
            assert (await client.stats()).aborted_requests == 1

    asyncio.run(scenario())


def test_a_silent_engine_is_unhealthy_until_it_speaks_and_is_killed_if_it_will_not_stop() -> None:
    async def scenario() -> None:
        async with running(ping_interval_s=0.05, heartbeat_timeout_s=1.0, stop_timeout_s=0.2) as client:
            assert client.pid is not None
            engine = psutil.Process(client.pid)

            async def unhealthy() -> bool:
                return not client.healthy

            async def healthy() -> bool:
                return client.healthy

            engine.suspend()
            await eventually(unhealthy)
            engine.resume()
            await eventually(healthy)
            engine.suspend()  # neither the shutdown message nor SIGTERM gets through
        assert not engine.is_running()

    asyncio.run(scenario())


def test_a_failed_load_is_reported_in_the_engines_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(EngineConfig(model_path=str(tmp_path)))
        with pytest.raises(EngineError, match=r"config\.json") as caught:
            await client.start()
        assert str(caught.value).startswith(str(tmp_path))
        assert not client.healthy

    asyncio.run(scenario())


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def scenario() -> int:
        async with running() as client:
            assert list(tmp_path.iterdir()) == []
            assert client.pid is not None
            os.kill(client.pid, signal.SIGINT)  # a Ctrl-C is the parent's affair
            assert (await client.stats()).running == 0
            return client.pid

    pid = asyncio.run(scenario())
    assert not psutil.pid_exists(pid)
    assert list(tmp_path.iterdir()) == []


PARENT = """
import asyncio, sys, time
from server.engine.client import EngineClient
from server.engine.request import EngineConfig

async def main():
    client = EngineClient(EngineConfig(model_path=sys.argv[1], kv_cache_tokens=1024))
    await client.start()
    print(client.pid, "torch" in sys.modules, flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def test_the_engine_does_not_outlive_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, engine_config(VARIANT).model_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, has_torch = parent.stdout.readline().split()
        engine = psutil.Process(int(pid))
        parent.kill()
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert has_torch == "False"


def test_an_engine_that_cannot_go_on_exits() -> None:
    """A broken invariant inside a step ends the process; the client tells everyone who waits."""

    async def scenario() -> None:
        async with running() as client:
            process = client._process
            assert process is not None and process._socket is not None
            task, _ = await first_event(client, "r")
            process._socket.send(b"not a message")
            with pytest.raises(EngineDeadError):
                await task
            assert process.exitcode == 70

    asyncio.run(scenario())


def test_generate_before_start_is_refused() -> None:
    async def scenario() -> None:
        client = EngineClient(engine_config(VARIANT))
        assert not client.healthy
        with pytest.raises(EngineDeadError):
            await collect(client, EngineRequest(request_id="r", token_ids=[1], sampling=SamplingParams(max_tokens=1)))
        with pytest.raises(RuntimeError, match="has not been started"):
            _ = client.info
        await client.stop()

    asyncio.run(scenario())
