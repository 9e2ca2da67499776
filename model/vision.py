"""The SigLIP vision tower: a 384x384 tile to 27x27 patch features. All blocks and the final norm; no pooling head.

The residual stream lacks the biases of the projections that are added to it: the products then add themselves, and each
norm adds the sum of the biases before it, which is the same for all patches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.layer_norm import layer_norm
from kernels.linear import add_linear_, linear_gelu
from kernels.patches import tile_patches
from kernels.vision import vision_attention
from model.config import VisionConfig

LAYER_NORM_EPS = 1e-6


class VisionTower(nn.Module):
    """uint8 tiles [n, 3, 384, 384] to features [n, patches, width] in the weights' dtype."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Parameter(torch.empty(1, config.patches_per_side**2, config.width))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.layers))
        self.norm = LayerNorm(config.width)

    def forward(self, tiles: Tensor) -> Tensor:
        return self.forward_patches(tile_patches(tiles, self.patch_size, self.pos_embed.dtype))

    def forward_patches(self, patches: Tensor) -> Tensor:
        """As `forward`, from rows of pixels already normalised (kernels/patches.py)."""
        stream = self.patch_embed(patches, self.pos_embed)
        offsets = self._bias_sums()
        for index, block in enumerate(self.blocks):
            stream = block(stream, offsets[2 * index], offsets[2 * index + 1])
        normed: Tensor = self.norm(stream.flatten(0, 1), offsets[-1])
        return normed.view_as(stream)

    def _bias_sums(self) -> Tensor:
        """float32 [2 * layers + 1, width]: the biases that the stream lacks before each norm."""
        biases: list[Tensor] = [self.patch_embed.bias]
        for block in self.blocks:
            assert isinstance(block, VisionBlock)
            biases += [block.attn.proj.bias, block.mlp.fc2.bias]
        return torch.stack(biases).cumsum(0, dtype=torch.float32)


class LayerNorm(nn.Module):
    """Norm of rows [rows, width] of a stream that lacks `offset`, float32 [width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, rows: Tensor, offset: Tensor) -> Tensor:
        return layer_norm(rows, offset, self.weight, self.bias, LAYER_NORM_EPS)


class PatchEmbed(nn.Module):
    """A convolution whose stride is its width, which is one matrix product over the patches."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.width, 3, config.patch_size, config.patch_size))
        self.bias = nn.Parameter(torch.empty(config.width))

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Rows of patches [n * patches, columns] and positions [1, patches, width] to their sum, without the bias."""
        stream = positions.repeat(len(patches) // positions.shape[1], 1, 1)
        weight = self.weight.flatten(1)
        add_linear_(stream.flatten(0, 1), patches, F.pad(weight, (0, patches.shape[1] - weight.shape[1])))
        return stream


class VisionBlock(nn.Module):
    """Pre-norm transformer block: attention among all patches, then an MLP with tanh GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.width)
        self.attn = VisionAttention(config)
        self.norm2 = LayerNorm(config.width)
        self.mlp = VisionMLP(config)

    def forward(self, stream: Tensor, before_attention: Tensor, before_mlp: Tensor) -> Tensor:
        """Adds to `stream` [n, patches, width] in place; the offsets are what it lacks before each norm."""
        rows = stream.flatten(0, 1)
        self.attn.add(rows, self.norm1(rows, before_attention).view_as(stream))
        self.mlp.add(rows, self.norm2(rows, before_mlp))
        return stream


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def add(self, stream: Tensor, normed: Tensor) -> None:
        """Adds the attention of `normed` [n, patches, width], without the last bias, to stream [n * patches, width]."""
        attended = vision_attention(self.qkv(normed), self.heads)
        add_linear_(stream, attended.flatten(0, 1), self.proj.weight)


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_width)
        self.fc2 = nn.Linear(config.mlp_width, config.width)

    def add(self, stream: Tensor, normed: Tensor) -> None:
        """Adds the MLP of `normed`, without the last bias, to `stream`, both [n * patches, width]."""
        add_linear_(stream, linear_gelu(normed, self.fc1.weight, self.fc1.bias), self.fc2.weight)
