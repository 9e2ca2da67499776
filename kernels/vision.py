"""The vision tower's own operations: pixels to normalised values, and attention among the patches of a tile.

    value = (pixel / 255 - 0.5) / 0.5
    out[i] = sum_j softmax_j(q[i] . k[j] / sqrt(head_dim)) v[j]        every patch of a tile sees every other

Cost of attention: 4 * tokens^2 * width operations a tile; bound by arithmetic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize_tiles(tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n, 3, side, side] to values in [-1, 1], rounded to `dtype` once."""
    return ((tiles.float() / 255 - 0.5) / 0.5).to(dtype)


def vision_attention(qkv: Tensor, heads: int) -> Tensor:
    """qkv [n, tokens, 3 * width] (queries, keys, values, each heads x head_dim) to [n, tokens, width]."""
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
