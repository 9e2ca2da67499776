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
class Room:
    """Sizes of a batch that are the same whatever is in it, for a captured graph; the rest is padding.

    A padding row has no cached tokens, writes to `spare_slot`, which belongs to no sequence, and is read by nobody.
    """

    rows: int
    decodes: int
    prefills: int
    keys: int
    logits: int
    pages: int
    """Of a sequence, at most."""
    spare_slot: int


@dataclass(frozen=True)
class DecodeRows:
    """The first B rows of a batch: sequences with one new token each.

    In a batch with `Room` the last ones may be empty (no tokens in the cache), and be rows of a chunk besides.
    """

    block_table: Tensor
    """int32 [B, most pages]; entries past a sequence's last page are 0 and never read."""
    context_lens: Tensor
    """int32 [B]: tokens in the cache once this step's own is written."""


@dataclass(frozen=True)
class PrefillRows:
    """The rows after the decoding ones: chunks of N sequences, each attending to its own cached tokens and itself."""

    first_row: int
    """Row of the batch from which cu_query_lens counts: the number of decodes, or 0 in a batch with `Room`."""
    query_lens: list[int] | None
    """Rows of each sequence in this step; None in a batch with `Room`, where only the device knows."""
    key_lens: list[int] | None
    """Tokens of each sequence in the cache once this step's are written (>= its query_lens entry); None likewise."""
    cu_query_lens: Tensor
    """int32 [N + 1]: where each sequence's rows start, and behind the last."""
    cu_key_lens: Tensor
    """int32 [N + 1]: running sum of key_lens, from 0."""
    key_slots: Tensor
    """int64 [sum of key_lens, or more]: the cache rows of all these tokens, sequence after sequence."""


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
    arrays = lay_out(decodes, prefills, logits_rows=logits_rows)
    *tensors, images = upload([*arrays, np.array(image_rows, dtype=np.int64)], device)
    token_ids, positions, slots, wanted, key_slots, cu_query_lens, cu_key_lens, context_lens, block_table = tensors
    query_lens, key_lens = [len(chunk.token_ids) for chunk in prefills], [chunk.end for chunk in prefills]
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        decode=DecodeRows(block_table, context_lens) if decodes else None,
        prefill=PrefillRows(len(decodes), query_lens, key_lens, cu_query_lens, cu_key_lens, key_slots)
        if prefills
        else None,
        logits_rows=wanted,
        image_rows=images if image_rows else None,
        image_embeds=image_embeds,
    )


def padded_batch(tensors: Sequence[Tensor]) -> Batch:
    """The batch that a captured graph reads: views of the memory to which what `lay_out` makes with `Room` goes."""
    token_ids, positions, slots, wanted, key_slots, cu_query_lens, cu_key_lens, context_lens, block_table = tensors
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        decode=DecodeRows(block_table, context_lens),
        prefill=PrefillRows(0, None, None, cu_query_lens, cu_key_lens, key_slots),
        logits_rows=wanted,
    )


def lay_out(
    decodes: Sequence[Chunk], prefills: Sequence[Chunk], *, logits_rows: Sequence[int], room: Room | None = None
) -> list[npt.NDArray[Any]]:
    """A step's arrays: token ids, positions, slots, logits rows, key slots, cu_query_lens, cu_key_lens, context_lens,
    block table; what they are is said where `Batch` has them. Each has the size that `room` says, if given."""
    key_slots = [_slots(chunk) for chunk in prefills]
    starts = np.array([chunk.start for chunk in decodes], dtype=np.int64)
    last_pages = np.array([chunk.pages[chunk.start // PAGE_SIZE] for chunk in decodes], dtype=np.int64)
    pages = max((len(chunk.pages) for chunk in decodes), default=0)
    token_ids = [token for chunk in (*decodes, *prefills) for token in chunk.token_ids]
    positions = np.concatenate([starts, *(np.arange(chunk.start, chunk.end) for chunk in prefills)])
    new_slots = (slots[chunk.start :] for slots, chunk in zip(key_slots, prefills, strict=True))
    slots = np.concatenate([last_pages * PAGE_SIZE + starts % PAGE_SIZE, *new_slots])
    keys = np.concatenate([starts[:0], *key_slots])
    first_row = 0 if room is None else len(decodes)
    cu_query_lens = np.cumsum([first_row, *(len(chunk.token_ids) for chunk in prefills)], dtype=np.int32)
    cu_key_lens = np.cumsum([0, *(chunk.end for chunk in prefills)], dtype=np.int32)
    context_lens = (starts + 1).astype(np.int32)
    if room is None:
        ids, wanted = np.array(token_ids, dtype=np.int64), np.array(logits_rows, dtype=np.int64)
        table = _block_table(decodes, len(decodes), pages)
        return [ids, positions, slots, wanted, keys, cu_query_lens, cu_key_lens, context_lens, table]
    return [
        _padded(token_ids, room.rows, 0),
        _padded(positions, room.rows, 0),
        _padded(slots, room.rows, room.spare_slot),
        _padded(logits_rows, room.logits, 0),
        _padded(keys, room.keys, room.spare_slot),
        _padded(cu_query_lens, room.prefills + 1, cu_query_lens[-1]),
        _padded(cu_key_lens, room.prefills + 1, cu_key_lens[-1]),
        _padded(context_lens, room.decodes, 0),
        _block_table(decodes, room.decodes, room.pages),
    ]


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """The arrays (contiguous) as tensors on `device`, by one copy that the host does not wait for.

    `into`: uint8 memory there that takes them all, else it is new. An array's place depends on the sizes before it.
    """
    offsets = _offsets(arrays)
    # Pinned memory is not handed out again before the copy from it is done.
    staging = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged = staging.numpy()
    for offset, array in zip(offsets, arrays, strict=False):
        staged[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    if into is None:
        there = staging.to(device, non_blocking=True)
    else:
        there = into[: len(staging)].copy_(staging, non_blocking=True)
    return [
        there[offset : offset + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for offset, array in zip(offsets, arrays, strict=False)
    ]


def uploaded_bytes(arrays: Sequence[npt.NDArray[Any]]) -> int:
    """What `upload` takes of memory for them."""
    return _offsets(arrays)[-1]


def _offsets(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Where each array begins, and the end."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _slots(chunk: Chunk) -> _Integers:
    """Cache rows of the sequence's tokens up to the chunk's end."""
    pages = np.array(chunk.pages, dtype=np.int64)
    return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[: chunk.end]


def _block_table(decodes: Sequence[Chunk], rows: int, pages: int) -> npt.NDArray[np.int32]:
    table = np.zeros((rows, pages), dtype=np.int32)
    for row, chunk in zip(table, decodes, strict=False):
        row[: len(chunk.pages)] = chunk.pages
    return table


def _padded(values: npt.NDArray[Any] | Sequence[int], length: int, padding: int) -> npt.NDArray[Any]:
    """`length` integers of the array's type, or int64: the values and then padding. Raises ValueError for too many."""
    if len(values) > length:
        raise ValueError(f"{len(values)} values where there is room for {length}")
    padded = np.full(length, padding, dtype=values.dtype if isinstance(values, np.ndarray) else np.int64)
    padded[: len(values)] = values
    return padded
