"""What MLA does between its input projection and attention: norm the latent, rotate, write the cache row.

    cache[slot] = (norm(latent), rope(key_rope))        query[..., nope:] = rope(query[..., nope:])   in place

query [T, heads, nope + rope] and latent [T, rank + rope] (the latent, then the key's rope part) are views of the
projection's output; rope is of the interleaved kind (kernels/rope_cache.py). One launch, two programs a token: one
for the cache row, one for the query.
Cost: each value read and written once; bound by bandwidth.
"""

import torch
from torch import Tensor

from kernels.expect import FLOATS, expect, expect_rows
from kernels.lang import pdl, tl, triton, use_triton
from kernels.norm import rms_norm_reference
from kernels.rope_cache import apply_rope_interleaved, write_rows


def write_latents(
    query: Tensor,
    latent: Tensor,
    norm_weight: Tensor,
    rotary: tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slots: Tensor,
    *,
    rope: int,
    eps: float,
) -> None:
    """Rotate `query` in place and write the cache rows at slots int64 [T].

    rotary: float32 cos and sin, [T, rope / 2] each.
    """
    chosen = write_latents_triton if use_triton(query) else write_latents_reference
    chosen(query, latent, norm_weight, rotary, kv_cache, slots, rope=rope, eps=eps)


def write_latents_reference(
    query: Tensor,
    latent: Tensor,
    norm_weight: Tensor,
    rotary: tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slots: Tensor,
    *,
    rope: int,
    eps: float,
) -> None:
    query[..., -rope:] = apply_rope_interleaved(query[..., -rope:], *rotary)
    rotated = apply_rope_interleaved(latent[:, None, -rope:], *rotary)[:, 0]
    write_rows(kv_cache, slots, torch.cat((rms_norm_reference(latent[:, :-rope], norm_weight, eps), rotated), dim=-1))


def write_latents_triton(
    query: Tensor,
    latent: Tensor,
    norm_weight: Tensor,
    rotary: tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slots: Tensor,
    *,
    rope: int,
    eps: float,
) -> None:
    tokens, heads, width = query.shape
    rank = latent.shape[1] - rope
    if rope < 2 or rope & (rope - 1) or not rank > 0 or width < rope:
        raise ValueError(f"{rope} channels to rotate of latents {list(latent.shape)} and queries {list(query.shape)}")
    expect_rows("query", query, query.shape, *FLOATS)
    expect_rows("latent", latent, (tokens, rank + rope), query.dtype)
    expect("norm_weight", norm_weight, (rank,), query.dtype)
    for name, table in zip(("cos", "sin"), rotary, strict=True):
        expect(name, table, (tokens, rope // 2), torch.float32)
    expect("kv_cache", kv_cache, (*kv_cache.shape[:2], rank + rope), query.dtype)
    expect("slots", slots, (tokens,), torch.int64)
    _write_latents[(tokens, 2)](
        query,
        latent,
        norm_weight,
        *rotary,
        kv_cache,
        slots,
        heads,
        width - rope,
        query.stride(0),
        query.stride(1),
        latent.stride(0),
        rank,
        eps,
        HEADS=triton.next_power_of_2(heads),
        RANK=triton.next_power_of_2(rank),
        HALF=rope // 2,
        **pdl(query),
        num_warps=4,
    )


@triton.jit
def _write_latents(
    query,
    latent,
    norm_weight,
    cos,
    sin,
    kv_cache,
    slots,
    heads,
    nope,
    query_stride,
    head_stride,
    latent_stride,
    rank,
    eps,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, RANK)
    weight = tl.load(norm_weight + channel, mask=channel < rank, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    pair = tl.arange(0, HALF)
    c = tl.load(cos + token * HALF + pair)
    s = tl.load(sin + token * HALF + pair)
    if tl.program_id(1) == 0:
        row = kv_cache + tl.load(slots + token) * (rank + 2 * HALF)
        source = latent + token * latent_stride
        first = tl.load(source + rank + 2 * pair).to(tl.float32)
        second = tl.load(source + rank + 2 * pair + 1).to(tl.float32)
        x = tl.load(source + channel, mask=channel < rank, other=0.0)
        wide = x.to(tl.float32)
        scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / rank + eps)
        tl.store(row + channel, weight * scaled.to(x.dtype), mask=channel < rank)
        tl.store(row + rank + pair, (first * c - second * s).to(x.dtype))
        tl.store(row + rank + HALF + pair, (second * c + first * s).to(x.dtype))
    else:
        head = tl.arange(0, HEADS)[:, None]
        known = (head < heads) & (pair[None, :] < HALF)
        part = query + token * query_stride + head * head_stride + nope
        even = tl.load(part + 2 * pair[None, :], mask=known, other=0.0).to(tl.float32)
        odd = tl.load(part + 2 * pair[None, :] + 1, mask=known, other=0.0).to(tl.float32)
        # All threads of the program have read before any writes over it.
        tl.debug_barrier()
        kind = query.dtype.element_ty
        tl.store(part + pair[None, :], (even * c[None, :] - odd * s[None, :]).to(kind), mask=known)
        tl.store(part + HALF + pair[None, :], (odd * c[None, :] + even * s[None, :]).to(kind), mask=known)
