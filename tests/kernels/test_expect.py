"""Arrays that a kernel would read beyond, or take for another type, are refused by name before it is launched."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.activation import silu_mul_triton
from kernels.batch_invariant import linear_triton
from kernels.head_linear import head_linear_triton
from kernels.latent_write import write_latents_triton
from kernels.layer_norm import layer_norm_triton
from kernels.linear_strips import linear_strips
from kernels.mha_decode import mha_decode_triton
from kernels.mla_decode import mla_decode_triton
from kernels.norm import add_rms_norm_rows_triton, add_rms_norm_triton, rms_norm_triton
from kernels.prefetch import prefetch
from kernels.rope_cache import rope_tables_triton
from kernels.router import route_triton

pytest.importorskip("triton", reason="Triton is not installed on this platform")
X = torch.zeros(3, 32)
WEIGHT = torch.zeros(32)
TABLE, LENGTHS = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
ROUTING = {"topk": 2, "scoring": "softmax", "normalize": False, "scaling_factor": 1.0}


def mla(**changes: Tensor) -> Tensor:
    arrays = {
        "query_latent": torch.zeros(3, 2, 32),
        "query_rope": torch.zeros(3, 2, 16),
        "kv_cache": torch.zeros(4, 64, 48),
        "block_table": TABLE,
        "context_lens": LENGTHS,
    }
    return mla_decode_triton(**(arrays | changes), scale=1.0)


def mha(**changes: Tensor) -> Tensor:
    arrays = {
        "query": torch.zeros(3, 2, 16),
        "kv_cache": torch.zeros(4, 64, 64),
        "block_table": TABLE,
        "context_lens": LENGTHS,
    }
    return mha_decode_triton(**(arrays | changes), scale=1.0)


def latents(rotary: Tensor | None = None, **changes: Tensor) -> None:
    arrays = {
        "query": torch.zeros(3, 2, 48),
        "latent": torch.zeros(3, 48),
        "norm_weight": WEIGHT,
        "kv_cache": torch.zeros(4, 64, 48),
        "slots": torch.zeros(3, dtype=torch.int64),
    }
    cos = torch.zeros(3, 8) if rotary is None else rotary
    write_latents_triton(**(arrays | changes), rotary=(cos, torch.zeros(3, 8)), rope=16, eps=1e-6)


CALLS: dict[str, Callable[[], object]] = {
    r"x must be rows of .* \[3, 32\]": lambda: rms_norm_triton(torch.zeros(32, 3).t(), WEIGHT, 1e-6),
    r"weight must be contiguous float32 \[32\], got float32 \[16\]": lambda: rms_norm_triton(X, WEIGHT[:16], 1e-6),
    r"x must be .*got float64": lambda: rms_norm_triton(X.double(), WEIGHT.double(), 1e-6),
    r"residual must be .*\[3, 32\], got float32 \[2, 32\]": lambda: add_rms_norm_triton(X, X[:2], WEIGHT, 1e-6),
    r"rows must be .*int64 \[2\]": lambda: add_rms_norm_rows_triton(X, X, LENGTHS[:2], WEIGHT, 1e-6),
    r"x must be .*\[3, 10\]": lambda: silu_mul_triton(torch.zeros(3, 11)),
    r"offset must be .*float32 \[32\]": lambda: layer_norm_triton(X, WEIGHT.half(), WEIGHT, WEIGHT, 1e-6),
    r"bias must be .*\[32\]": lambda: layer_norm_triton(X, WEIGHT, WEIGHT, WEIGHT[:3], 1e-6),
    r"positions must be .*int32 or int64 \[3\], got float32": lambda: rope_tables_triton(X[:, 0], WEIGHT),
    r"slots must be .*int64 \[3\], got int32": lambda: latents(slots=LENGTHS),
    r"cos must be .*\[3, 8\], got float32 \[3, 16\]": lambda: latents(rotary=torch.zeros(3, 16)),
    r"kv_cache must be .*\[4, 64, 48\], got float32 \[4, 64, 50\]": lambda: latents(kv_cache=torch.zeros(4, 64, 50)),
    r"16 channels to rotate of latents \[3, 16\]": lambda: latents(latent=torch.zeros(3, 16)),
    r"x .*\[3, 2, 16\] does not go with weight .*\[2, 32, 16\]": lambda: head_linear_triton(
        torch.zeros(3, 2, 16), torch.zeros(2, 32, 16)
    ),
    r"query_rope must be rows of float32 \[3, 2, 16\]": lambda: mla(query_rope=torch.zeros(2, 2, 16)),
    r"kv_cache must be .*float32 \[4, 64, 48\], got float16": lambda: mla(kv_cache=torch.zeros(4, 64, 48).half()),
    r"block_table must be .*\[3, 2\], got float32": lambda: mla(block_table=TABLE.float()),
    r"context_lens must be .*\[3\], got int32 \[2\]": lambda: mla(context_lens=LENGTHS[:2]),
    r"query must be .*got float64": lambda: mha(query=torch.zeros(3, 2, 16).double()),
    r"kv_cache must be .*\[4, 64, 64\], got float32 \[4, 64, 32\]": lambda: mha(kv_cache=torch.zeros(4, 64, 32)),
    r"hidden must be .*\[3, 32\], got .* strides \[64, 1\]": lambda: route_triton(
        torch.zeros(3, 64)[:, :32], torch.zeros(8, 32), None, **ROUTING
    ),  # type: ignore[arg-type]
    r"weight must be .*float32": lambda: route_triton(X, torch.zeros(8, 32).half(), None, **ROUTING),  # type: ignore[arg-type]
    r"2 of 1 experts cannot be chosen": lambda: route_triton(X, torch.zeros(1, 32), None, **ROUTING),  # type: ignore[arg-type]
    r"weight must be rows of .*\[8, 32\], got float32 \[8, 16\]": lambda: linear_triton(X, torch.zeros(8, 16)),
    r"strips serve 4 rows .* got 5 of 32": lambda: linear_strips(torch.zeros(5, 32), torch.zeros(8, 32)),
    r"strips serve .* up to 16384 numbers, got 1 of 16400": lambda: linear_strips(
        torch.zeros(1, 16400), torch.zeros(8, 16400)
    ),
    r"weight must be contiguous .*\[8, 32\], got .* strides \[1, 8\]": lambda: linear_strips(X, torch.zeros(32, 8).t()),
    r"weight must be contiguous .*\[32, 8\]": lambda: prefetch(torch.zeros(8, 32).t()),
}


@pytest.mark.parametrize("complaint", CALLS)
def test_it_is_named(complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CALLS[complaint]()
