"""Causal attention of ragged prefill chunks: N sequences laid end to end, of any lengths.

Sequence n has q_n new tokens and k_n >= q_n tokens in all; new token i sees the first k_n - q_n + i + 1
of them (causal, aligned at the bottom right):

    out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j]

query [T, heads, qk_dim], key [S, heads, qk_dim], value [S, heads, v_dim] with T = sum q_n, S = sum k_n;
MLA prefill has qk_dim 192 and v_dim 128, multi-head attention 128 and 128.
Cost: 2 * heads * (qk_dim + v_dim) operations per pair (i, j) that is seen; bound by arithmetic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from flash_attn.cute.interface import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_lens: list[int],
    key_lens: list[int],
    cu_query_lens: Tensor,
    cu_key_lens: Tensor,
    scale: float,
) -> Tensor:
    """[T, heads, v_dim] in query's dtype; shapes as in this file's head.

    Raises ValueError if the lengths do not add up to the rows.
    """
    if len(query) != sum(query_lens) or not len(key) == len(value) == sum(key_lens):
        raise ValueError(
            f"{len(query)} queries and {len(key)} keys for lengths that add up to {sum(query_lens)} and {sum(key_lens)}"
        )
    if flash_attn_varlen_func is None or not _fits_flash(query):
        return prefill_attention_reference(query, key, value, query_lens=query_lens, key_lens=key_lens, scale=scale)
    out: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=cu_query_lens,
        cu_seqlens_k=cu_key_lens,
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(key_lens),
        softmax_scale=scale,
        causal=True,
    )[0]
    return out


def _fits_flash(query: Tensor) -> bool:
    """flash_attn.cute serves 16-bit numbers on Hopper and newer."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device)[0] >= 9
    )


def prefill_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, *, query_lens: list[int], key_lens: list[int], scale: float
) -> Tensor:
    outputs = []
    queries, keys, values = query.split(query_lens), key.split(key_lens), value.split(key_lens)
    for q, k, v in zip(queries, keys, values, strict=True):
        whole = len(q) == len(k)
        mask = None if whole else _bottom_right_mask(len(q), len(k), q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=whole,
            scale=scale,
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _bottom_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
