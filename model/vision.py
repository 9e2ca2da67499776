"""The SigLIP vision tower: a 384x384 tile to 27x27 patch features. All blocks and the final norm; no pooling head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.vision import normalize_tiles, vision_attention
from model.config import VisionConfig

LAYER_NORM_EPS = 1e-6


class VisionTower(nn.Module):
    """uint8 tiles [n, 3, 384, 384] to features [n, patches, width] in the weights' dtype."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Parameter(torch.empty(1, config.patches_per_side**2, config.width))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)

    def forward(self, tiles: Tensor) -> Tensor:
        pixels = normalize_tiles(tiles, self.pos_embed.dtype)
        return self.forward_pixels(pixels)

    def forward_pixels(self, pixels: Tensor) -> Tensor:
        """As `forward`, from values already normalised to [-1, 1]."""
        hidden_states = self.patch_embed(pixels) + self.pos_embed
        for block in self.blocks:
            hidden_states = block(hidden_states)
        normed: Tensor = self.norm(hidden_states)
        return normed


class PatchEmbed(nn.Module):
    """Pixels [n, 3, side, side] to patch embeddings [n, patches, width], row by row.

    A convolution whose stride is its width is one matrix product over the patches; what is left of the picture at
    the right and bottom is dropped, as the convolution does.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.width, 3, config.patch_size, config.patch_size))
        self.bias = nn.Parameter(torch.empty(config.width))
        self.side = config.patches_per_side

    def forward(self, pixels: Tensor) -> Tensor:
        size = self.weight.shape[-1]
        kept = pixels[..., : self.side * size, : self.side * size]
        grid = kept.unflatten(3, (self.side, size)).unflatten(2, (self.side, size))
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class VisionBlock(nn.Module):
    """Pre-norm transformer block: attention among all patches, then an MLP with tanh GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.attn = VisionAttention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.mlp = VisionMLP(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states))
        output: Tensor = hidden_states + self.mlp(self.norm2(hidden_states))
        return output


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self.proj(vision_attention(self.qkv(hidden_states), self.heads))
        return output


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_width)
        self.fc2 = nn.Linear(config.mlp_width, config.width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.gelu(self.fc1(hidden_states), approximate="tanh"))
        return output
