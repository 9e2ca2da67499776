"""Cases of the vision tower's pieces, one block's each."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.measure import Case, Work, relative_error
from kernels.bench.setups import Setup
from kernels.layer_norm import layer_norm
from kernels.linear import add_linear_, linear_gelu
from kernels.patches import (
    merge_patches,
    merge_patches_reference,
    normalize_tiles,
    patch_columns,
    tile_patches,
    unfold_pixels,
)
from kernels.vision import vision_attention


def cases(setup: Setup) -> Iterator[Case]:
    pieces = {
        "tile_patches": patches,
        "layer_norm": norm,
        "vision_attention": attention,
        "linear_gelu": gelu,
        "add_linear": down,
        "merge_patches": merge,
    }
    for name, prepare in pieces.items():
        for tiles in setup.sizes.tiles:
            yield Case(name, f"{tiles} tiles", partial(prepare, setup, tiles), setup.tolerance)


def patches(setup: Setup, tiles: int) -> Work:
    tower = setup.tower
    pixels = torch.randint(0, 256, (tiles, 3, tower.pixels, tower.pixels), dtype=torch.uint8)
    call = partial(tile_patches, pixels, tower.patch, setup.dtype)

    def error() -> float:
        return relative_error(call(), unfold_pixels(normalize_tiles(pixels.double(), torch.float64), tower.patch))

    rows = tiles * (tower.pixels // tower.patch) ** 2
    return Work([call], error, pixels.nbytes + rows * patch_columns(tower.patch) * setup.dtype.itemsize)


def norm(setup: Setup, tiles: int) -> Work:
    x, offset = _rows(setup, tiles), torch.randn(setup.tower.width)
    weight, bias = setup.random(setup.tower.width), setup.random(setup.tower.width)
    call = partial(layer_norm, x, offset, weight, bias, 1e-6)

    def error() -> float:
        wide = x.double() + offset.double()
        return relative_error(call(), F.layer_norm(wide, wide.shape[1:], weight.double(), bias.double(), 1e-6))

    return Work([call], error, 2 * x.nbytes)


def attention(setup: Setup, tiles: int) -> Work:
    tower, tokens = setup.tower, setup.tower.side**2
    qkv = setup.random(tiles, tokens, 3 * tower.width)
    call = partial(vision_attention, qkv, tower.heads)

    def error() -> float:
        """Of the last tile, two heads at a time for the reference's sake."""
        wide = qkv[-1].double().unflatten(-1, (3, tower.heads, -1)).permute(1, 2, 0, 3)[:, [0, tower.heads - 1]]
        query, key, value = wide
        weights = (query @ key.transpose(1, 2) * (tower.width // tower.heads) ** -0.5).softmax(-1)
        out = call()[-1].unflatten(-1, (tower.heads, -1)).transpose(0, 1)[[0, tower.heads - 1]]
        return relative_error(out, weights @ value)

    return Work([call], error, qkv.nbytes * 4 // 3, 4.0 * tiles * tokens**2 * tower.width)


def gelu(setup: Setup, tiles: int) -> Work:
    tower, x = setup.tower, _rows(setup, tiles)
    weight, bias = setup.random(tower.inner, tower.width, std=0.02), setup.random(tower.inner)
    call = partial(linear_gelu, x, weight, bias)

    def error() -> float:
        some = setup.compared(len(x))
        z = F.linear(x[some].double(), weight.double(), bias.double())
        return relative_error(call()[some], F.gelu(z, approximate="tanh"))

    moved = x.nbytes + weight.nbytes + len(x) * tower.inner * setup.dtype.itemsize
    return Work([call], error, moved, 2.0 * len(x) * weight.numel())


def down(setup: Setup, tiles: int) -> Work:
    """The MLP's second product, added to the stream."""
    tower, stream = setup.tower, _rows(setup, tiles)
    x, weight = setup.random(len(stream), tower.inner), setup.random(tower.width, tower.inner, std=0.02)

    def error() -> float:
        some = setup.compared(len(x))
        expected = stream[some].double() + x[some].double() @ weight.double().t()
        return relative_error(add_linear_(stream.clone(), x, weight)[some], expected)

    # The stream would grow beyond all numbers: what is timed adds little.
    small = weight * 1e-6
    moved = 2 * stream.nbytes + x.nbytes + weight.nbytes
    return Work([partial(add_linear_, stream.clone(), x, small)], error, moved, 2.0 * len(x) * weight.numel())


def merge(setup: Setup, tiles: int) -> Work:
    features = _rows(setup, tiles).unflatten(0, (tiles, -1))
    call = partial(merge_patches, features, setup.tower.side, 2)

    def error() -> float:
        return relative_error(call(), merge_patches_reference(features, setup.tower.side, 2))

    return Work([call], error, 2 * features.nbytes)


def _rows(setup: Setup, tiles: int) -> Tensor:
    """[patches of all tiles, width]"""
    return setup.random(tiles * setup.tower.side**2, setup.tower.width)
