"""What one step of the engine asks of the model: tokens of many sequences, laid end to end, and where their cache lies.

Rows are tokens. The rows of decoding sequences come first, one each, then the prefill chunks, one
sequence after the other. A sequence's cached tokens lie in pages of PAGE_SIZE tokens; its
`block_table` lists its pages in order, so that token i lies in page `block_table[i // PAGE_SIZE]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_SIZE = 64
"""Tokens in a page of the cache."""


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
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for chunk in (*decodes, *prefills):
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start, chunk.end))
        slots.extend(_slots(chunk, chunk.start))
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        decode=_decode_rows(decodes, device) if decodes else None,
        prefill=_prefill_rows(prefills, device) if prefills else None,
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device=device),
        image_rows=torch.tensor(image_rows, dtype=torch.int64, device=device) if image_rows else None,
        image_embeds=image_embeds,
    )


def _slots(chunk: Chunk, first: int) -> list[int]:
    """Cache rows of the sequence's tokens from position `first` to the chunk's end."""
    if not chunk.token_ids:
        raise ValueError("a chunk needs at least one token")
    if len(chunk.pages) * PAGE_SIZE < chunk.end:
        raise ValueError(f"{len(chunk.pages)} pages cannot hold {chunk.end} tokens")
    return [chunk.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(first, chunk.end)]


def _decode_rows(decodes: Sequence[Chunk], device: torch.device) -> DecodeRows:
    width = max(len(chunk.pages) for chunk in decodes)
    table = [[*chunk.pages, *[0] * (width - len(chunk.pages))] for chunk in decodes]
    return DecodeRows(
        block_table=torch.tensor(table, dtype=torch.int32, device=device),
        context_lens=torch.tensor([chunk.end for chunk in decodes], dtype=torch.int32, device=device),
    )


def _prefill_rows(prefills: Sequence[Chunk], device: torch.device) -> PrefillRows:
    query_lens = [len(chunk.token_ids) for chunk in prefills]
    key_lens = [chunk.end for chunk in prefills]
    key_slots = [slot for chunk in prefills for slot in _slots(chunk, 0)]
    return PrefillRows(
        query_lens=query_lens,
        key_lens=key_lens,
        cu_query_lens=_running_sum(query_lens, device),
        cu_key_lens=_running_sum(key_lens, device),
        key_slots=torch.tensor(key_slots, dtype=torch.int64, device=device),
    )


def _running_sum(lengths: list[int], device: torch.device) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(dtype=torch.int32, device=device)
