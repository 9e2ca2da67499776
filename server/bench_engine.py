"""What `vl2 bench offline` measures of an engine in this process, on random tokens and tiles.

Times are what the host sees, so that planning, launches, sampling and the trip of the tokens are in them:

* a decode step: between two steps in which every sequence of the batch gets a token, the median;
* prompts: from submitting them all at once to the last one's first token, the median of the repeats;
* a picture: the same for a prompt of one picture and a few words;
* tower: from uint8 tiles on the host to image tokens on the device, the median of the repeats;
* waiting: the share of the time over some decode steps in which the GPU runs neither a kernel nor a copy.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from model.config import ModelConfig
from model.image import TILE_SIZE, image_layout, tile_grid
from server.engine.core import Engine
from server.engine.request import EngineRequest, ImageInput, SamplingParams, TokenEvent

PICTURE_TEXT_TOKENS = 16
WARM_STEPS, PROFILED_STEPS = 30, 24


class BenchError(RuntimeError):
    """Something that was to be measured and could not be."""


class EngineBench:
    """Measurements of one engine. Prompts are new each time, so that no cache knows them; a seed makes them again."""

    def __init__(self, engine: Engine, config: ModelConfig, *, seed: int, repeats: int) -> None:
        self.engine, self.config, self.repeats = engine, config, repeats
        self.on_gpu = engine.runner.device.type == "cuda"
        self._random = np.random.default_rng(seed)
        self._submitted = 0

    def decode_step(self, batch: int, prompt_len: int, output_len: int) -> list[float]:
        """Seconds of each step of which all sequences got a token, after prompts of `prompt_len`.

        Raises BenchError where there is none.
        """
        gaps: list[float] = []
        begun: set[str] = set()
        before: float | None = None  # when the last such step ended, if nothing else came since

        def look(events: Sequence[TokenEvent]) -> None:
            nonlocal before
            now = time.perf_counter()
            all_ran = len(begun) == batch == len(events)
            if all_ran and before is not None:
                gaps.append(now - before)
            before = now if all_ran else None
            begun.update(event.request_id for event in events)

        self._run([self._text(prompt_len, output_len) for _ in range(batch)], look)
        if not gaps:
            raise BenchError(
                f"answers of {output_len} tokens are too short: the first of {batch} ended before the last had begun"
            )
        return gaps

    def first_tokens(self, prompts: int, length: int) -> float:
        """Seconds to the last first token of so many prompts."""
        return self._median(lambda: self._run([self._text(length, 1) for _ in range(prompts)]))

    def picture_tokens(self, size: tuple[int, int]) -> int:
        """Prompt tokens of a picture of this (width, height), and a few words."""
        columns, rows = self._grid(size)
        return len(image_layout(columns, rows)) + PICTURE_TEXT_TOKENS

    def picture_tiles(self, size: tuple[int, int]) -> int:
        columns, rows = self._grid(size)
        return 1 + columns * rows

    def picture(self, size: tuple[int, int]) -> float:
        """Seconds to the first token of a prompt with one new picture, its tiles already cut."""
        return self._median(lambda: self._run([self._pictured(size)]))

    def tower(self, tiles: int) -> float:
        """Seconds from tiles to image tokens."""
        pixels = torch.from_numpy(self._random.integers(0, 256, (tiles, 3, TILE_SIZE, TILE_SIZE), np.uint8))
        runner = self.engine.runner

        def encode() -> float:
            began = time.perf_counter()
            if runner.vision_graphs is not None:
                runner.vision_graphs.run(pixels)
            else:
                runner.model.encode_tiles(pixels.to(runner.device))
            self._synchronize()
            return time.perf_counter() - began

        with torch.inference_mode():
            return self._median(encode)

    def waiting(self, batch: int, prompt_len: int) -> tuple[float, float]:
        """(share of the time in which the GPU waits, seconds a step) over decode steps, by torch's profiler.

        Raises BenchError on a CPU.
        """
        if not self.on_gpu:
            raise BenchError("waiting is measured on a GPU only")
        prompts = -(-batch * prompt_len // self.engine.scheduler.prefill_chunk_tokens)  # steps of their own
        for _ in range(batch):
            self.engine.add_request(self._text(prompt_len, prompts + WARM_STEPS + PROFILED_STEPS + 8))
        decodes = 0
        while decodes < WARM_STEPS and self.engine.has_work:
            decodes = decodes + 1 if len(self._step()) == batch else 0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED_STEPS):
                self._step()
            self._synchronize()
        self._run([])
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type.name == "CUDA"
        ]
        share, whole = idle_share(spans)
        return share, whole / 1e6 / PROFILED_STEPS

    def _run(
        self, requests: Iterable[EngineRequest], look: Callable[[Sequence[TokenEvent]], None] = lambda events: None
    ) -> float:
        """Seconds to the end of all requests; `look` gets each step's tokens. Raises BenchError when one fails."""
        requests = list(requests)
        self._synchronize()
        began = time.perf_counter()
        for request in requests:
            self.engine.add_request(request)
        try:
            while self.engine.has_work:
                look(self._step())
            return time.perf_counter() - began
        finally:
            for request_id in list(self.engine.scheduler.requests):
                self.engine.abort(request_id)

    def _step(self) -> list[TokenEvent]:
        events = self.engine.step()
        for event in events:
            if event.error is not None:
                raise BenchError(f"the engine failed a request: {event.error}")
        return [event for event in events if event.token_ids]

    def _median(self, run: Callable[[], float]) -> float:
        """Of the repeats, after one that does not count."""
        return statistics.median([run() for _ in range(1 + self.repeats)][1:])

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _text(self, length: int, output_len: int) -> EngineRequest:
        return self._request(self._ids(length), [], output_len)

    def _pictured(self, size: tuple[int, int]) -> EngineRequest:
        columns, rows = self._grid(size)
        shape = (1 + columns * rows, 3, TILE_SIZE, TILE_SIZE)
        tiles = self._random.integers(0, 256, shape, np.uint8).tobytes()
        image = ImageInput(start=0, columns=columns, rows=rows, tiles=tiles, digest=hashlib.sha256(tiles).digest())
        # The ids at image slots are never looked at: features take their place.
        return self._request(self._ids(self.picture_tokens(size)), [image], 1)

    def _request(self, token_ids: list[int], images: list[ImageInput], output_len: int) -> EngineRequest:
        self._submitted += 1
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        return EngineRequest(request_id=str(self._submitted), token_ids=token_ids, images=images, sampling=sampling)

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self.config.language.vocab_size, count).tolist()
        return ids

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        return tile_grid(size, self.config.candidate_resolutions, tiled=True)


def idle_share(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(share of the time from the first start to the last end that lies in no span, that time); spans may overlap.

    Raises BenchError where there are no spans.
    """
    if not spans:
        raise BenchError("the profiler saw nothing on the GPU")
    ordered = sorted(spans)
    first, end = ordered[0][0], ordered[0][0]
    busy = 0.0
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - first
    return (1 - busy / whole if whole else 0.0), whole
