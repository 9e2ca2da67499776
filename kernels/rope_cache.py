"""Rotary position embedding, and rows of the paged cache.

RoPE turns each pair of channels (a, b) of a query or key at position p by the angle p * theta^(-2i/d):

    a' = a cos - b sin        b' = b cos + a sin

Two pairings exist. `half`: channel i with i + d/2 (tiny, over the whole head). `interleaved`: 2i with
2i + 1 (MLA's rope channels); the result is left in split order, all first members and then all
second ones, which is the order that the cache keeps and that dot products do not see.
Angles are float32 products of position and float32 frequency, as in the reference.

The cache of a layer is [pages, PAGE_SIZE, row]; seen as [pages * PAGE_SIZE, row], a token's row is its slot.
Cost: every value is read and written once; bound by bandwidth.
"""

import torch
from torch import Tensor

from kernels.batch_invariant import whole_vectors
from kernels.expect import INTEGERS, expect
from kernels.lang import pdl, tl, triton, use_triton


def rope_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """float32 [dim / 2]: theta^(-2i/dim)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, dim / 2], of int64 positions [T]."""
    return (rope_tables_triton if use_triton(positions) else rope_tables_reference)(positions, frequencies)


def rope_tables_reference(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * frequencies
    return whole_vectors(torch.cos, angles), whole_vectors(torch.sin, angles)


def rope_tables_triton(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    tokens, half = len(positions), len(frequencies)
    expect("positions", positions, (tokens,), *INTEGERS)
    expect("frequencies", frequencies, (half,), torch.float32)
    cos, sin = torch.empty(2, tokens, half, dtype=torch.float32, device=positions.device).unbind()
    block = triton.next_power_of_2(half)
    _rope_tables[(tokens,)](positions, frequencies, cos, sin, half, BLOCK=block, **pdl(positions), num_warps=1)
    return cos, sin


def apply_rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, dim], any strides, in pairs (i, i + dim/2). Raises ValueError for shapes that do not fit."""
    _check_rope(x, cos)
    return _rotate(x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :], cos, sin)


def apply_rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, dim], any strides, in pairs (2i, 2i + 1); the result is in split order.

    Raises ValueError for shapes that do not fit.
    """
    _check_rope(x, cos)
    return _rotate(x[..., 0::2], x[..., 1::2], cos, sin)


def write_rows(kv_cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows [T, row] at slots int64 [T] of kv_cache [pages, PAGE_SIZE, row], in place."""
    kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, slots, rows)


def read_rows(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """[S, row] at slots int64 [S] of kv_cache [pages, PAGE_SIZE, row]."""
    return kv_cache.view(-1, kv_cache.shape[-1]).index_select(0, slots)


def _rotate(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    a, b = first.float(), second.float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(first.dtype)


def _check_rope(x: Tensor, cos: Tensor) -> None:
    if x.dim() != 3 or cos.shape != (x.shape[0], x.shape[-1] // 2) or x.shape[-1] % 2:
        raise ValueError(
            f"rope takes [tokens, heads, even width] and [tokens, width / 2], got {x.shape} and {cos.shape}"
        )


@triton.jit
def _rope_tables(positions, frequencies, cos, sin, half, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    used = pair < half
    frequency = tl.load(frequencies + pair, mask=used, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    angle = tl.load(positions + token).to(tl.float32) * frequency
    tl.store(cos + token * half + pair, tl.cos(angle), mask=used)
    tl.store(sin + token * half + pair, tl.sin(angle), mask=used)
