"""Who asks what and when.

* `load`: clients that each ask the next question as soon as the last is answered, at several numbers of clients.
* `idle`: one client; each picture is asked about twice, new and then known.
* `arrivals`: one answer runs when many new pictures come at once; the gap that they tear into it.

Pictures and questions are made before the clock starts, and what comes is read after it has stopped.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from server.load.answer import read_answer, text_times
from server.load.connection import Connection, Reply, Target
from server.load.figures import Figures, Spread, figures
from server.load.questions import Form, PictureFormat, draw_pictures

PROBE_TOKENS = 4
LOADS = (1, 16, 64)
IDLE_PICTURES = 8
ARRIVING = 16
ROUNDS = 3
STREAM_TOKENS = 2000
# How long the running answer is watched before the pictures come.
QUIET_S = 1.0

Body = list[bytes]


class BenchError(Exception):
    """Nothing can be measured; the message says why."""


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        clients: for each run, how many ask at once; for `arrivals`, how many pictures come at once.
        requests: of each run; for `idle` the number of pictures, for `arrivals` of rounds. None: some for each client.
        picture_size: (width, height) of the picture in each request, None for text alone.
        shared_pictures: how many pictures there are for all, None when each is new.
        questions: asked in a row about a picture.
        warmup: requests before each run that do not count.
    """

    form: Form
    clients: tuple[int, ...] = ()
    requests: int | None = None
    picture_size: tuple[int, int] | None = None
    picture_format: PictureFormat = "jpeg"
    shared_pictures: int | None = None
    questions: int = 1
    warmup: int = 2
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Arrivals:
    """One answer while pictures come, over some rounds.

    Args:
        quiet_gap_ms: gaps between its tokens before they come, of all rounds.
        longest_gap_ms: for each round, the longest gap from their arrival to the first token of the last of them.
        arrived: figures of the requests that came.
    """

    quiet_gap_ms: Spread | None
    longest_gap_ms: list[float]
    arrived: Figures


