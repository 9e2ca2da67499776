"""Pixels to the rows of patches that the vision tower embeds, and its features to squares of neighbouring patches.

    tile_patches     rows[n, (py, px), (c, y, x)] = (tiles[n, c, py * size + y, px * size + x] / 255 - 0.5) / 0.5
    merge_patches    out[n, (Y, X), (c, dy, dx)] = features[n, (Y * ratio + dy, X * ratio + dx), c]

Pixels that fill no patch, at the right and bottom, are dropped; a square that leaves the grid is filled with zeros.
Rows of patches are padded with zeros to whole multiples of 16 bytes, which fast matrix products ask for.
Cost: every value read once and written once; bound by bandwidth.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.lang import pdl, tl, triton, use_triton


def patch_columns(size: int) -> int:
    """Columns of a row of patches of `size` pixels a side: its values, and zeros up to a multiple of 8."""
    return -(-3 * size * size // 8) * 8


def normalize_tiles(tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n, 3, height, width] to values in [-1, 1], rounded to `dtype` once."""
    return ((tiles.float() / 255 - 0.5) / 0.5).to(dtype)


def tile_patches(tiles: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """uint8 [n, 3, height, width] to [n * patches, patch_columns(size)] in `dtype`."""
    if tiles.dtype != torch.uint8 or tiles.dim() != 4 or tiles.shape[1] != 3:
        raise ValueError(f"tiles are uint8 [n, 3, height, width], not {tiles.dtype} {tuple(tiles.shape)}")
    if use_triton(tiles):
        return tile_patches_triton(tiles, size, dtype)
    return unfold_pixels(normalize_tiles(tiles, dtype), size)


def unfold_pixels(pixels: Tensor, size: int) -> Tensor:
    """Values [n, 3, height, width] to rows of patches [n * patches, patch_columns(size)]."""
    rows, columns = pixels.shape[2] // size, pixels.shape[3] // size
    grid = pixels[..., : rows * size, : columns * size].unflatten(3, (columns, size)).unflatten(2, (rows, size))
    patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
    return F.pad(patches, (0, patch_columns(size) - patches.shape[1]))


def tile_patches_triton(tiles: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    tiles = tiles.contiguous()
    count, _, height, width = tiles.shape
    patches, columns = (height // size) * (width // size), patch_columns(size)
    out = torch.empty(count * patches, columns, dtype=dtype, device=tiles.device)
    _tile_patches[(count, triton.cdiv(patches * columns, 2048))](
        tiles,
        out,
        patches * columns,
        HEIGHT=height,
        WIDTH=width,
        SIZE=size,
        COLUMNS=columns,
        BLOCK=2048,
        **pdl(tiles),
        num_warps=8,
    )
    return out


def merge_patches(features: Tensor, side: int, ratio: int) -> Tensor:
    """Features [n, side^2, width] to [n, ceil(side / ratio)^2, width * ratio^2]."""
    if features.shape[1] != side * side:
        raise ValueError(f"{features.shape[1]} patches are no square of {side} a side")
    if use_triton(features):
        return merge_patches_triton(features, side, ratio)
    return merge_patches_reference(features, side, ratio)


def merge_patches_reference(features: Tensor, side: int, ratio: int) -> Tensor:
    padding = -side % ratio
    grid = F.pad(features.unflatten(1, (side, side)), (0, 0, 0, padding, 0, padding))
    squares = grid.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio))
    rows: Tensor = squares.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
    return rows


def merge_patches_triton(features: Tensor, side: int, ratio: int) -> Tensor:
    features = features.contiguous()
    count, _, width = features.shape
    merged = triton.cdiv(side, ratio)
    columns = width * ratio**2
    out = torch.empty(count, merged * merged, columns, dtype=features.dtype, device=features.device)
    _merge_patches[(count * merged * merged, triton.cdiv(columns, 1024))](
        features, out, width, SIDE=side, MERGED=merged, RATIO=ratio, BLOCK=1024, **pdl(features), num_warps=4
    )
    return out


@triton.jit
def _tile_patches(
    tiles,
    out,
    values,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of one tile's `values` numbers."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    patch, column = value // COLUMNS, value % COLUMNS
    channel, y, x = column // (SIZE * SIZE), column // SIZE % SIZE, column % SIZE
    y += patch // (WIDTH // SIZE) * SIZE
    x += patch % (WIDTH // SIZE) * SIZE
    real = (value < values) & (channel < 3)
    pixel = tl.load(tiles + tile * (3 * HEIGHT * WIDTH) + (channel * HEIGHT + y) * WIDTH + x, mask=real, other=0)
    scaled = tl.where(real, (tl.div_rn(pixel.to(tl.float32), 255.0) - 0.5) * 2.0, 0.0)
    tl.store(out + tile * values + value, scaled.to(out.dtype.element_ty), mask=value < values)


@triton.jit
def _merge_patches(
    features,
    out,
    width,
    SIDE: tl.constexpr,
    MERGED: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of one row of the result."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    square = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel, place = column // (RATIO * RATIO), column % (RATIO * RATIO)
    y = square // MERGED % MERGED * RATIO + place // RATIO
    x = square % MERGED * RATIO + place % RATIO
    row = square // (MERGED * MERGED) * (SIDE * SIDE) + y * SIDE + x
    real = (channel < width) & (y < SIDE) & (x < SIDE)
    value = tl.load(features + row * width + channel, mask=real, other=0.0)
    tl.store(out + square * (width * RATIO * RATIO) + column, value, mask=channel < width)
