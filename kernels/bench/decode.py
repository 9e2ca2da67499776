"""Cases of decode attention, and of what stands before and behind it."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.bench.measure import Case, Work, copies, relative_error
from kernels.bench.setups import PAGE_SIZE, Setup
from kernels.head_linear import head_linear, head_linear_reference
from kernels.latent_write import write_latents, write_latents_reference
from kernels.mha_decode import mha_decode
from kernels.mla_decode import mla_decode
from kernels.rope_cache import (
    apply_rope_half,
    rope_frequencies,
    rope_tables,
    rope_tables_reference,
    write_rows,
)

MOST_HEAD_ROWS = 160_000
"""Rows of a multi-head cache, which are five times as long as latents."""


def cases(setup: Setup) -> Iterator[Case]:
    geometry, sizes = setup.geometry, setup.sizes
    if geometry.rank:
        for lengths in sizes.decode:
            yield Case("mla_decode", batch_name(lengths), partial(mla, setup, lengths), setup.tolerance)
        for rows in sizes.absorbed:
            yield Case("absorb key", f"{rows} rows", partial(absorb, setup, rows, True), setup.tolerance)
            yield Case("absorb value", f"{rows} rows", partial(absorb, setup, rows, False), setup.tolerance)
        for rows in sizes.rows:
            yield Case("write_latents", f"{rows} rows, rope", partial(latents, setup, rows), setup.tolerance)
    for lengths in sizes.decode:
        if sum(lengths) <= MOST_HEAD_ROWS:
            yield Case("mha_decode", batch_name(lengths), partial(mha, setup, lengths), setup.tolerance)
    for rows in sizes.rows:
        yield Case("rope, write", f"{rows} rows of keys and values", partial(head_rows, setup, rows), setup.tolerance)
        yield Case("rope_tables", f"{rows} rows", partial(tables, setup, rows), 1e-4)


def batch_name(lengths: tuple[int, ...]) -> str:
    same = len(set(lengths)) == 1
    return f"{len(lengths)} x {lengths[0]}" if same else f"{len(lengths)} ragged, {sum(lengths)} in all"


class Pages:
    """A paged cache of sequences of these lengths: pages out of order, and NaN in every row that nobody may see."""

    def __init__(self, setup: Setup, lengths: tuple[int, ...], width: int) -> None:
        batch, most = len(lengths), max(1, -(-max(lengths) // PAGE_SIZE))
        self.context_lens = torch.tensor(lengths, dtype=torch.int32)
        self.table = torch.randperm(batch * most).view(batch, most).to(torch.int32)
        empty = torch.arange(most * PAGE_SIZE) >= self.context_lens[:, None]
        pages = (batch * most, PAGE_SIZE, width)
        self.caches = []
        for _ in range(copies(sum(lengths) * width * setup.dtype.itemsize, most=8)):
            cache = setup.random(*pages)
            by_sequence = cache[self.table.long()].flatten(1, 2).masked_fill_(empty[..., None], torch.nan)
            cache[self.table.long()] = by_sequence.unflatten(1, (most, PAGE_SIZE))
            self.caches.append(cache)

    def rows_of(self, sequence: int) -> Tensor:
        """The sequence's cached rows in the first copy, float64."""
        rows = self.caches[0][self.table[sequence].long()].flatten(0, 1)
        return rows[: self.context_lens[sequence]].double()


def mla(setup: Setup, lengths: tuple[int, ...], decode: Callable[..., Tensor] = mla_decode) -> Work:
    geometry, batch = setup.geometry, len(lengths)
    pages, scale = Pages(setup, lengths, geometry.rank + geometry.rope), (geometry.nope + geometry.rope) ** -0.5
    latent = setup.random(batch, geometry.heads, geometry.rank)
    rope = setup.random(batch, geometry.heads, geometry.rope)
    calls = [
        partial(decode, latent, rope, cache, pages.table, pages.context_lens, scale=scale) for cache in pages.caches
    ]

    def error() -> float:
        some, query = setup.compared(batch), torch.cat((latent, rope), dim=-1).double()
        expected = []
        for sequence in some.tolist():
            rows = pages.rows_of(sequence)
            weights = (query[sequence] @ rows.t() * scale).softmax(-1)
            expected.append(weights @ rows[:, : geometry.rank])
        return relative_error(calls[0]()[some], torch.stack(expected))

    cached = sum(lengths) * (geometry.rank + geometry.rope) * setup.dtype.itemsize
    operations = 4.0 * geometry.heads * (geometry.rank + geometry.rope / 2) * sum(lengths)
    return Work(calls, error, cached + 2 * latent.nbytes + rope.nbytes, operations)


def mha(setup: Setup, lengths: tuple[int, ...]) -> Work:
    heads, dim, batch = setup.heads.heads, setup.heads.value, len(lengths)
    pages, scale = Pages(setup, lengths, 2 * heads * dim), dim**-0.5
    query = setup.random(batch, heads, dim)
    calls = [partial(mha_decode, query, cache, pages.table, pages.context_lens, scale=scale) for cache in pages.caches]

    def error() -> float:
        some, expected = setup.compared(batch), []
        for sequence in some.tolist():
            keys, values = pages.rows_of(sequence).unflatten(-1, (2, heads, dim)).permute(1, 2, 0, 3)
            weights = (keys @ query[sequence, :, :, None].double()).mul(scale).softmax(1)
            expected.append((weights * values).sum(1))
        return relative_error(calls[0]()[some], torch.stack(expected))

    cached = sum(lengths) * 2 * heads * dim * setup.dtype.itemsize
    return Work(calls, error, cached + 2 * query.nbytes)


