"""Batches of training rows, rendered by worker processes into shared memory.

The training process tells workers what to render next through a queue of small messages, one for each chunk of a
batch, and learns through another which chunks are done. Pixels and labels go through one anonymous shared mapping,
made before the workers are forked, that is divided into slots. A loader thread copies finished chunks into pinned
memory and on to the device, a batch ahead of the training step.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.demo.fonts import find_fonts
from model.demo.labels import PATCHES
from model.demo.rows import KINDS, Kind, Row, Wording, random_row
from model.image import TILE_FEATURES, TILE_SIZE
from model.tokenizer import Tokenizer

Arrays = dict[str, npt.NDArray[np.generic]]
Batch = dict[str, Tensor]
NO_SEGMENT = 255


@dataclass(frozen=True)
class Field:
    """An array of a batch: its shape a row and its type."""

    shape: tuple[int, ...]
    dtype: type[np.generic]


def fields(kind: Kind) -> dict[str, Field]:
    """The arrays of one row of a kind. Every batch of the kind has the same shapes; what is unused is padding.

    ``gather`` counts into the row's own features: ``tiles * 196`` is the newline, one more the separator, -1 text.
    ``segment`` is 255 for padding.
    """
    patches = (kind.tiles, PATCHES * PATCHES)
    return {
        "tiles": Field((kind.tiles, TILE_SIZE, TILE_SIZE, 3), np.uint8),
        "boxes": Field((*patches, 4), np.int16),
        "answer_boxes": Field((*patches, 4), np.int16),
        "prefix_ids": Field((kind.prefix,), np.int16),
        "gather": Field((kind.prefix,), np.int16),
        "ids": Field((kind.segments,), np.int16),
        "targets": Field((kind.segments,), np.int16),
        "weights": Field((kind.segments,), np.uint8),
        "visible": Field((kind.segments,), np.int16),
        "positions": Field((kind.segments,), np.int16),
        "segment": Field((kind.segments,), np.uint8),
        "classes": Field(patches, np.uint8),
        "colours": Field(patches, np.uint8),
        "characters": Field(patches, np.uint8),
        "tile_used": Field((kind.tiles,), np.uint8),
    }


def row_bytes(kind: Kind) -> int:
    """Bytes of one row of a kind."""
    return sum(int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize for field in fields(kind).values())


def layout(buffer: memoryview | mmap.mmap, offset: int, kind: Kind, rows: int) -> Arrays:
    """Arrays [rows, ...] of a kind over a piece of memory, from ``offset`` on."""
    arrays: Arrays = {}
    for name, field in fields(kind).items():
        count = rows * int(np.prod(field.shape))
        flat = np.frombuffer(buffer, dtype=field.dtype, count=count, offset=offset)
        arrays[name] = flat.reshape(rows, *field.shape)
        offset += flat.nbytes
    return arrays


def empty_arrays(kind: Kind, rows: int) -> Arrays:
    """Fresh arrays for so many rows."""
    return layout(memoryview(bytearray(row_bytes(kind) * rows)), 0, kind, rows)


def pack(row: Row, arrays: Arrays, index: int, kind: Kind, pad_id: int) -> None:
    """Writes a row into arrays of its kind, padded to the kind's sizes."""
    newline = kind.tiles * TILE_FEATURES
    used = len(row.tiles)
    for tile, pixels in enumerate(row.tiles):
        arrays["tiles"][index, tile] = pixels
        arrays["boxes"][index, tile] = row.patches[tile].boxes
        arrays["answer_boxes"][index, tile] = row.patches[tile].answers
        arrays["classes"][index, tile] = row.patches[tile].classes
        arrays["colours"][index, tile] = row.patches[tile].colours
        arrays["characters"][index, tile] = row.patches[tile].characters
    arrays["tiles"][index, used:] = 127
    for name, filler in (("boxes", 0), ("answer_boxes", -1), ("classes", 0), ("colours", 255), ("characters", 0)):
        arrays[name][index, used:] = filler
    arrays["tile_used"][index] = np.arange(kind.tiles) < used
    length, filled = len(row.prefix_ids), len(row.ids)
    gather = np.array(row.gather)
    gather[gather == -2] = newline
    gather[gather == -3] = newline + 1
    ids = np.array(row.prefix_ids)
    _write(arrays["prefix_ids"][index], np.where(ids < 0, pad_id, ids), pad_id, length)
    _write(arrays["gather"][index], gather, -1, length)
    for name, values, filler in (
        ("ids", row.ids, pad_id),
        ("targets", row.targets, -1),
        ("weights", row.weights, 0),
        ("visible", row.visible, 1),
        ("positions", row.positions, 0),
        ("segment", row.segment, NO_SEGMENT),
    ):
        _write(arrays[name][index], values, filler, filled)


