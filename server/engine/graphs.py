"""CUDA graphs of decode steps, one for each of a few batch sizes; a step is padded up to the next of them.

A row is a token: that of a decoding sequence, or one of a short piece of a prompt, whose tokens are rows beside each
other. What stands in the row, a token's embedding or a picture's features, is put together before the replay, in three
or four launches.

A graph replays the whole forward pass of a step in one launch, so that the device never waits for Python. It
reads its inputs from one buffer; padding rows have no cached tokens and write their cache row into a page that
belongs to no sequence. The buffer lies twice: on the device, and in pinned host memory, whence one copy a step goes:

    last tokens   int64 [most]             on the device only: what the step before chose, `last_tokens`
    token ids     int64 [most]             what the host knows
    sources       int64 [most]             where in the two above, read as one, a row's token stands
    positions     int64 [most]
    slots         int64 [most]
    lengths       int32 [most]
    block table   int32 [most, max_pages]  copied only when a sequence got a page or rows changed hands

The graphs share one pool of memory, since only one runs at a time, one tensor for what stands in the rows, and one for
the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kernels.prefetch import prefetcher_for
from model.batch import PAGE_SIZE, Batch, DecodeRows
from model.vl2 import DeepseekVL2
from server.engine.request import Request
from server.engine.scheduler import Chunk

_HEAD = 4
"""Rows of int64 that the host fills: token ids, sources, positions, slots."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch  # kept, because the graph reads its tensors
    logits: Tensor


class _Inputs:
    """The device's side of the buffer, for up to `most` rows (a multiple of 4, so that all of it is aligned)."""

    def __init__(self, most: int, max_pages: int, device: torch.device) -> None:
        self.most = most
        self.max_pages = max_pages
        self.first_staged = 2 * most
        self.end_of_lengths = (2 + 2 * _HEAD + 1) * most
        self.words = torch.zeros(self.end_of_lengths + most * max_pages, dtype=torch.int32, device=device)
        numbers = self.words[: 2 * (1 + _HEAD) * most].view(torch.int64)
        self.tokens = numbers[: 2 * most]
        self.last_tokens = numbers[:most]
        self.sources, self.positions, self.slots = numbers[2 * most :].view(_HEAD - 1, most)
        self.lengths = self.words[self.end_of_lengths - most : self.end_of_lengths]
        self.table = self.words[self.end_of_lengths :].view(most, max_pages)
        self.rows = torch.arange(most, device=device)


class _Staging:
    """The host's side of the buffer, in pinned memory; `copied` is recorded behind each copy from it."""

    def __init__(self, inputs: _Inputs) -> None:
        memory = torch.zeros(len(inputs.words) - inputs.first_staged, dtype=torch.int32, pin_memory=True)
        self.memory = memory
        self.copied = torch.cuda.Event()
        most, words = inputs.most, memory.numpy()
        self.token_ids, self.sources, self.positions, self.slots = (
            words[: 2 * _HEAD * most].view(np.int64).reshape(_HEAD, most)
        )
        self.lengths = words[2 * _HEAD * most :][:most]
        self.table = words[(2 * _HEAD + 1) * most :].reshape(most, inputs.max_pages)


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, then multiples of 8 up to `most`, which is one of them."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


