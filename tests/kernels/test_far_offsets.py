"""Arrays of more than 2^31 numbers: offsets into them have 64 bits.

On a CPU that is an array of which only what is written takes memory; rows by the hundred thousand need a GPU.
"""

from collections.abc import Iterator

import pytest
import torch

from kernels.activation import silu_mul_reference, silu_mul_triton
from kernels.latent_write import write_latents_reference, write_latents_triton
from kernels.mha_decode import mha_decode_reference, mha_decode_triton
from kernels.mla_decode import mla_decode_reference, mla_decode_triton
from kernels.moe import moe_experts_reference, moe_experts_triton
from kernels.norm import rms_norm_reference, rms_norm_triton
from kernels.tiles import default_plan

pytest.importorskip("triton", reason="Triton is not installed on this platform")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAR = 2**31
GPU_BYTES = 20 << 30

needs_gpu = pytest.mark.skipif(
    DEVICE == "cpu" or torch.cuda.mem_get_info()[0] < GPU_BYTES, reason="needs a GPU with 20 GiB to spare"
)


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_pages_beyond_four_gibibytes(kind: str) -> None:
    heads, rank, rope, dim = 2, 64, 16, 64
    row = rank + rope if kind == "mla" else 2 * heads * dim
    pages = FAR // (64 * row) + 3
    kv_cache = torch.empty(pages, 64, row, dtype=torch.float16)
    used = torch.tensor([[pages - 1, pages - 3], [pages - 2, 0]], dtype=torch.int32)
    for page in used.flatten().tolist():
        kv_cache[page] = torch.randn(64, row)
    lengths = torch.tensor([100, 33], dtype=torch.int32)
    near_table = torch.arange(4, dtype=torch.int32).view(2, 2)
    near_cache = kv_cache[used.flatten().long()]
    if kind == "mla":
        latent, turned = torch.randn(2, heads, rank).half(), torch.randn(2, heads, rope).half()
        out = mla_decode_triton(latent, turned, kv_cache, used, lengths, scale=0.2)
        near(out, mla_decode_reference(latent, turned, near_cache, near_table, lengths, scale=0.2))
    else:
        query = torch.randn(2, heads, dim).half()
        out = mha_decode_triton(query, kv_cache, used, lengths, scale=0.2)
        near(out, mha_decode_reference(query, near_cache, near_table, lengths, scale=0.2))


def test_slots_beyond_four_gibibytes() -> None:
    rank, rope, tokens = 64, 16, 3
    pages = FAR // (64 * (rank + rope)) + 3
    kv_cache = torch.empty(pages, 64, rank + rope, dtype=torch.float16)
    small = torch.empty(1, 64, rank + rope, dtype=torch.float16)
    angles = torch.rand(tokens, rope // 2)
    latent, weight = torch.randn(tokens, rank + rope).half(), torch.randn(rank).half()
    slots = pages * 64 - 1 - torch.arange(tokens)
    query = torch.randn(tokens, 2, 48).half()
    rotary = (angles.cos(), angles.sin())
    write_latents_triton(query.clone(), latent, weight, rotary, kv_cache, slots, rope=rope, eps=1e-6)
    write_latents_reference(query, latent, weight, rotary, small, torch.arange(tokens), rope=rope, eps=1e-6)
    near(kv_cache.view(-1, rank + rope)[slots], small[0, :tokens])


@needs_gpu
def test_rows_beyond_four_gibibytes() -> None:
    some = torch.tensor([0, 1, -2, -1])
    for width in (2048, 2 * 10944):
        rows = torch.randn(FAR // width + 3, width, dtype=torch.bfloat16)
        if width == 2048:
            weight = torch.randn(width, dtype=torch.bfloat16)
            near(rms_norm_triton(rows, weight, 1e-6)[some], rms_norm_reference(rows[some], weight, 1e-6))
        else:
            near(silu_mul_triton(rows)[some], silu_mul_reference(rows[some]))


@needs_gpu
def test_more_pairs_of_token_and_expert_than_32_bits_reach() -> None:
    tokens, hidden, inner, experts, topk = FAR // (8 * 2048) + 5, 2048, 64, 9, 8
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    gate_up = torch.randn(experts, 2 * inner, hidden, dtype=torch.bfloat16) / 45
    down = torch.randn(experts, hidden, inner, dtype=torch.bfloat16) / 8
    ids = torch.rand(tokens, experts).topk(topk).indices
    weights = torch.rand(tokens, topk)
    out = moe_experts_triton(x, gate_up, down, ids, weights, default_plan(torch.bfloat16))
    some = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1])
    expected = moe_experts_reference(
        x[some].double(), gate_up.double(), down.double(), ids[some], weights[some].double()
    )
    assert (out[some].double() - expected).norm() < 1e-2 * expected.norm()
