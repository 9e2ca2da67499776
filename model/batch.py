"""What one step of the engine asks of the model: tokens of many sequences, laid end to end, and where their cache lies.

Rows are tokens. The rows of decoding sequences come first, one each, then the prefill chunks, one
sequence after the other. A sequence's cached tokens lie in pages of PAGE_SIZE tokens; its
`block_table` lists its pages in order, so that token i lies in page `block_table[i // PAGE_SIZE]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PAGE_SIZE = 64
"""Tokens in a page of the cache."""
_ALIGNMENT = 16
"""Bytes: kernels are compiled for addresses that are multiples of it, and would be compiled anew for others."""

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence to run in this step: one when decoding, any number when prefilling."""

    token_ids: Sequence[int]
    start: int
    """Position of the first of them in the sequence; those before it are in the cache already."""
    pages: Sequence[int]
    """The sequence's pages, enough for `start + len(token_ids)` tokens."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class DecodeRows:
    """The first B rows of a batch: sequences with one new token each."""

    block_table: Tensor
    """int32 [B, most pages]; entries past a sequence's last page are 0 and never read."""
    context_lens: Tensor
    """int32 [B]: tokens in the cache once this step's own is written."""


@dataclass(frozen=True)
class PrefillRows:
    """The rows after the decoding ones: chunks of N sequences, each attending to its own cached tokens and itself."""

    query_lens: list[int]
    """Rows of each sequence in this step."""
    key_lens: list[int]
    """Tokens of each sequence in the cache once this step's own are written (>= its query_lens entry)."""
    cu_query_lens: Tensor
    """int32 [N + 1]: running sum of query_lens, from 0."""
    cu_key_lens: Tensor
    """int32 [N + 1]: running sum of key_lens, from 0."""
    key_slots: Tensor
    """int64 [sum of key_lens]: the cache rows of all these tokens, sequence after sequence."""


@dataclass(frozen=True)
class Batch:
    """One step: T rows of tokens."""

    token_ids: Tensor
    """int64 [T]; rows that `image_rows` names hold the image token's id."""
    positions: Tensor
    """int64 [T]: each token's place in its sequence, image tokens counted one by one."""
    slots: Tensor
    """int64 [T]: the cache row of each token, page * PAGE_SIZE + place in the page."""
    decode: DecodeRows | None
    prefill: PrefillRows | None
    logits_rows: Tensor
    """int64 [R]: the rows whose logits are wanted."""
    image_rows: Tensor | None = None
    """int64 [M]: rows whose embedding is replaced by `image_embeds`."""
    image_embeds: Tensor | None = None
    """[M, hidden_size]."""


def build_batch(
    decodes: Sequence[Chunk],
    prefills: Sequence[Chunk],
    *,
    logits_rows: Sequence[int],
    device: torch.device,
    image_rows: Sequence[int] = (),
    image_embeds: Tensor | None = None,
) -> Batch:
    """Lay out the chunks of a step as tensors on `device`; row numbers count decodes first, then prefills.

    Raises ValueError for a decode of more than one token, a chunk without tokens or with too few
    pages, or image rows and embeddings of different number.
    """
    if any(len(chunk.token_ids) != 1 for chunk in decodes):
        raise ValueError("a decoding sequence has exactly one new token")
    if len(image_rows) != (0 if image_embeds is None else len(image_embeds)):
        raise ValueError(
            f"{len(image_rows)} image rows for {0 if image_embeds is None else len(image_embeds)} embeddings"
        )
    for chunk in (*decodes, *prefills):
        if not chunk.token_ids:
            raise ValueError("a chunk needs at least one token")
        if len(chunk.pages) * PAGE_SIZE < chunk.end:
            raise ValueError(f"{len(chunk.pages)} pages cannot hold {chunk.end} tokens")
    key_slots = [_slots(chunk) for chunk in prefills]
    starts = np.array([chunk.start for chunk in decodes], dtype=np.int64)
    last_pages = np.array([chunk.pages[chunk.start // PAGE_SIZE] for chunk in decodes], dtype=np.int64)
    query_lens = [len(chunk.token_ids) for chunk in prefills]
    key_lens = [chunk.end for chunk in prefills]
    arrays: list[npt.NDArray[Any]] = [
        np.concatenate([np.array(chunk.token_ids, dtype=np.int64) for chunk in (*decodes, *prefills)] or [starts]),
        np.concatenate([starts, *(np.arange(chunk.start, chunk.end) for chunk in prefills)]),
        np.concatenate(
            [
                last_pages * PAGE_SIZE + starts % PAGE_SIZE,
                *(slots[chunk.start :] for slots, chunk in zip(key_slots, prefills, strict=True)),
            ]
        ),
        np.array(logits_rows, dtype=np.int64),
        np.array(image_rows, dtype=np.int64),
        np.concatenate([starts[:0], *key_slots]),
        _running_sum(query_lens),
        _running_sum(key_lens),
        (starts + 1).astype(np.int32),
        _block_table(decodes),
    ]
    token_ids, positions, slots, wanted, images, keys, cu_query_lens, cu_key_lens, context_lens, block_table = upload(
        arrays, device
    )
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        decode=DecodeRows(block_table, context_lens) if decodes else None,
        prefill=PrefillRows(query_lens, key_lens, cu_query_lens, cu_key_lens, keys) if prefills else None,
        logits_rows=wanted,
        image_rows=images if image_rows else None,
        image_embeds=image_embeds,
    )


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays (contiguous) as tensors on `device`, by one copy that the host does not wait for."""
    offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    # Pinned memory is not handed out again before the copy from it is done.
    staging = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged = staging.numpy()
    for offset, array in zip(offsets, arrays, strict=False):
        staged[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return [
        there[offset : offset + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for offset, array in zip(offsets, arrays, strict=False)
    ]


def _slots(chunk: Chunk) -> _Integers:
    """Cache rows of the sequence's tokens up to the chunk's end."""
    pages = np.array(chunk.pages, dtype=np.int64)
    return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[: chunk.end]


def _block_table(decodes: Sequence[Chunk]) -> npt.NDArray[np.int32]:
    table = np.zeros((len(decodes), max((len(chunk.pages) for chunk in decodes), default=0)), dtype=np.int32)
    for row, chunk in zip(table, decodes, strict=True):
        row[: len(chunk.pages)] = chunk.pages
    return table


def _running_sum(lengths: list[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)
