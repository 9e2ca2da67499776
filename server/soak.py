"""`vl2 bench soak`: minutes of mixed traffic over HTTP, then a reckoning.

Workers send what people send, and what they should not: texts and pictures, new ones and the same again, next turns,
several choices, seeds, stop strings, requests that are too long or not well formed, and clients that leave at any
moment, streaming or not. What is sent depends on the seed alone; when it meets what else depends on the machine.

Every request must end in one of four ways: answered as asked, refused with the status it deserves, left by its client,
or turned away because the server is busy. At the end the server must be healthy and idle, with every page back, no
integrity violation, no request failed, the engine never restarted, and memory no larger than before (of a server that
was started for this; of one that ran already, memory is not looked at).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from server.logs import configure_logging
from server.settings import Settings, quiet
from server.terminal import connect

SAMPLE_S = 0.5
# Beside this, memory may grow by a tenth from the second quarter of the time to the last.
MEMORY_SLACK_MIB = 64
# A private server gets caches that are full, and so no longer growing, within the first moments.
PRIVATE_VISION_CACHE_BYTES = 16 << 20
REPEATED_PICTURES = 6

_WORDS = [
    "what",
    "is",
    "in",
    "the",
    "picture",
    "where",
    "which",
    "colour",
    "how",
    "many",
    "red",
    "blue",
    "circles",
    "and",
    "why",
    "tell",
    "me",
    "left",
    "of",
    "big",
    "small",
]
_SIZES = [(64, 64), (300, 200), (100, 700), (800, 600), (384, 384), (5, 900)]

Body = dict[str, Any]


class Wrong(Exception):
    """A request did not end as it should; the message says how it did."""


@dataclass
class Report:
    """How requests ended, by kind and outcome, what was wrong, and the server's memory over time in MiB."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    sent: int = 0

    def check_memory(self) -> None:
        """Compare the second quarter of the time with the last."""
        if len(self.memory) < 4:
            return
        _, before, _, after = self._quarters()
        if after > 1.1 * before + MEMORY_SLACK_MIB:
            self.problems.append(f"memory grew from {before:.0f} to {after:.0f} MiB")

    def _quarters(self) -> list[float]:
        """The median of each quarter of the time."""
        count = len(self.memory)
        return [statistics.median(self.memory[i * count // 4 : (i + 1) * count // 4] or [0.0]) for i in range(4)]

    def print(self) -> None:
        for outcome, count in sorted(self.outcomes.items()):
            print(f"{count:8d}  {outcome}")
        if self.memory:
            quarters = ", ".join(f"{megabytes:.0f}" for megabytes in self._quarters())
            print(f"memory: {quarters} MiB (medians of the quarters of the time), {max(self.memory):.0f} at most")
        for problem in self.problems[:20]:
            print(f"WRONG: {problem}")
        print(f"{self.sent} requests, {len(self.problems)} problems")


def soak(settings: Settings, *, base_url: str | None, minutes: float, seed: int, concurrency: int) -> bool:
    """Run it and print the report. Whether all was well. Raises StartupError when a private server can't be started."""
    settings = quiet(settings)
    configure_logging(settings.log_level, settings.log_format)
    if "vision_cache_bytes" not in settings.model_fields_set:
        settings = settings.model_copy(update={"vision_cache_bytes": PRIVATE_VISION_CACHE_BYTES})
    with connect(settings, base_url) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]
        run = _Soak(client, model, seed, watches_memory=base_url is None)
        report = asyncio.run(run.run(60 * minutes, concurrency))
    report.print()
    return not report.problems


class _Soak:
    def __init__(self, client: httpx.Client, model: dict[str, Any], seed: int, *, watches_memory: bool) -> None:
        self._plain = client
        self._model = model["id"]
        self._limit: int = model["max_model_len"]
        self._seed = seed
        self._watches_memory = watches_memory
        self._report = Report()
        self._answers: dict[str, str] = {}  # of seeded requests, by body: the same again must bring the same
        picture = random.Random(seed)
        self._pictures = [_picture(picture) for _ in range(REPEATED_PICTURES)]

    async def run(self, seconds: float, concurrency: int) -> Report:
        before = self._scrape()
        deadline = time.monotonic() + seconds
        async with httpx.AsyncClient(
            base_url=self._plain.base_url,
            headers=self._plain.headers,
            timeout=600,
            limits=httpx.Limits(max_connections=None),
        ) as client:
            memory = asyncio.create_task(self._watch_memory())
            await asyncio.gather(*[self._work(client, number, deadline) for number in range(concurrency)])
            memory.cancel()
        await self._check_the_end(before)
        return self._report

    async def _work(self, client: httpx.AsyncClient, number: int, deadline: float) -> None:
        """One worker's requests, one after the other."""
        chance = random.Random(f"{self._seed} {number}")
        kinds: Sequence[Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]] = [
            self._ask,
            self._ask_again,
            self._leave,
            self._overreach,
            self._stammer,
        ]
        while time.monotonic() < deadline:
            [kind] = chance.choices(kinds, weights=[6, 3, 3, 1, 1])
            self._report.sent += 1
            name = kind.__name__.strip("_")
            try:
                self._report.outcomes[f"{name}: {await kind(client, chance)}"] += 1
            except (Wrong, httpx.HTTPError) as error:
                self._report.outcomes[f"{name}: wrong"] += 1
                self._report.problems.append(f"{name}: {type(error).__name__}: {error}")

    async def _ask(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """A question, and perhaps one about the answer."""
        body = self._question(chance)
        texts = await _answer(client, body)
        if texts is None:
            return "busy"
        if chance.random() < 0.3:
            turns = [{"role": "assistant", "content": texts[0]}, {"role": "user", "content": _text(chance)}]
            body = {**body, "messages": [*body["messages"], *turns]}
            if await _answer(client, body) is None:
                return "busy"
        return "answered"

    async def _ask_again(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """A seeded question out of a few, whose answer must always be the same."""
        body = self._question(random.Random(chance.randrange(40)), fresh=False)
        body = {**body, "seed": 1, "stream": False}
        key = json.dumps(body)
        texts = await _answer(client, {**body, "stream": chance.random() < 0.5})
        if texts is None:
            return "busy"
        if self._answers.setdefault(key, "\0".join(texts)) != "\0".join(texts):
            raise Wrong("a seeded request was answered in two ways")
        return "answered"

    async def _leave(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """A long answer that nobody waits for."""
        body = {**self._question(chance), "max_tokens": self._limit // 8, "ignore_eos": True, "stop": []}
        try:
            async with asyncio.timeout(chance.expovariate(1 / 0.3)):
                if await _answer(client, body) is None:
                    return "busy"
        except TimeoutError:
            return "left"
        return "answered"

    async def _overreach(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """More than the context holds, or than the server takes."""
        body = chance.choice(
            [
                {**self._question(chance), "max_tokens": self._limit},
                self._chat("long " * self._limit, []),
                self._chat("many", [self._pictures[0]] * 40),
                {**self._question(chance), "n": 100_000},
            ]
        )
        return await _refused(client, content=json.dumps(body).encode(), status=400)

    async def _stammer(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        """What is not a request at all."""
        body = self._question(chance)
        broken = chance.choice(
            [
                json.dumps(body).encode()[:-20],
                json.dumps({**body, "no_such_field": 1}).encode(),
                json.dumps({**body, "temperature": -1}).encode(),
                json.dumps(self._chat("x", ["data:image/png;base64,AAAA"])).encode(),
                json.dumps({**body, "logit_bias": {"99999999": 1}}).encode(),
                b"\xff\x00",
            ]
        )
        return await _refused(client, content=broken, status=400)

    def _question(self, chance: random.Random, *, fresh: bool = True) -> Body:
        pictures = chance.choices(self._pictures, k=chance.choice([0, 0, 1, 1, 1, 2, 3]))
        if fresh and pictures and chance.random() < 0.3:
            pictures[0] = _picture(chance)
        body = self._chat(_text(chance), pictures)
        body |= {"max_tokens": chance.randint(1, 24), "temperature": chance.choice([0, 0.7, 1.5])}
        body |= {"n": chance.choice([1, 1, 1, 1, 3]), "stream": chance.random() < 0.5}
        if chance.random() < 0.3:
            body["stop"] = chance.sample(["a", "e", ".", "th", " "], k=2)
        if chance.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2}
        if chance.random() < 0.3:
            body |= {"repetition_penalty": 1.2, "top_p": 0.9, "min_p": 0.02}
        body["priority"] = chance.choice([0, 0, 1, -1])
        return body

    def _chat(self, text: str, pictures: Sequence[str]) -> Body:
        parts: list[Body] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        return {"model": self._model, "messages": [message]}

    async def _watch_memory(self) -> None:
        if not self._watches_memory:
            return
        own = psutil.Process()
        while True:
            processes = [own, *own.children(recursive=True)]
            self._report.memory.append(sum(process.memory_info().rss for process in processes) / 2**20)
            await asyncio.sleep(SAMPLE_S)

    async def _check_the_end(self, before: dict[str, float]) -> None:
        """Clients that left may take the engine a step to notice; then nothing may be left of anyone."""
        for _ in range(100):
            end = self._scrape()
            if end.get("vl2_requests running") == end.get("vl2_requests waiting") == 0:
                break
            await asyncio.sleep(0.1)
        for name in ("vl2_requests running", "vl2_requests waiting", "vl2_kv_pages used"):
            if end.get(name) != 0:
                self._report.problems.append(f"{name} is {end.get(name)} at the end")
        for name in ("vl2_integrity_violations_total", "vl2_requests_failed_total", "vl2_engine_restarts_total"):
            if end.get(name) != before.get(name):
                self._report.problems.append(f"{name} went from {before.get(name)} to {end.get(name)}")
        if _pages(end) != _pages(before):
            self._report.problems.append(f"{_pages(before)} pages before, {_pages(end)} after")
        if self._plain.get("/health").status_code != 200:
            self._report.problems.append("the server is not healthy at the end")
        if sum(self._report.outcomes.values()) != self._report.sent:
            self._report.problems.append(f"{sum(self._report.outcomes.values())} of {self._report.sent} requests ended")
        self._report.check_memory()

    def _scrape(self) -> dict[str, float]:
        """The server's metrics by name, with the state where there is one."""
        text = self._plain.get("/metrics").raise_for_status().text
        return {
            sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


async def _answer(client: httpx.AsyncClient, body: Body) -> list[str] | None:
    """The text of each choice; None when the server is too busy. Raises Wrong."""
    if not body["stream"]:
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code in (429, 503):
            return None
        if response.status_code != 200:
            raise Wrong(f"status {response.status_code}: {response.text[:300]}")
        choices = response.json()["choices"]
        return _checked(body, [choice["message"]["content"] for choice in choices])
    texts = [""] * body["n"]
    unfinished = set(range(body["n"]))
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code in (429, 503):
            return None
        if response.status_code != 200:
            raise Wrong(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        text = (
            await response.aread()
        ).decode()  # its lines end with \n alone, whatever else httpx or Python take for one
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    if lines[-1] != "[DONE]":
        raise Wrong(f"a stream ended with {lines[-1][:300]}")
    for choice in (choice for line in lines[:-1] for choice in json.loads(line)["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"] is not None:
            unfinished.remove(choice["index"])
    if unfinished:
        raise Wrong(f"choices {unfinished} have no end")
    return _checked(body, texts)


def _checked(body: Body, texts: list[str]) -> list[str]:
    if len(texts) != body["n"]:
        raise Wrong(f"{len(texts)} of {body['n']} choices")
    for stop in body.get("stop", []):
        if any(stop in text for text in texts):
            raise Wrong(f"the stop string {stop!r} is in an answer")
    return texts


async def _refused(client: httpx.AsyncClient, *, content: bytes, status: int) -> str:
    """Send what must be refused. Raises Wrong if it is not."""
    headers = {"Content-Type": "application/json"}
    response = await client.post("/v1/chat/completions", content=content, headers=headers)
    if response.status_code != status or "error" not in response.json():
        raise Wrong(f"status {response.status_code} for what deserves a {status}: {response.text[:300]}")
    return "refused"


def _text(chance: random.Random) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.choice([1, 5, 20, 120])))


def _picture(chance: random.Random) -> str:
    """A data URL of a few random blots of colour."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (6, 6), chance.randbytes(108)).resize(chance.choice(_SIZES)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _pages(metrics: dict[str, float]) -> float:
    return sum(metrics.get(f"vl2_kv_pages {state}", 0) for state in ("used", "cached", "free"))
