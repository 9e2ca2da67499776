"""Graphs without a GPU, and memory that shows who reads what nobody wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor


class FakeEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU has not: pinned memory, events, pools."""
    zeros = torch.zeros

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.fixture
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` gives is NaN, or the largest whole number."""

    def poisoned(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        elif tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(poisoned, getattr(torch, name)))