class DecodeGraphs:
    """Graphs for up to `max_rows` rows of sequences of up to `max_pages` pages, over `kv_cache`; `capture` makes them.

    The cache's last page must belong to no sequence.
    """

    def __init__(self, model: DeepseekVL2, kv_cache: Sequence[Tensor], *, max_rows: int, max_pages: int) -> None:
        self._model = model
        self.max_rows = max_rows
        self.sizes = graph_sizes(max_rows)
        self._kv_cache = kv_cache
        self._spare_slot = (len(kv_cache[0]) - 1) * PAGE_SIZE
        device = kv_cache[0].device
        self._inputs = _Inputs(-(-max_rows // 4) * 4, max_pages, device)
        # Two, in turn: one may still be on its way to the device while the next step is laid out.
        self._staging = [_Staging(self._inputs) for _ in range(2)]
        self._table = np.zeros((self._inputs.most, max_pages), dtype=np.int32)
        # Of each row of the table: whose pages stand there (a list that only grows, while it is a request's), how many.
        self._pages: list[list[int]] = [[] for _ in range(self._inputs.most)]
        self._num_pages = [0] * self._inputs.most
        embedding = model.language.embed_tokens.weight
        self._hidden_states = torch.zeros(max_rows, embedding.shape[1], dtype=embedding.dtype, device=device)
        self.logits = torch.empty(max_rows, model.config.language.vocab_size, device=device)
        self.pool = torch.cuda.graph_pool_handle()
        self._prefetcher = prefetcher_for(device)
        self._captured: dict[int, _Captured] = {}

    @property
    def last_tokens(self) -> Tensor:
        """int64 [at least max_rows]: where the runner leaves the tokens of every step for the next."""
        return self._inputs.last_tokens

    def capture(self, first: int = 0, last: int | None = None, *, progress: bool = False) -> None:
        """Some of the sizes, numbered from the largest on: so the others find its memory."""
        sizes = self.sizes[::-1][first:last]
        for size in tqdm(sizes, desc="Capturing decode graphs", disable=None if progress else True):
            self._captured[size] = self._capture(size)

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[Chunk], image_rows: Tensor | None = None, image_embeds: Tensor | None = None
    ) -> Tensor:
        """Logits, float32 [len(chunks), vocab_size], of chunks of one token each; good until the next call.

        image_rows, image_embeds: as in `Batch`.
        """
        size = min(size for size in self._captured if size >= len(chunks))
        staging = self._staging[0]
        self._staging.reverse()
        staging.copied.synchronize()
        end = self._inputs.end_of_lengths
        self._fill(staging, chunks, size)
        if self._fill_table([chunk.request for chunk in chunks]):
            staging.table[:] = self._table
            end = len(self._inputs.words)
        first = self._inputs.first_staged
        self._inputs.words[first:end].copy_(staging.memory[: end - first], non_blocking=True)
        staging.copied.record()
        token_ids = self._inputs.tokens[self._inputs.sources[: len(chunks)]]
        self._hidden_states[: len(chunks)] = self._model.language.embed(token_ids, image_rows, image_embeds)
        # Alike, so that together they choose only as many experts, whose weights are read for them, as one row does.
        self._hidden_states[len(chunks) : size].zero_()
        captured = self._captured[size]
        captured.graph.replay()
        return captured.logits[: len(chunks)]

    def _fill(self, staging: _Staging, chunks: Sequence[Chunk], size: int) -> None:
        """Lay out all but the table in host memory."""
        count, most = len(chunks), self._inputs.most
        requests = [chunk.request for chunk in chunks]
        starts = np.array([chunk.start for chunk in chunks])
        pages = np.array([chunk.request.pages[chunk.start // PAGE_SIZE] for chunk in chunks])
        staging.token_ids[:count] = [chunk.request.token_ids[chunk.start] for chunk in chunks]
        staging.sources[:count] = [r.row if r.num_pending else most + row for row, r in enumerate(requests)]
        staging.positions[:count] = starts
        staging.slots[:count] = pages * PAGE_SIZE + starts % PAGE_SIZE
        staging.lengths[:count] = starts + 1
        staging.token_ids[count:size] = staging.positions[count:size] = staging.lengths[count:size] = 0
        staging.sources[count:size] = np.arange(most + count, most + size)
        staging.slots[count:size] = self._spare_slot

    def _fill_table(self, requests: Sequence[Request]) -> bool:
        """Bring the block table in line with the requests; whether anything changed. What others left is not read."""
        changed = False
        for row, request in enumerate(requests):
            pages = request.pages
            if pages is not self._pages[row] or len(pages) != self._num_pages[row]:
                self._table[row, : len(pages)] = pages
                self._pages[row], self._num_pages[row] = pages, len(pages)
                changed = True
        return changed

    def _batch(self, size: int) -> Batch:
        """The graph's view of the input buffer."""
        inputs = self._inputs
        return Batch(
            token_ids=inputs.tokens[:0],  # the rows are embedded already
            positions=inputs.positions[:size],
            slots=inputs.slots[:size],
            decode=DecodeRows(block_table=inputs.table[:size], context_lens=inputs.lengths[:size]),
            prefill=None,
            logits_rows=inputs.rows[:size],
        )

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        self._inputs.words.zero_()
        self._inputs.slots.fill_(self._spare_slot)
        batch, logits = self._batch(size), self.logits[:size]
        rows = self._hidden_states[:size]
        graph = capture_graph(lambda: self._model(batch, self._kv_cache, logits, rows, self._prefetcher), self.pool)
        return _Captured(graph, batch, logits)


def capture_graph(run: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of the launches of `run`, with memory from `pool` for what it allocates."""
    run()  # compiles what is not compiled yet
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph
