"""Decode attention over pages against a plain float64 computation of one sequence at a time."""

import pytest
import torch
from torch import Tensor

from kernels.attention_backend import AttentionBackend
from kernels.mha_decode import mha_decode
from kernels.mla_decode import mla_decode
from kernels.prefill_attention import prefill_attention

PAGE_SIZE = 64
LENGTHS = [1, 2, 63, 64, 65, 128, 200, 0, 1]


def scatter(sequences: list[Tensor], row: int) -> tuple[Tensor, Tensor]:
    """The sequences' rows in pages out of order, all else NaN: (kv_cache, block_table)."""
    pages = [-(-len(rows) // PAGE_SIZE) for rows in sequences]
    order = torch.randperm(sum(pages) + 3).tolist()
    kv_cache = torch.full((sum(pages) + 3, PAGE_SIZE, row), torch.nan)
    table = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
    for index, rows in enumerate(sequences):
        for page, block in enumerate(rows.split(PAGE_SIZE) if len(rows) else ()):
            table[index, page] = order.pop()
            kv_cache[table[index, page], : len(block)] = block
    return kv_cache, table


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One head in float64: query [d], key [n, d], value [n, v]; zeros for no keys."""
    if not len(key):
        return torch.zeros(value.shape[-1], dtype=torch.float64)
    weights = (key.double() @ query.double() * scale).softmax(0)
    return weights @ value.double()


def test_mla_decode_equals_a_plain_softmax_for_any_lengths() -> None:
    torch.manual_seed(1)
    heads, rank, rope, scale = 5, 24, 8, 0.3
    sequences = [torch.randn(n, rank + rope) for n in LENGTHS]
    query = torch.randn(len(LENGTHS), heads, rank + rope)
    kv_cache, table = scatter(sequences, rank + rope)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = mla_decode(query[..., :rank], query[..., rank:], kv_cache, table, lengths, scale=scale)
    expected = torch.stack(
        [
            torch.stack([attend(q, rows, rows[:, :rank], scale) for q in qs])
            for qs, rows in zip(query, sequences, strict=True)
        ]
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_mha_decode_equals_a_plain_softmax_for_any_lengths() -> None:
    torch.manual_seed(2)
    heads, dim, scale = 3, 16, 0.25
    sequences = [torch.randn(n, 2 * heads * dim) for n in LENGTHS]
    query = torch.randn(len(LENGTHS), heads, dim)
    kv_cache, table = scatter(sequences, 2 * heads * dim)
    out = mha_decode(query, kv_cache, table, torch.tensor(LENGTHS, dtype=torch.int32), scale=scale)
    for index, rows in enumerate(sequences):
        key, value = rows.view(-1, 2, heads, dim).unbind(1)
        for head in range(heads):
            expected = attend(query[index, head], key[:, head], value[:, head], scale)
            torch.testing.assert_close(out[index, head].double(), expected, atol=1e-5, rtol=1e-5)


def running_sum(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(
    ("query_lens", "key_lens"), [([5], [5]), ([3, 1, 7], [3, 9, 20]), ([64, 64], [64, 128]), ([4, 4], [9, 9])]
)
def test_prefill_attention_is_causal_at_the_bottom_right(query_lens: list[int], key_lens: list[int]) -> None:
    torch.manual_seed(3)
    heads, qk_dim, v_dim, scale = 2, 12, 8, 0.4
    query = torch.randn(sum(query_lens), heads, qk_dim)
    key, value = torch.randn(sum(key_lens), heads, qk_dim), torch.randn(sum(key_lens), heads, v_dim)
    out = prefill_attention(
        query,
        key,
        value,
        query_lens=query_lens,
        key_lens=key_lens,
        cu_query_lens=running_sum(query_lens),
        cu_key_lens=running_sum(key_lens),
        scale=scale,
        backend=AttentionBackend.TORCH,
    )
    row = 0
    for n, (num_queries, num_keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        first = sum(key_lens[:n])
        for i in range(num_queries):
            seen = slice(first, first + num_keys - num_queries + i + 1)
            for head in range(heads):
                expected = attend(query[row, head], key[seen, head], value[seen, head], scale)
                torch.testing.assert_close(out[row, head].double(), expected, atol=1e-5, rtol=1e-5)
            row += 1


def test_prefill_attention_refuses_lengths_that_do_not_add_up() -> None:
    x = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="add up"):
        prefill_attention(
            x,
            x,
            x,
            query_lens=[3],
            key_lens=[4],
            cu_query_lens=running_sum([3]),
            cu_key_lens=running_sum([4]),
            scale=1.0,
            backend=AttentionBackend.TORCH,
        )
