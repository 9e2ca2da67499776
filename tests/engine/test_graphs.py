"""What a graph reads is what the batch of a step without graphs would say. The replay itself needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from model.batch import PAGE_SIZE, Batch, build_batch
from model.batch import Chunk as ModelChunk
from model.vl2 import DeepseekVL2
from server.engine.core import Engine
from server.engine.graphs import DecodeGraphs, graph_sizes
from server.engine.request import PENDING, Request, SamplingParams
from server.engine.scheduler import Chunk
from tests.engine.replayed import use_graphs
from tests.engine.support import case_request, engine_config, greedy_tokens, run_all, tokens_of
from tests.goldens_data import VARIANTS

CPU = torch.device("cpu")
MAX_PAGES = 5
SPARE_PAGE = 40


class Watched(DecodeGraphs):
    """Graphs that remember what they would have read."""

    def __init__(self, max_rows: int) -> None:
        language = SimpleNamespace(embed_tokens=SimpleNamespace(weight=torch.zeros(1, 3)), embed=self._remember)
        model = SimpleNamespace(config=SimpleNamespace(language=SimpleNamespace(vocab_size=7)), language=language)
        cache = [torch.zeros(SPARE_PAGE + 1, 1)]
        super().__init__(cast(DeepseekVL2, model), cache, max_rows=max_rows, max_pages=MAX_PAGES)
        self.seen: Batch | None = None
        self.embedded = torch.empty(0, dtype=torch.int64)
        for size in self.sizes:
            self._captured[size] = cast(Any, SimpleNamespace(graph=Replay(self, size), logits=self.logits[:size]))

    def _remember(self, token_ids: Tensor, image_rows: Tensor | None, image_embeds: Tensor | None) -> Tensor:
        self.embedded = token_ids
        return torch.ones(len(token_ids), 3)


class Replay:
    def __init__(self, graphs: Watched, size: int) -> None:
        self.graphs, self.size = graphs, size

    def replay(self) -> None:
        self.graphs.seen = self.graphs._batch(self.size)


@pytest.fixture
def graphs(without_cuda: None) -> Watched:
    return Watched(max_rows=11)


def decoding(number: int, length: int, pages: list[int]) -> Request:
    tokens = [100 * number + position for position in range(length)]
    request = Request(str(number), tokens, SamplingParams(max_tokens=9), seed=0, pages=pages)
    request.num_computed = length - 1
    return request


def chunk_of(request: Request) -> Chunk:
    return Chunk(request, request.num_tokens - 1, request.num_tokens, samples=True)


def check(graphs: Watched, requests: list[Request], tokens: list[int]) -> None:
    """Replay a step, and compare what was read with the batch of the same chunks with these tokens."""
    chunks = [chunk_of(request) for request in requests]
    logits = graphs.run(chunks)
    assert len(logits) == len(requests)
    assert graphs.seen is not None and graphs.seen.decode is not None
    expected = build_batch(
        [ModelChunk([token], c.start, c.request.pages) for token, c in zip(tokens, chunks, strict=True)],
        [],
        logits_rows=range(len(chunks)),
        device=CPU,
    )
    assert expected.decode is not None
    count = len(chunks)
    assert torch.equal(graphs.embedded, expected.token_ids)
    for name in ("positions", "slots", "logits_rows"):
        assert torch.equal(getattr(graphs.seen, name)[:count], getattr(expected, name)), name
    seen = graphs.seen.decode
    assert torch.equal(seen.context_lens[:count], expected.decode.context_lens)
    assert seen.block_table.dtype == seen.context_lens.dtype == torch.int32
    for row, request in zip(seen.block_table, requests, strict=False):
        assert row[: len(request.pages)].tolist() == request.pages
    # Padding: no cached tokens, the spare page's first slot, rows alike that no earlier step left there.
    assert not graphs._hidden_states[count : len(graphs.seen.positions)].any()
    assert not seen.context_lens[count:].any()
    assert (graphs.seen.slots[count:] == SPARE_PAGE * PAGE_SIZE).all()


def test_rows_come_grow_move_and_leave(graphs: Watched) -> None:
    a, b, c = decoding(1, 64, [3]), decoding(2, 65, [5, 9]), decoding(3, 130, [1, 2, 4])
    check(graphs, [a, b, c], [163, 264, 429])
    assert graphs.seen is not None and len(graphs.seen.positions) == 4
    a.token_ids.append(77)
    a.pages += [8]
    check(graphs, [a, b, c], [77, 264, 429])
    check(graphs, [b, c], [264, 429])
    check(graphs, [c], [429])
    b.pages = [11, 12]  # preempted and back, with as many pages as before
    check(graphs, [a, b, c], [77, 264, 429])
    many = [decoding(number, 3, [20 + number]) for number in range(4, 12)]
    check(graphs, [a, b, c, *many], [77, 264, 429, *(100 * number + 2 for number in range(4, 12))])
    check(graphs, [a, b, c], [77, 264, 429])
    check(graphs, [b], [264])


def test_pending_tokens_are_what_the_step_before_chose(graphs: Watched) -> None:
    a, b, c = decoding(1, 10, [3]), decoding(2, 20, [5]), decoding(3, 30, [7])
    for request, row in ((a, 1), (c, 0)):
        request.token_ids.append(PENDING)
        request.num_pending, request.row = 1, row
    graphs.last_tokens[:2] = torch.tensor([501, 502])
    check(graphs, [a, b, c], [502, 219, 501])
    check(graphs, [c, a], [501, 502])


def test_a_row_uses_the_page_of_its_token_even_if_it_has_one_more(graphs: Watched) -> None:
    check(graphs, [decoding(1, 64, [3, 9])], [163])


def test_tokens_of_a_prompt_are_rows_beside_each_other(graphs: Watched) -> None:
    a, b = decoding(1, 10, [3]), decoding(2, 70, [5, 6])
    b.num_computed = 62
    pieces = [Chunk(b, place, place + 1, samples=place == 69) for place in range(62, 70)]
    graphs.run([chunk_of(a), *pieces])
    seen = graphs.seen
    assert seen is not None and seen.decode is not None
    assert graphs.embedded.tolist() == [109, *range(262, 270)]
    assert seen.slots[:9].tolist() == [3 * 64 + 9, 5 * 64 + 62, 5 * 64 + 63, *range(6 * 64, 6 * 64 + 6)]
    assert seen.decode.context_lens[:9].tolist() == [10, *range(63, 71)]
    assert seen.decode.block_table[1:9, :2].tolist() == [[5, 6]] * 8


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_engine_answers_the_same_through_graphs(without_cuda: None, variant: str, runs_ahead: bool) -> None:
    """Short prompts, pieces of long ones, decodes, and second questions, whose picture is in the cache."""
    engine = Engine(engine_config(variant, max_num_seqs=8, prefill_chunk_tokens=200))
    graphs, _ = use_graphs(engine.runner)
    engine.runner.runs_ahead = runs_ahead
    names = ("text_short", "image_rgba", "system_prompt", "multi_turn")
    for _ in range(2):
        events = run_all(engine, [case_request(variant, name, max_tokens=8) for name in names])
        assert {name: tokens_of(events[name]) for name in names} == {n: greedy_tokens(variant, n)[:8] for n in names}
    graphs.rows = []
    events = run_all(engine, [case_request(variant, "image_rgba", max_tokens=4)])
    assert tokens_of(events["image_rgba"]) == greedy_tokens(variant, "image_rgba")[:4]
    rest = 422 - (events["image_rgba"][0].cached_tokens or 0)
    assert 64 > rest > 0 and max(graphs.rows) > rest / 2  # the rest of the prompt, and with it of the picture
    assert engine.stats().failed_requests == 0


@pytest.mark.parametrize("most, sizes", [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])])
def test_sizes_end_with_the_largest_batch(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes
