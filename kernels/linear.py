"""Matrix products with the element-wise step after them in the same kernel, where the library has one.

    linear_gelu     y = gelu(x weight^T + bias)      gelu(z) = z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))
    add_linear_     stream += x weight^T             in place; the product is not rounded before it is added
    float32_linear  y = x weight^T                   in float32 whatever the type of x and weight

x [rows, in], weight [out, in], bias [out], stream [rows, out]. Cost: 2 * rows * in * out operations; bound by
arithmetic for the rows of a few tiles. A step of its own would read and write rows * out values once more.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch_invariant import linear, linear_triton


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[rows, out] in x's dtype. On CUDA in 16 bits cuBLAS computes the GELU, whose tanh is too coarse for float32."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def add_linear_(stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`stream` itself, with the product added."""
    return stream.addmm_(x, weight.t())


def float32_linear(x: Tensor, weight: Tensor, out: Tensor | None = None, *, batch_invariant: bool = False) -> Tensor:
    """float32 [rows, out], in `out` where given. CUDA rounds no sum to a narrower type of x; others round each.

    `batch_invariant`: as in kernels/batch_invariant.py.
    """
    if out is None:
        out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    if x.is_cuda and batch_invariant:
        return linear_triton(x, weight, out=out)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return out.copy_(linear(x, weight))
