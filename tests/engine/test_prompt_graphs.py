"""A step with prompts gives the same through a graph, with all its padding, as without. Recording needs a GPU."""

from __future__ import annotations

import pytest
import torch

from server.engine.core import Engine
from server.engine.prompt_graphs import CONTEXTS, Size, prompt_sizes
from server.engine.request import PENDING, Request, SamplingParams
from server.engine.runner import Runner
from server.engine.scheduler import Chunk, StepPlan
from tests.engine.replayed import ReplayedPrompts, use_graphs
from tests.engine.support import case_request, engine_config, greedy_tokens, run_all, tokens_of
from tests.goldens_data import VARIANTS

SEQS, CHUNK = 8, 256
SIZES = prompt_sizes(128, CHUNK, SEQS)


def step(runner: Runner, decodes: list[int], prompts: list[tuple[int, int]]) -> StepPlan:
    """Decodes with so many tokens in the cache, every other one with a pending token; and prompts' (cached, new)."""
    generator = torch.Generator().manual_seed(len(decodes) + len(prompts))
    free = torch.randperm(runner.num_pages, generator=generator).tolist()
    plan = StepPlan()
    for cached, new in [*((length, 1) for length in decodes), *prompts]:
        tokens = torch.randint(0, 1000, (cached + new,), generator=generator).tolist()
        pages = [free.pop() for _ in range(-(-len(tokens) // 64))]
        request = Request("", tokens, SamplingParams(max_tokens=1), seed=0, pages=pages)
        if cached:
            runner.model(runner._batch(StepPlan(prefills=[Chunk(request, 0, cached, samples=False)])), runner.kv_cache)
        is_decode = len(plan.decodes) < len(decodes)
        samples = is_decode or len(plan.prefills) % 3 != 1
        (plan.decodes if is_decode else plan.prefills).append(Chunk(request, cached, cached + new, samples))
    for row, chunk in enumerate(plan.decodes[::2]):
        chunk.request.token_ids[-1] = PENDING
        chunk.request.num_pending, chunk.request.row = 1, SEQS - 1 - row
    return plan


@pytest.mark.usefixtures("without_cuda", "new_memory_is_nan")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("decodes", "prompts"),
    [
        ([], [(0, 256)]),  # all of a size
        ([5, 64, 130, 1, 63, 65, 200], [(100, 150)]),
        ([], [(0, 1), (70, 1), (128, 127)]),
        ([9, 80], [(0, 40), (0, 1), (64, 60), (3, 1), (1, 90), (0, 30)]),
        ([7], [(200, 50), (0, 100), (130, 40)]),
    ],
)
@torch.inference_mode()
def test_padding_changes_nothing(variant: str, decodes: list[int], prompts: list[tuple[int, int]]) -> None:
    """Nor does what was in memory: all that nobody wrote is NaN."""
    engine = Engine(engine_config(variant, max_num_seqs=SEQS, prefill_chunk_tokens=CHUNK))
    runner = engine.runner
    _, graphs = use_graphs(runner)
    runner.last_tokens[:SEQS] = torch.arange(500, 500 + SEQS)
    for cache in runner.kv_cache:
        cache.fill_(torch.nan)
    plan = step(runner, decodes, prompts)
    expected = runner.model(runner._batch(plan), runner.kv_cache).clone()
    written = [cache[:-1].clone() for cache in runner.kv_cache]
    rows = sum(chunk.end - chunk.start for chunk in plan.chunks)
    least = graphs.size_for(rows, sum(chunk.end for chunk in plan.prefills))
    assert least is not None and len(expected) == len(plan.sampled)
    for size in (size for size in SIZES if size.rows >= rows and size.keys >= least.keys):
        graphs._hidden_states.fill_(torch.nan)
        graphs._logits.fill_(torch.nan)
        logits = runner._run_prompt_graph(graphs, plan, size)
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
        for cache, before in zip(runner.kv_cache, written, strict=True):
            torch.testing.assert_close(cache[:-1], before, atol=2e-5, rtol=0, equal_nan=True)


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_engine_answers_the_same_through_graphs(variant: str, runs_ahead: bool) -> None:
    """Prompts in chunks, with pictures, beside decodes, and on pages that were found."""
    engine = Engine(engine_config(variant, max_num_seqs=SEQS, prefill_chunk_tokens=CHUNK, kv_cache_tokens=16384))
    _, graphs = use_graphs(engine.runner)
    engine.runner.runs_ahead = runs_ahead
    names = ("text_short", "image_rgba", "text_long", "system_prompt", "multi_turn")
    late = [case_request(variant, name, request_id=f"late {name}", max_tokens=8) for name in names]

    def add(number: int) -> None:
        if number == 4:
            for request in late[1:3]:
                engine.add_request(request)

    events = {request.request_id: [] for request in late}
    for request in [case_request(variant, name, max_tokens=12) for name in names]:
        engine.add_request(request)
        events[request.request_id] = []
    number = 0
    while engine.has_work:
        add(number)
        for event in engine.step():
            events[event.request_id].append(event)
        number += 1
    for key, found in events.items():
        if found:
            assert tokens_of(found) == greedy_tokens(variant, key.removeprefix("late "))[: 8 if "late" in key else 12]
    assert any(decodes and chunks for _, decodes, chunks in graphs.steps)
    assert engine.stats().failed_requests == 0


@pytest.mark.usefixtures("without_cuda")
def test_a_step_with_too_many_keys_runs_without_a_graph() -> None:
    engine = Engine(engine_config(VARIANTS[1], max_num_seqs=SEQS, prefill_chunk_tokens=CHUNK))
    _, graphs = use_graphs(engine.runner)
    graphs._captured = {size: captured for size, captured in graphs._captured.items() if size.keys == size.rows}
    name = "text_long"
    events = run_all(engine, [case_request(VARIANTS[1], name, max_tokens=4)])
    assert tokens_of(events[name]) == greedy_tokens(VARIANTS[1], name)[:4]
    assert [size for size, _, _ in graphs.steps] == [Size(CHUNK, CHUNK)]  # the first chunk alone


def test_a_step_takes_the_least_size_that_holds_it() -> None:
    graphs = ReplayedPrompts.__new__(ReplayedPrompts)
    graphs._captured = dict.fromkeys(SIZES)  # type: ignore[arg-type]
    assert graphs.size_for(129, 129) == Size(256, 256)
    assert graphs.size_for(256, 257) == Size(256, 256 + CONTEXTS[1])
    assert graphs.size_for(257, 200) == Size(264, 264)
    assert graphs.size_for(200, 264 + CONTEXTS[-1]) == Size(264, 264 + CONTEXTS[-1])
    assert graphs.size_for(265, 265) is None and graphs.size_for(1, 265 + CONTEXTS[-1]) is None


@pytest.mark.parametrize(
    ("least", "chunk", "decodes", "rows"),
    [
        (128, 2048, 64, [256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2112]),
        (200, 300, 200, [256, 300, 384, 500]),
        (128, 100, 64, [164]),
        (128, 64, 8, []),
    ],
)
def test_sizes_reach_from_the_decode_graphs_to_the_largest_step(
    least: int, chunk: int, decodes: int, rows: list[int]
) -> None:
    sizes = prompt_sizes(least, chunk, decodes)
    assert sizes == sorted(sizes) == [Size(count, count + context) for count in rows for context in CONTEXTS]
