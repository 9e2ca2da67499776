"""What changes in the course of training: the clock, the mix of pictures, learning rate and helper weight."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

WINDOW = 25  # steps between looks at the clock

SIMPLE_UNTIL, SINGLE_UNTIL, MIXED_FROM = 0.06, 0.18, 0.42
FINAL_MIX = {"single": 0.46, "double": 0.08, "quad": 0.26, "pair": 0.13, "triple": 0.02, "wide pair": 0.05}
"""Shares of steps. A step of any kind has about the same number of tiles, so that the tower learns as much from each;
but one of single pictures has 3.5 times the answers of one of large pictures, which therefore come later: where to look
among tiles is learnt fast by a model that sees well."""


@dataclass
class Clock:
    """The share of the time that has passed, the same number on every device: looked up once a window."""

    seconds: float
    passed: float = 0.0
    stopped: bool = False  # set when training shall end early
    _started: float = field(default_factory=time.monotonic)
    _marks: dict[int, float] = field(default_factory=dict)
    _first: float | None = None

    def elapsed(self) -> float:
        return self.passed + time.monotonic() - self._started

    def mark(self, step: int, device: torch.device) -> float:
        """Looks at the first device's clock; to be called at every window's first step. Infinite if it was stopped."""
        now = math.inf if self.stopped else self.elapsed() / self.seconds
        share = torch.tensor(now, dtype=torch.float64, device=device)
        if dist.is_initialized():
            dist.broadcast(share, 0)
        if self._first is None:
            self._first = float(share)
        self._marks[step // WINDOW] = float(share)
        return float(share)

    def share(self, step: int) -> float:
        """Estimate for any step of a window that was marked, from its mark and the pace of the window before."""
        window = step // WINDOW
        now, before = self._marks[window], self._marks.get(window - 1)
        pace = 0.0 if before is None else (now - before) / WINDOW
        return min(1.0, now + pace * (step % WINDOW))

    def earlier(self, step: int) -> float:
        """What was known a window before: for what is planned ahead."""
        assert self._first is not None
        return self._marks.get(step // WINDOW - 1, self._first)


def schedule(clock: Clock, seed: int, step: int) -> tuple[str, bool]:
    """The kind of a step's batch, and whether its pictures are a first lesson's. The same on every device."""
    share = clock.earlier(step)
    if share < SINGLE_UNTIL:
        return "single", share < SIMPLE_UNTIL
    ramp = min(1.0, (share - SINGLE_UNTIL) / (MIXED_FROM - SINGLE_UNTIL) * 0.8 + 0.2)
    weights = {name: weight * ramp for name, weight in FINAL_MIX.items()}
    weights["single"] += 1.0 - ramp
    chosen = random.Random(f"kind {seed} {step}").choices(list(weights), list(weights.values()))[0]
    return chosen, False


def learning_rate(peak: float, warmup: int, share: float, step: int) -> float:
    """Linear warm-up by steps, cosine to a fiftieth by the clock."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return peak * cosine * min(1.0, (step + 1) / warmup)


def helper_weight(share: float) -> float:
    """1 in the first half, then down to 0.1."""
    return 1.0 - 0.9 * min(1.0, max(0.0, (share - 0.5) / 0.4))
