"""The vision tower's own operations; the Triton kernels interpreted on a CPU, compiled where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from kernels.layer_norm import layer_norm_reference, layer_norm_triton
from kernels.linear import add_linear_, linear_gelu
from kernels.patches import (
    merge_patches,
    merge_patches_reference,
    merge_patches_triton,
    normalize_tiles,
    patch_columns,
    tile_patches,
    tile_patches_triton,
    unfold_pixels,
)
from kernels.vision import vision_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.fixture
def needs_triton() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize("width", [64, 100])
def test_layer_norm_of_rows_far_from_zero(width: int) -> None:
    x, offset = torch.randn(5, width) + 30, torch.randn(width)
    weight, bias = torch.randn(width), torch.randn(width)
    expected = F.layer_norm((x + offset).double(), (width,), weight.double(), bias.double(), 1e-6).float()
    for norm in (layer_norm_triton, layer_norm_reference):
        torch.testing.assert_close(norm(x, offset, weight, bias, 1e-6), expected, atol=3e-5, rtol=3e-5)


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize(("height", "width", "size"), [(30, 30, 14), (32, 18, 6)])
def test_patches_of_tiles_whose_sides_are_no_multiple(height: int, width: int, size: int) -> None:
    tiles = torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8)
    rows = tile_patches_triton(tiles, size, torch.float32)
    assert torch.equal(rows, unfold_pixels(normalize_tiles(tiles, torch.float32), size))
    assert rows.shape == (2 * (height // size) * (width // size), patch_columns(size))
    assert rows.shape[1] % 8 == 0 and not rows[:, 3 * size * size :].any()


def test_patches_are_those_of_a_convolution() -> None:
    pixels, weight = torch.randn(2, 3, 30, 30), torch.randn(7, 3, 14, 14)
    expected = F.conv2d(pixels, weight, stride=14).flatten(2).transpose(1, 2).flatten(0, 1)
    padded = F.pad(weight.flatten(1), (0, patch_columns(14) - 3 * 14 * 14))
    torch.testing.assert_close(unfold_pixels(pixels, 14) @ padded.t(), expected, atol=1e-4, rtol=1e-4)


def test_tiles_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        tile_patches(torch.zeros(1, 3, 28, 28), 14, torch.float32)


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize(("side", "ratio"), [(5, 2), (6, 2), (7, 3)])
def test_squares_of_patches_equal_an_unfold_of_the_padded_grid(side: int, ratio: int) -> None:
    features = torch.randn(3, side * side, 40)
    grid = F.pad(features.transpose(1, 2).unflatten(-1, (side, side)), (0, -side % ratio, 0, -side % ratio))
    expected = F.unfold(grid, kernel_size=ratio, stride=ratio).transpose(1, 2)
    assert torch.equal(merge_patches_triton(features, side, ratio), expected)
    assert torch.equal(merge_patches_reference(features, side, ratio), expected)


def test_a_number_of_patches_that_is_no_square_is_refused() -> None:
    with pytest.raises(ValueError, match="no square"):
        merge_patches(torch.zeros(1, 8, 4), 3, 2)


def test_products_that_end_in_an_activation_or_a_sum() -> None:
    x, weight, bias, stream = torch.randn(5, 24), torch.randn(16, 24), torch.randn(16), torch.randn(5, 16)
    product = x.double() @ weight.double().t()
    expected = F.gelu(product + bias, approximate="tanh").float()
    torch.testing.assert_close(linear_gelu(x, weight, bias), expected, atol=1e-4, rtol=1e-4)
    expected = (stream + product).float()
    assert add_linear_(stream, x, weight) is stream
    torch.testing.assert_close(stream, expected, atol=1e-4, rtol=1e-4)


def test_attention_sees_all_patches_of_its_own_tile() -> None:
    heads, dim = 2, 8
    qkv = torch.randn(3, 11, 3 * heads * dim)
    query, key, value = qkv.double().unflatten(-1, (3, heads, dim)).permute(2, 0, 3, 1, 4)
    expected = (query @ key.transpose(2, 3) / dim**0.5).softmax(-1) @ value
    out = vision_attention(qkv, heads)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)
