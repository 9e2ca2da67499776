"""Attention of the vision tower: every patch of a tile sees every other.

    out[i] = sum_j softmax_j(q[i] . k[j] / sqrt(head_dim)) v[j]

Cost: 4 * tokens^2 * width operations a tile; bound by arithmetic.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def vision_attention(qkv: Tensor, heads: int) -> Tensor:
    """qkv [n, tokens, 3 * width] (queries, keys, values, each heads x head_dim) to [n, tokens, width].

    cuDNN where it serves the shape, as it is much the fastest at the tower's head width of 72; elsewhere torch chooses.
    """
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if _cudnn_serves(query) else nullcontext():
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _cudnn_serves(query: Tensor) -> bool:
    """16-bit types on CUDA from Ampere on, heads of up to 128 channels in whole units of 16 bytes."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 128
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