def _write(target: npt.NDArray[np.generic], values: npt.ArrayLike, filler: int, length: int) -> None:
    target[:length] = values
    target[length:] = filler


@dataclass(frozen=True)
class Plan:
    """How batches are put together: tiles a step on one device, and rows a chunk for each kind."""

    tiles: int = 240
    chunk_tiles: int = 24

    def __post_init__(self) -> None:
        most = max(kind.tiles for kind in KINDS.values())
        if self.tiles < most:
            raise ValueError(f"a step needs at least {most} tiles, one row of the largest kind, not {self.tiles}")

    def rows(self, kind: Kind) -> int:
        """Rows of a batch. Every kind's has the same number of tiles, if the budget is a multiple of 30."""
        return self.tiles // kind.tiles

    def chunk_rows(self, kind: Kind) -> int:
        """Rows that a worker draws at a time: a divisor of the batch's."""
        rows = self.rows(kind)
        return max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * kind.tiles <= self.chunk_tiles))

    def chunks(self, kind: Kind) -> int:
        return self.rows(kind) // self.chunk_rows(kind)


@dataclass(frozen=True)
class Job:
    """A chunk to render: for which step, which of its chunks, what kind, into which slot, from which seed."""

    step: int
    chunk: int
    kind: str
    slot: int
    seed: str
    simple: bool


class RenderError(RuntimeError):
    """A worker failed or died."""


class Renderer:
    """Worker processes and the shared memory they draw into. Make it before anything touches a GPU: it forks."""

    def __init__(self, tokenizer_folder: Path, fonts: Path | None, plan: Plan, workers: int, ahead: int) -> None:
        """``ahead`` batches fit into the slots at a time."""
        self.plan = plan
        slot_bytes = max(row_bytes(kind) * plan.chunk_rows(kind) for kind in KINDS.values())
        self._slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slots = ahead * max(plan.chunks(kind) for kind in KINDS.values())
        self.memory = mmap.mmap(-1, self._slot_bytes * self.slots)
        context: ForkContext = multiprocessing.get_context("fork")
        self._jobs = context.SimpleQueue()
        self._done = context.SimpleQueue()
        self._job_lock = threading.Lock()
        find_fonts(fonts)  # a missing font is an error here, not in every worker
        arguments = (tokenizer_folder, fonts, plan, self.memory, self._slot_bytes, self._jobs, self._done)
        self._workers: list[ForkProcess] = [
            context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, job: Job) -> None:
        with self._job_lock:
            self._jobs.put(job)

    def next_done(self) -> Job:
        """The next finished job. Raises RenderError if a worker failed."""
        while not self._done._reader.poll(5.0):  # type: ignore[attr-defined]
            self._check()
        result: Job | str = self._done.get()
        if isinstance(result, str):
            raise RenderError(result)
        return result

    def arrays(self, job: Job) -> Arrays:
        """The finished job's arrays, in shared memory."""
        kind = KINDS[job.kind]
        return layout(self.memory, job.slot * self._slot_bytes, kind, self.plan.chunk_rows(kind))

    def _check(self) -> None:
        dead = [worker.pid for worker in self._workers if not worker.is_alive()]
        if dead:
            raise RenderError(f"render worker {dead[0]} died")

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()