class Bench:
    """A plan for one server."""

    def __init__(self, target: Target, plan: Plan) -> None:
        self._target = target
        self._plan = plan
        self._form = plan.form
        self._number = 0  # of the next question; they go on from run to run, so that nothing is asked twice
        self._picture = 0  # likewise
        self.client_cpu = 0.0  # of a core, the most of any run: this process's share while it measures

    async def probe(self) -> bool:
        """Whether the server takes `ignore_eos`; without it the answers may be shorter than asked for.

        Raises BenchError when a plain request fails.
        """
        connection = Connection(self._target, self._plan.timeout_s)
        try:
            while True:
                [picture] = await self._draw(1)
                result = read_answer(await connection.ask(self._body(picture, PROBE_TOKENS)))
                if not isinstance(result, str):
                    return self._form.ignore_eos
                if not (self._form.ignore_eos and result.startswith(("status 400", "status 422"))):
                    raise BenchError(f"a first request failed: {result}")
                self._form = replace(self._form, ignore_eos=False)
        finally:
            connection.close()

    async def load(self, tell: Callable[[str, Figures], None]) -> None:
        """Closed loops of each number of clients; `tell` gets each run's name and figures."""
        for clients in self._plan.clients or LOADS:
            results = await self._closed_loop(clients)
            tell("load", results)

    async def idle(self, tell: Callable[[str, Figures], None]) -> None:
        """Each picture asked about twice in a row, nobody else there."""
        pictures = await self._draw(self._plan.requests or IDLE_PICTURES)
        turns = [[self._body(picture), self._body(picture)] for picture in pictures]
        replies = await self._run(1, turns)
        tell("new picture", _summary(replies[0::2], 1))
        tell("asked again", _summary(replies[1::2], 1))

    async def arrivals(self) -> Arrivals:
        """The gaps of one answer before and while pictures come."""
        [arriving] = self._plan.clients or (ARRIVING,)
        quiet: list[float] = []
        longest: list[float] = []
        came: list[Reply] = []
        for _ in range(self._plan.requests or ROUNDS):
            bodies = [self._body(picture) for picture in await self._draw(arriving)]
            stream, replies = await self._interrupt(bodies)
            came += replies
            began = min(reply.sent for reply in replies)
            times = text_times(stream)
            firsts = [times_[0] for reply in replies if (times_ := text_times(reply))]
            ended = max(firsts, default=began)
            if not times or times[-1] < ended:
                raise BenchError("the running answer ended before all pictures had their first token")
            quiet += [after - before for before, after in pairwise(times) if after < began]
            longest.append(1000 * max(b - a for a, b in pairwise(times) if b >= began and a <= ended))
        return Arrivals(Spread.of(quiet), longest, _summary(came, arriving, rounds=len(longest)))

    async def _interrupt(self, bodies: Sequence[Body]) -> tuple[Reply, list[Reply]]:
        """A running answer, and the replies to bodies that all come at once in the middle of it."""
        running, *others = [Connection(self._target, self._plan.timeout_s) for _ in range(1 + len(bodies))]
        heard = asyncio.Event()
        stream = asyncio.create_task(running.ask(self._body(None, STREAM_TOKENS), heard))
        hearing = asyncio.create_task(heard.wait())
        try:
            await asyncio.wait({stream, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if stream.done() and not stream.result().pieces:
                raise BenchError(f"the running answer failed: {read_answer(stream.result())}")
            await asyncio.sleep(QUIET_S)
            with self._measured():
                replies = await asyncio.gather(
                    *[connection.ask(body) for connection, body in zip(others, bodies, strict=True)]
                )
            await asyncio.sleep(QUIET_S / 10)  # a token after the last of them
        finally:
            hearing.cancel()
            for connection in (running, *others):
                connection.close()
        return await stream, list(replies)

    async def _closed_loop(self, clients: int) -> Figures:
        """One run. A picture's questions are asked in a row by one client."""
        plan = self._plan
        count = plan.requests or (max(4 * clients, 16) if plan.questions == 1 else clients * plan.questions)
        rows = -(-count // plan.questions)
        warming = [[self._body(picture, PROBE_TOKENS)] for picture in await self._draw(plan.warmup)]
        pictures = await self._draw(rows if plan.shared_pictures is None else min(rows, plan.shared_pictures))
        turns = [[self._body(pictures[row % len(pictures)]) for _ in range(plan.questions)] for row in range(rows)]
        if warming:
            await self._run(clients, warming)
        return _summary(await self._run(clients, turns), clients)

    async def _run(self, clients: int, turns: Sequence[Sequence[Body]]) -> list[Reply]:
        """The replies to all turns in their order; each client takes the next row when it has done one."""
        replies: list[list[Reply]] = [[] for _ in turns]
        queue = deque(zip(replies, turns, strict=True))

        async def client() -> None:
            connection = Connection(self._target, self._plan.timeout_s)
            while queue:
                row, bodies = queue.popleft()
                for body in bodies:
                    row.append(await connection.ask(body))
            connection.close()

        with self._measured():
            await asyncio.gather(*[client() for _ in range(min(clients, len(turns)))])
        return list(chain.from_iterable(replies))

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Within the block no garbage is collected, and this process's share of a core is noted."""
        gc.collect()
        gc.disable()
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            gc.enable()
        self.client_cpu = max(self.client_cpu, (time.process_time() - cpu) / (time.perf_counter() - wall))

    async def _draw(self, count: int) -> list[bytes | None]:
        """The next pictures, or as many times none."""
        size = self._plan.picture_size
        if size is None or count == 0:
            return [None] * count
        first, self._picture = self._picture, self._picture + count
        form = self._plan.picture_format
        return list(await asyncio.to_thread(draw_pictures, self._form.seed, first, count, size, form))

    def _body(self, picture: bytes | None, max_tokens: int | None = None) -> Body:
        """The next question."""
        self._number += 1
        return self._form.body(self._number, picture, max_tokens=max_tokens)


def _summary(replies: Sequence[Reply], clients: int, *, rounds: int = 1) -> Figures:
    """Figures of replies; of several rounds, the time between them included in none."""
    per_round = len(replies) // rounds
    parts = [replies[place * per_round : (place + 1) * per_round] for place in range(rounds)]
    duration = sum(max(reply.ended for reply in part) - min(reply.sent for reply in part) for part in parts)
    return figures([read_answer(reply) for reply in replies], clients=clients, duration_s=duration)
