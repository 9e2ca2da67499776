"""CUDA graphs of decode steps, one for each of a few batch sizes; a step is padded up to the next of them.

A graph replays the whole forward pass of a step in one launch, so that the device never waits for Python. It
reads its inputs from one buffer, filled by one copy; padding rows have no cached tokens and write their cache
row into a page that belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from model.batch import PAGE_SIZE, Batch, Chunk, DecodeRows
from model.vl2 import DeepseekVL2

_HEAD = 4
"""Numbers of a row beside its pages: token id, position, slot, context length."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch  # kept, because the graph reads its tensors
    logits: Tensor


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, then multiples of 8 up to `most`, which is one of them."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


class DecodeGraphs:
    """Graphs for up to `max_num_seqs` sequences of up to `max_pages` pages, over `kv_cache`.

    The cache's last page must belong to no sequence.
    """

    def __init__(
        self, model: DeepseekVL2, kv_cache: Sequence[Tensor], *, max_num_seqs: int, max_pages: int, progress: bool
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._max_pages = max_pages
        self._spare_slot = (len(kv_cache[0]) - 1) * PAGE_SIZE
        self._sizes = graph_sizes(max_num_seqs)
        device = kv_cache[0].device
        length = self._sizes[-1] * (_HEAD + max_pages)
        self._inputs = torch.zeros(length, dtype=torch.int64, device=device)
        # Two, in turn: one may still be on its way to the device while the next step is laid out.
        self._staging = [torch.zeros(length, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, _Captured] = {}
        for size in tqdm(self._sizes[::-1], desc="Capturing decode graphs", disable=None if progress else True):
            self._captured[size] = self._capture(size)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits, float32 [len(chunks), vocab_size], of one token each; good until the next call."""
        size = next(size for size in self._sizes if size >= len(chunks))
        used = self._fill(chunks, size)
        self._inputs[:used].copy_(self._staging[0][:used], non_blocking=True)
        self._staging.reverse()
        captured = self._captured[size]
        captured.graph.replay()
        return captured.logits[: len(chunks)]

    def _fill(self, chunks: Sequence[Chunk], size: int) -> int:
        """Lay out a step's numbers in host memory; how many there are."""
        staged = self._staging[0].numpy()
        token_ids, positions, slots, lengths = staged[: _HEAD * size].reshape(_HEAD, size)
        table = staged[_HEAD * size : (_HEAD + self._max_pages) * size].reshape(size, self._max_pages)
        count = len(chunks)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, count)
        token_ids[:count] = [chunk.token_ids[0] for chunk in chunks]
        positions[:count] = starts
        lengths[:count] = starts + 1
        table.fill(0)  # page numbers of an earlier step would be read, though not used, by the torch reference
        for row, chunk in enumerate(chunks):
            table[row, : len(chunk.pages)] = chunk.pages
        slots[:count] = table[np.arange(count), starts // PAGE_SIZE] * PAGE_SIZE + starts % PAGE_SIZE
        token_ids[count:] = positions[count:] = lengths[count:] = 0
        slots[count:] = self._spare_slot
        return (_HEAD + self._max_pages) * size

    def _batch(self, size: int) -> Batch:
        """The graph's view of the input buffer."""
        token_ids, positions, slots, lengths = self._inputs[: _HEAD * size].view(_HEAD, size)
        table = self._inputs[_HEAD * size : (_HEAD + self._max_pages) * size].view(size, self._max_pages)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            decode=DecodeRows(block_table=table, context_lens=lengths),
            prefill=None,
            logits_rows=torch.arange(size, device=self._inputs.device),
        )

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        self._inputs.zero_()
        batch = self._batch(size)
        batch.slots.fill_(self._spare_slot)
        self._model(batch, self._kv_cache)  # compiles what is not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._model(batch, self._kv_cache)
        return _Captured(graph, batch, logits)