def _work(
    tokenizer_folder: Path,
    fonts_folder: Path | None,
    plan: Plan,
    memory: mmap.mmap,
    slot_bytes: int,
    jobs: multiprocessing.queues.SimpleQueue[Job],
    done: multiprocessing.queues.SimpleQueue[Job | str],
) -> None:
    """A worker's life: take a job, draw its rows, say so."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # the training process ends its workers, after its last step
        signal.signal(ending, signal.SIG_IGN)
    parent = os.getppid()
    os.nice(5)
    try:
        tokenizer = Tokenizer.from_folder(tokenizer_folder)
        wording, fonts = Wording(tokenizer), find_fonts(fonts_folder)
        while True:
            while not jobs._reader.poll(2.0):  # type: ignore[attr-defined]
                if os.getppid() != parent:
                    return  # the training process was killed
            job = jobs.get()
            kind = KINDS[job.kind]
            rows = plan.chunk_rows(kind)
            arrays = layout(memory, job.slot * slot_bytes, kind, rows)
            rng = random.Random(job.seed)
            for index in range(rows):
                row = random_row(rng, fonts, wording, kind, simple=job.simple)
                pack(row, arrays, index, kind, tokenizer.pad_token_id)
            done.put(job)
    except (EOFError, BrokenPipeError):
        return  # the training process is gone
    except Exception as error:
        done.put(f"render worker failed: {error!r}")
        raise


Schedule = Callable[[int], tuple[str, bool]]
"""Step to the kind of its batch and whether its scenes are simple."""


class Loader:
    """Iterates over device batches of one step after another; renders and copies ahead in a thread of its own."""

    def __init__(
        self, renderer: Renderer, schedule: Schedule, *, seed: str, first_step: int, device: torch.device
    ) -> None:
        self._renderer = renderer
        self._schedule = schedule
        self._seed = seed
        self._first = first_step
        self._device = device
        self._ready: queue.Queue[tuple[str, Batch, torch.cuda.Event | None] | BaseException] = queue.Queue(maxsize=2)
        self._stop = threading.Event()
        self.starved = 0.0
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def next(self) -> tuple[str, Batch]:
        """The kind and the batch of the next step; waits if rendering is behind and adds that to ``starved``."""
        before = time.perf_counter()
        item = self._ready.get()
        self.starved += time.perf_counter() - before
        if isinstance(item, BaseException):
            raise item
        kind, batch, copied = item
        if copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(copied)
            for tensor in batch.values():
                tensor.record_stream(stream)
        return kind, batch

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()
            self._thread.join(0.05)

    def _run(self) -> None:
        try:
            for kind, batch, event in self._batches():
                while not self._stop.is_set():
                    try:
                        self._ready.put((kind, batch, event), timeout=0.2)
                        break
                    except queue.Full:
                        continue
                if self._stop.is_set():
                    return
        except BaseException as error:
            self._ready.put(error)

    def _batches(self) -> Iterator[tuple[str, Batch, torch.cuda.Event | None]]:
        """Yields (kind, batch on the device, event of the copy's end), step after step."""
        renderer, plan = self._renderer, self._renderer.plan
        free = list(range(renderer.slots))
        waiting: list[Job] = []  # not yet submitted chunks, in order
        finished: dict[int, list[Job]] = {}
        issued = step = self._first
        cuda = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if cuda else None
        staging: list[tuple[dict[str, Tensor], torch.cuda.Event | None]] = []
        while True:
            while free:
                if not waiting:
                    kind_name, simple = self._schedule(issued)
                    kind = KINDS[kind_name]
                    waiting = [
                        Job(issued, chunk, kind_name, -1, f"{self._seed} {issued} {chunk}", simple)
                        for chunk in range(plan.chunks(kind))
                    ]
                    issued += 1
                job = waiting.pop(0)
                renderer.submit(Job(job.step, job.chunk, job.kind, free.pop(), job.seed, job.simple))
            kind = KINDS[self._schedule(step)[0]]
            while len(finished.get(step, ())) < plan.chunks(kind):
                job = renderer.next_done()
                finished.setdefault(job.step, []).append(job)
            jobs = finished.pop(step)
            host = self._staging(staging, kind, plan.rows(kind))
            for job in jobs:
                start = job.chunk * plan.chunk_rows(kind)
                for name, array in renderer.arrays(job).items():
                    host[name][start : start + len(array)].copy_(torch.from_numpy(array))
                free.append(job.slot)
            if stream is None:
                yield kind.name, {name: tensor.clone() for name, tensor in host.items()}, None
            else:
                with torch.cuda.stream(stream):
                    batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in host.items()}
                    event = torch.cuda.Event()
                    event.record(stream)
                staging.append((host, event))
                yield kind.name, batch, event
            step += 1

    def _staging(
        self, used: list[tuple[dict[str, Tensor], torch.cuda.Event | None]], kind: Kind, rows: int
    ) -> dict[str, Tensor]:
        """Host tensors of a batch; pinned ones are kept in two sets a kind and reused once their copy has ended."""
        pinned = self._device.type == "cuda"
        alike = [
            entry
            for entry in used
            if entry[0]["ids"].shape == (rows, kind.segments) and entry[0]["tiles"].shape[1] == kind.tiles
        ]
        if len(alike) >= 2:
            host, event = alike[0]
            used[:] = [entry for entry in used if entry[0] is not host]
            if event is not None:
                event.synchronize()
            return host
        return {
            name: torch.empty((rows, *field.shape), dtype=_TORCH_TYPES[field.dtype], pin_memory=pinned)
            for name, field in fields(kind).items()
        }


_TORCH_TYPES = {np.uint8: torch.uint8, np.int16: torch.int16}
