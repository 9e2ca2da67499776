"""The same greedy text in float32 whatever computes it, and whatever lies in memory that nobody wrote.

On a GPU: with and without graphs, by every backend of attention that serves, alone and 256 at once, whole and in
chunks. On a CPU what there is of it, and a few tokens by the Triton kernels, interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from server.engine.core import Engine
from tests.engine.support import case_request, engine_config, greedy_tokens, run_all, tokens_of
from tests.goldens_data import VARIANTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("text_short", "image_rgba", "multi_turn", "text_long")
LENGTH = 12

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def make_engine(variant: str, **settings: Any) -> Engine:
    few = {"max_num_seqs": 8, "vision_tile_budget": 2, "kv_cache_tokens": 16384, "prefix_caching": False}
    return Engine(engine_config(variant, **{"device": DEVICE, "dtype": "float32", **few, **settings}))


def check(engine: Engine, variant: str, copies: int = 1) -> None:
    """Every request, so many times at once, gets the recorded text."""
    requests = [
        case_request(variant, name, request_id=f"{name} {copy}", max_tokens=LENGTH)
        for copy in range(copies)
        for name in NAMES
    ]
    events = run_all(engine, requests)
    wrong = [
        name for name, found in events.items() if tokens_of(found) != greedy_tokens(variant, name.split()[0])[:LENGTH]
    ]
    assert not wrong and engine.stats().failed_requests == 0


def poison(*owners: object) -> None:
    """NaN into every array of numbers that an object holds: cache pages, what padding rows hold, results."""
    for owner in owners:
        for value in vars(owner).values() if owner is not None else ():
            tensors: Iterable[Any] = value if isinstance(value, list) else [value]
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    tensor.fill_(torch.nan)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_read_that_nobody_wrote(variant: str) -> None:
    engine = make_engine(variant)
    runner = engine.runner
    for chunk in (2048, 100):
        engine.scheduler.prefill_chunk_tokens = chunk
        poison(runner, runner.graphs, runner.prompt_graphs, runner.vision_graphs)
        check(engine, variant)
    if DEVICE == "cpu":  # where prompts otherwise go the way of decodes
        runner.batch_invariant = False
        poison(runner)
        check(engine, variant)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the kernels run in every test")
@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("variant", VARIANTS)
def test_interpreted_kernels_give_the_same_text(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("kernels.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    engine = make_engine(variant, kv_cache_tokens=4096)
    poison(engine.runner)
    engine.runner.batch_invariant = False
    events = run_all(engine, [case_request(variant, "text_short", max_tokens=3)])
    assert tokens_of(events["text_short"]) == greedy_tokens(variant, "text_short")[:3]


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_backends_graphs_and_chunks_give_the_same_text(variant: str, backend: str) -> None:
    engine = make_engine(variant, attention_backend=backend)
    for _ in range(2):
        for chunk in (2048, 100):
            engine.scheduler.prefill_chunk_tokens = chunk
            check(engine, variant)
        engine.runner.graphs = engine.runner.prompt_graphs = None


@needs_gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_256_at_once_give_the_same_text_as_one(variant: str) -> None:
    engine = make_engine(variant, max_num_seqs=256, kv_cache_tokens=256 * 1024)
    check(engine, variant, copies=64)
