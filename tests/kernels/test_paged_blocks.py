"""Attention on a CPU: as the references, and to the bit the same for a token in any batch."""

import pytest
import torch
from torch import Tensor

from kernels.mha_decode import mha_decode_reference
from kernels.mla_decode import mla_decode_reference
from kernels.paged_blocks import mha_decode_blocks, mla_decode_blocks

HEADS, RANK, ROPE, DIM, PAGE = 3, 16, 8, 12, 64


def attend(kind: str, blocks: bool, query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    if kind == "mla":
        function = mla_decode_blocks if blocks else mla_decode_reference
        return function(query[..., :RANK], query[..., RANK:], cache, table, lengths, scale=0.3)
    return (mha_decode_blocks if blocks else mha_decode_reference)(query, cache, table, lengths, scale=0.3)


def make(kind: str, tokens: int, pages: int) -> tuple[Tensor, Tensor]:
    """Queries, and a cache."""
    torch.manual_seed(tokens)
    row, width = (RANK + ROPE, RANK + ROPE) if kind == "mla" else (2 * HEADS * DIM, DIM)
    return torch.randn(tokens, HEADS, width), torch.randn(pages, PAGE, row)


@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_tokens_of_several_sequences_and_of_none(kind: str) -> None:
    """A prompt, single tokens before and after it, a row without any token; unused rows are not numbers."""
    lengths = torch.tensor([5, *range(250, 263), 64, 0, 300])
    tables = torch.tensor(
        [[0, 0, 0, 0, 0]] + [[1, 2, 3, 4, 5]] * 13 + [[6, 0, 0, 0, 0], [0, 0, 0, 0, 0], [7, 8, 9, 10, 11]]
    )
    query, cache = make(kind, len(lengths), 12)
    for pages, used in (((0,), 5), ((1, 2, 3, 4, 5), 262), ((6,), 64), ((7, 8, 9, 10, 11), 300)):
        for index, page in enumerate(pages):
            cache[page, max(0, used - index * PAGE) :] = float("nan")
    out = attend(kind, True, query, cache, tables, lengths)
    torch.testing.assert_close(out, attend(kind, False, query, cache, tables, lengths), atol=1e-5, rtol=1e-5)
    assert (out[15] == 0).all()


@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_a_token_is_the_same_in_any_batch(kind: str) -> None:
    count, pages = 530, 9
    query, cache = make(kind, count, 2 * pages)
    mine, other = torch.arange(pages), torch.arange(pages, 2 * pages)
    table, lengths = mine.expand(count, -1), torch.arange(1, count + 1)
    whole = attend(kind, True, query, cache, table, lengths)
    for start, length in ((0, 1), (529, 1), (255, 2), (256, 1), (100, 300), (7, 17)):
        part = slice(start, start + length)
        alone = attend(kind, True, query[part], cache, table[part], lengths[part])
        assert torch.equal(alone, whole[part])
        beside = attend(
            kind,
            True,
            torch.cat((query[:2], query[part], query[-1:])),
            cache,
            torch.stack([other, mine.flip(0), *table[part], other.flip(0)]),
            torch.tensor([530, 3, *lengths[part], 77]),
        )
        assert torch.equal(beside[2:-1], whole[part])
