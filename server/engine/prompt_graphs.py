"""CUDA graphs of steps with prompts: decodes, and chunks of any lengths, with cached tokens before them or without.

What the host knows of such a step when it is captured is how many rows of tokens and of keys it has room for; a step
is padded up to the least of a few sizes that holds it. Everything else lies on the device, where a graph reads it anew:
where chunks start and end, how long sequences are, and where in the cache (`model.batch.lay_out`, by one copy a step).

    rows     decodes, then chunks, then padding. Decode attention takes the first `max_num_seqs` rows, of which those
             that are no decodes have an empty cache; then prompts' attention overwrites the rows of chunks.
    keys     the cached tokens of all chunks and their own, gathered from the pages and, for MLA, expanded. Those of
             padding are computed for nothing: 2 * rank * heads * (nope + value) operations each a layer.
    logits   of `max_num_seqs` rows, which the host names.

A step that no size holds runs without a graph. What stands in the rows, embeddings or a picture's features, is put
together before the replay. Memory for the graphs' own use, logits and last tokens are those of the decode graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from model.batch import PAGE_SIZE, Batch, Chunk, Room, lay_out, padded_batch, upload, uploaded_bytes
from model.vl2 import DeepseekVL2
from server.engine.graphs import DecodeGraphs, capture_graph

CONTEXTS = (0, 2048, 8192)
"""Keys beyond one for each row: of prompts that are whole, of the rest of one that was cut, of several with a prefix.

A key for nothing costs small 0.2 us in all; a step without a graph costs the host some 20 ms.
"""
_LEAST_STRIDE = 128
"""Rows from one size to the next at least: fewer rows take no less time, since all weights are read all the same."""


@dataclass(frozen=True, order=True)
class Size:
    rows: int
    keys: int


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch  # kept, because the graph reads its tensors


def prompt_sizes(least: int, chunk: int, decodes: int) -> list[Size]:
    """Sizes for steps of more than `least` rows, of which up to `chunk` are prompts' and up to `decodes` are not.

    There are four sizes to each doubling of the rows, and the largest step of prompts alone is one of them.
    """
    most = chunk + decodes
    rows, counts = least // _LEAST_STRIDE * _LEAST_STRIDE, {chunk, most}
    while rows < most:
        counts.add(rows)
        rows += max(_LEAST_STRIDE, (1 << rows.bit_length() - 1) // 4) if rows else _LEAST_STRIDE
    return [Size(count, count + context) for count in sorted(counts) if count > least for context in CONTEXTS]


class PromptGraphs:
    """Graphs for steps of more rows than `decode_graphs` take, of sequences of up to `max_pages` pages.

    The cache's last page must belong to no sequence. `capture` makes the graphs.
    """

    def __init__(
        self,
        model: DeepseekVL2,
        kv_cache: Sequence[Tensor],
        decode_graphs: DecodeGraphs,
        *,
        sizes: Sequence[Size],
        max_num_seqs: int,
        max_pages: int,
    ) -> None:
        """sizes: rising, one at least; see `prompt_sizes`."""
        self.sizes = sizes
        self._model, self._kv_cache, self._pool = model, kv_cache, decode_graphs.pool
        self._max_num_seqs, self._max_pages = max_num_seqs, max_pages
        self._last_tokens = decode_graphs.last_tokens
        self._logits = decode_graphs.logits[:max_num_seqs]
        embedding = model.language.embed_tokens.weight
        self._device = embedding.device
        most = self.sizes[-1]
        self._hidden_states = torch.zeros(most.rows, embedding.shape[1], dtype=embedding.dtype, device=self._device)
        rows = [np.zeros(most.rows, np.int64)] * 3  # as many as `run` adds, as long as they can be
        space = uploaded_bytes([*lay_out([], [], logits_rows=[], room=self._room(most)), *rows])
        self._buffer = torch.zeros(space, dtype=torch.uint8, device=self._device)
        self._captured: dict[Size, _Captured] = {}

    def capture(self, first: int = 0, last: int | None = None, *, progress: bool = False) -> None:
        """Some of the sizes, numbered from the largest on: so the others find its memory."""
        sizes = self.sizes[::-1][first:last]
        for size in tqdm(sizes, desc="Capturing prompt graphs", disable=None if progress else True):
            self._captured[size] = self._capture(size)

    def size_for(self, rows: int, keys: int) -> Size | None:
        """The least size for so many tokens, and so many of the chunks' sequences up to the chunks' ends."""
        return min((size for size in self._captured if size.rows >= rows and size.keys >= keys), default=None)

    @torch.inference_mode()
    def run(
        self,
        size: Size,
        decodes: Sequence[Chunk],
        prefills: Sequence[Chunk],
        *,
        logits_rows: Sequence[int],
        pending: Sequence[tuple[int, int]],
        image_rows: Sequence[int],
        image_embeds: Tensor | None,
    ) -> Tensor:
        """Logits, float32 [len(logits_rows), vocab_size], of a step that fits `size`; good until the next call.

        pending: (row, its token's place in `last_tokens`) of tokens that only the device knows; the rest as in
        `build_batch`.
        """
        count = len(decodes) + sum(len(chunk.token_ids) for chunk in prefills)
        arrays = lay_out(decodes, prefills, logits_rows=logits_rows, room=self._room(size))
        further = [np.array(image_rows, np.int64), *np.array(pending, np.int64).reshape(-1, 2).T.copy()]
        token_ids, *_, images, rows, sources = upload([*arrays, *further], self._device, self._buffer)
        if pending:
            token_ids.index_copy_(0, rows, self._last_tokens[sources])
        self._hidden_states[:count] = self._model.language.embed(token_ids[:count], images, image_embeds)
        self._captured[size].graph.replay()
        return self._logits[: len(logits_rows)]

    def _room(self, size: Size) -> Room:
        return Room(
            rows=size.rows,
            decodes=self._max_num_seqs,
            prefills=self._max_num_seqs,
            keys=size.keys,
            logits=self._max_num_seqs,
            pages=self._max_pages,
            spare_slot=(len(self._kv_cache[0]) - 1) * PAGE_SIZE,
        )

    def _batch(self, size: Size) -> Batch:
        """The graph's view of the buffer, which holds nothing but padding now."""
        arrays = lay_out([], [], logits_rows=[], room=self._room(size))
        return padded_batch(upload(arrays, self._device, self._buffer))

    @torch.inference_mode()
    def _capture(self, size: Size) -> _Captured:
        batch = self._batch(size)
        return _Captured(capture_graph(lambda: self._forward(size, batch), self._pool), batch)

    def _forward(self, size: Size, batch: Batch) -> None:
        self._model(batch, self._kv_cache, self._logits, self._hidden_states[: size.rows])