def absorb(setup: Setup, rows: int, key: bool) -> Work:
    """W_UK folded into the query, or W_UV onto the output: parts of one matrix, the second read across."""
    geometry = setup.geometry
    shape = (geometry.heads, geometry.nope + geometry.value, geometry.rank)
    weights = [setup.random(*shape, std=0.05) for _ in range(copies(torch.Size(shape).numel() * setup.dtype.itemsize))]
    if key:
        x, parts = setup.random(rows, geometry.heads, geometry.nope), [w[:, : geometry.nope] for w in weights]
    else:
        x = setup.random(rows, geometry.heads, geometry.rank)
        parts = [weight[:, geometry.nope :].transpose(1, 2) for weight in weights]
    calls = [partial(head_linear, x, part) for part in parts]

    def error() -> float:
        return relative_error(calls[0](), head_linear_reference(x.double(), parts[0].double()))

    moved = parts[0].numel() * setup.dtype.itemsize + x.nbytes + rows * geometry.heads * parts[0].shape[2] * 2
    return Work(calls, error, moved, 2.0 * rows * parts[0].numel())


def latents(setup: Setup, rows: int) -> Work:
    """The query's rope, in place, the latent's norm, the key's rope, and the cache row."""
    geometry = setup.geometry
    query_width, width = geometry.heads * (geometry.nope + geometry.rope), geometry.rank + geometry.rope
    projected, weight = setup.random(rows, query_width + width), setup.random(geometry.rank)
    angles = torch.rand(rows, geometry.rope // 2)
    slots = torch.randperm(rows + PAGE_SIZE)[:rows]

    def write(dtype: torch.dtype, reference: bool) -> Tensor:
        """Query and cache rows, side by side."""
        values = projected.to(dtype, copy=True)
        cache = torch.zeros(rows // PAGE_SIZE + 2, PAGE_SIZE, width, dtype=dtype)
        chosen = write_latents_reference if reference else write_latents
        rotary = (angles.cos(), angles.sin())
        if reference:
            rotary = (angles.double().cos(), angles.double().sin())
        chosen(*_views(setup, values), weight.to(dtype), rotary, cache, slots, rope=geometry.rope, eps=1e-6)
        return torch.cat((values[:, :query_width], cache.view(-1, width)[slots]), dim=-1)

    cache = torch.zeros(rows // PAGE_SIZE + 2, PAGE_SIZE, width, dtype=setup.dtype)
    rotary = (angles.cos(), angles.sin())
    scratch = projected.clone()
    call = partial(write_latents, *_views(setup, scratch), weight, rotary, cache, slots, rope=geometry.rope, eps=1e-6)
    moved = rows * (2 * (geometry.heads * geometry.rope + width) * setup.dtype.itemsize + 4 * geometry.rope + 8)
    return Work([call], lambda: relative_error(write(setup.dtype, False), write(torch.float64, True)), moved)


def _views(setup: Setup, projected: Tensor) -> tuple[Tensor, Tensor]:
    geometry = setup.geometry
    query_width = geometry.heads * (geometry.nope + geometry.rope)
    query = projected[:, :query_width].unflatten(-1, (geometry.heads, geometry.nope + geometry.rope))
    return query, projected[:, query_width:]


def head_rows(setup: Setup, rows: int) -> Work:
    """Multi-head attention's rope of queries and keys, and the cache row: torch's operations."""
    heads, dim = setup.heads.heads, setup.heads.value
    projected, angles = setup.random(rows, 3, heads, dim), torch.rand(rows, dim // 2)
    cache = torch.zeros(rows // PAGE_SIZE + 1, PAGE_SIZE, 2 * heads * dim, dtype=setup.dtype)
    slots = torch.randperm(cache.shape[0] * PAGE_SIZE)[:rows]

    def run(values: Tensor, cos: Tensor, sin: Tensor, into: Tensor) -> Tensor:
        query, key, value = values.unbind(1)
        query, key = apply_rope_half(query, cos, sin), apply_rope_half(key, cos, sin)
        write_rows(into, slots, torch.stack((key, value), dim=1).flatten(1))
        return query

    def error() -> float:
        query = run(projected, angles.cos(), angles.sin(), cache)
        first, second = projected[:, :2].double().chunk(2, dim=-1)
        cos, sin = angles.double().cos()[:, None, None], angles.double().sin()[:, None, None]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        expected = torch.cat((rotated, projected[:, 2:].double()), dim=1)
        written = cache.view(-1, 2, heads, dim)[slots]
        return relative_error(torch.cat((query[:, None], written), dim=1), expected)

    call = partial(run, projected, angles.cos(), angles.sin(), cache)
    return Work([call], error, 2 * projected.nbytes + 2 * angles.nbytes)


def tables(setup: Setup, rows: int) -> Work:
    width = setup.geometry.rope or setup.geometry.value
    positions = torch.randint(0, 4096, (rows,))
    frequencies = rope_frequencies(width, 10000.0, positions.device)

    def error() -> float:
        expected = rope_tables_reference(positions, frequencies)
        return relative_error(torch.stack(rope_tables(positions, frequencies)), torch.stack(expected))

    return Work([partial(rope_tables, positions, frequencies)], error, rows * (8 + 4 * width))
