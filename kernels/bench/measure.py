"""The clock, and how fast a kernel could be at most.

A time is the median of CUDA graph replays, in which the kernel runs many times over: over weights and cache rows that
rotate through more memory than the cache holds, and over activations that stay in it, as in a step. Launches are thus
of graph nodes, and overlap as they do there.

A floor is the larger of two times: bytes that have to be read and written over the bandwidth of a plain copy, and
operations over the rate of a large product, both measured here and now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

_ENOUGH_SECONDS = 1e-3
"""A graph runs for so long at least, so that its launch does not count."""
_MOST_ROUNDS = 32
COLD_BYTES = 256 << 20
"""More than any cache holds."""


@dataclass(frozen=True)
class Work:
    """One kernel on one shape, its inputs made."""

    calls: Sequence[Callable[[], object]]
    """The same work on different memory."""
    error: Callable[[], float]
    """Of the first call: the norm of its difference from a float64 reference over the norm of that."""
    moved: int
    """Bytes that have to be read and written once."""
    operations: float = 0.0
    """Of the matrix units."""


@dataclass(frozen=True)
class Case:
    """One row of the bench, not begun yet."""

    kernel: str
    shape: str
    prepare: Callable[[], Work]
    tolerance: float


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches."""

    bandwidth: float
    """Bytes a second."""
    rate: float
    """Operations a second of the matrix units."""

    def floor(self, moved: float, operations: float) -> tuple[float, str]:
        """(seconds, which of the two it is): the least that this work can take."""
        times = {"bytes": moved / self.bandwidth, "operations": operations / self.rate}
        bound = max(times, key=lambda name: times[name])
        return times[bound], bound


def ceilings(dtype: torch.dtype) -> Ceilings:
    """Of the default device: by copying 256 MiB, and by a product of 8192 rows and columns (a CPU: much less)."""
    on_cpu = torch.empty(0).device.type == "cpu"
    count, side = (1 << 24, 1024) if on_cpu else (1 << 27, 8192)
    clock = timed_on_cpu if on_cpu else timed
    source = torch.ones(count, dtype=dtype)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / clock([lambda: target.copy_(source)])
    a, b = (torch.randn(side, side, dtype=dtype) for _ in range(2))
    return Ceilings(bandwidth, 2 * side**3 / clock([lambda: a @ b.t()]))


def timed(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median seconds of one call; the calls (the same work on different memory) are captured in one graph."""
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    once = _elapsed(lambda: [call() for call in calls])
    rounds = max(1, min(_MOST_ROUNDS, int(_ENOUGH_SECONDS / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = sorted(_elapsed(graph.replay) for _ in range(repeats))
    return times[len(times) // 2] / (rounds * len(calls))


def timed_on_cpu(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """As `timed`, without graphs."""
    times = []
    for _ in range(repeats):
        began = perf_counter()
        for call in calls:
            call()
        times.append((perf_counter() - began) / len(calls))
    return sorted(times)[len(times) // 2]


def _elapsed(run: Callable[[], object]) -> float:
    """Seconds on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite where there is a NaN."""
    difference = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    return difference if difference == difference else float("inf")


def copies(nbytes: int, most: int = 16) -> int:
    """How many copies of so many bytes no cache holds together."""
    return max(1, min(most, -(-COLD_BYTES // max(nbytes, 1))))
