"""Graphs without a GPU."""

from __future__ import annotations

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
