"""Causal attention of ragged prefill chunks: N sequences laid end to end, of any lengths.

Sequence n has q_n new tokens and k_n >= q_n tokens in all; new token i sees the first k_n - q_n + i + 1
of them (causal, aligned at the bottom right):

    out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j]

query [T, heads, qk_dim], value [S, heads, v_dim] with T = sum q_n, S = sum k_n. Keys are [S, heads, qk_dim], or in two
parts: key [S, heads, qk_dim - rope_dim] and key_rope [S, rope_dim], which all heads share. MLA prefill has 128 + 64
and v_dim 128, multi-head attention 128 and 128.
Cost: 2 * heads * (qk_dim + v_dim) operations per pair (i, j) that is seen; bound by arithmetic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_backend import AttentionBackend, flash_function
from kernels.prefill_triton import prefill_triton


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_rope: Tensor | None = None,
    *,
    query_lens: list[int] | None,
    key_lens: list[int] | None,
    cu_query_lens: Tensor,
    cu_key_lens: Tensor,
    scale: float,
    backend: AttentionBackend,
    out: Tensor | None = None,
) -> Tensor:
    """[T, heads, v_dim] in query's dtype; shapes as in this file's head, cu_*: int32 [N + 1], running sums from 0.

    `out` (contiguous) takes the result, if given. Without query_lens and key_lens, lengths are what cu_* say on the
    device: chunks may be empty, and rows before the first and behind the last are nobody's, left as they are in `out`,
    which must be given. So a captured graph serves any lengths, by Triton; others wait for the device. Raises
    ValueError if the lengths do not add up to the rows.
    """
    if query_lens is None or key_lens is None:
        if out is None:
            raise ValueError("lengths on the device alone need somewhere for the result to go")
    elif len(query) != sum(query_lens) or not len(key) == len(value) == sum(key_lens):
        raise ValueError(
            f"{len(query)} queries and {len(key)} keys for lengths that add up to {sum(query_lens)} and {sum(key_lens)}"
        )
    if backend is AttentionBackend.TRITON:
        return prefill_triton(
            query,
            key,
            value,
            key_rope,
            query_lens=query_lens,
            cu_query_lens=cu_query_lens,
            cu_key_lens=cu_key_lens,
            scale=scale,
            out=out,
        )
    if query_lens is None or key_lens is None:
        assert out is not None
        (first, *_, last), (first_key, *_, last_key) = cu_query_lens.tolist(), cu_key_lens.tolist()
        if first < last:
            prefill_attention(
                query[first:last],
                key[first_key:last_key],
                value[first_key:last_key],
                None if key_rope is None else key_rope[first_key:last_key],
                query_lens=cu_query_lens.diff().tolist(),
                key_lens=cu_key_lens.diff().tolist(),
                cu_query_lens=cu_query_lens - first,
                cu_key_lens=cu_key_lens - first_key,
                scale=scale,
                backend=backend,
                out=out[first:last],
            )
        return out
    if key_rope is not None:
        key = torch.cat((key, key_rope[:, None].expand(-1, key.shape[1], -1)), dim=-1)
    if backend is AttentionBackend.TORCH:
        attended = prefill_attention_reference(query, key, value, query_lens=query_lens, key_lens=key_lens, scale=scale)
        return attended if out is None else out.copy_(attended)
    width = value.shape[-1]
    if backend is AttentionBackend.FLASH_2 and width < key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - width))
    result = flash_function(backend)(
        query,
        key,
        value,
        cu_seqlens_q=cu_query_lens,
        cu_seqlens_k=cu_key_lens,
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(key_lens),
        softmax_scale=scale,
        causal=True,
    )
    # The fourth version returns the logarithms of the sums, too.
    attended = (result[0] if isinstance(result, tuple) else result)[..., :width]
    return attended if out is None else out.copy_(attended)


def prefill_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, *, query_lens: list[int], key_lens: list[int], scale: float
) -> Tensor:
    """Through scaled_dot_product_attention: a batch of equal lengths at once (by cuDNN, on a GPU that has it)."""
    if len(set(query_lens)) == len(set(key_lens)) == 1:
        queries, keys, values = (
            tensor.unflatten(0, (len(query_lens), -1)).transpose(1, 2) for tensor in (query, key, value)
        )
        return _attend(queries, keys, values, scale).transpose(1, 2).flatten(0, 1)
    outputs = []
    split = query.split(query_lens), key.split(key_lens), value.split(key_lens)
    for q, k, v in zip(*split, strict=True):
        if not len(q):
            continue
        out = _attend(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query [N, heads, q, qk_dim], key and value [N, heads, k, ...], to [N, heads, q, v_dim]."""
    queries, keys = query.shape[2], key.shape[2]
    whole = queries == keys
    mask = None if whole else _bottom_right_mask(queries, keys, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, scale=scale)


def _bottom_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
