"""Tiles and slots of a picture against the reference's, bit for bit."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from model.config import load_config
from model.image import TILE_FEATURES, image_layout, select_best_resolution, tile_grid, tile_image

GOLDENS = Path(__file__).parents[1] / "goldens"
UNITS = json.loads((GOLDENS / "units" / "units.json").read_text(encoding="utf-8"))
CANDIDATES = load_config(GOLDENS / "mha" / "checkpoint").candidate_resolutions


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def counted_on(grids: list[list[int]]) -> list[int]:
    """The layouts of several pictures with their features counted on, as the goldens have them."""
    slots: list[int] = []
    first = 0
    for columns, rows in grids:
        slots += [slot + first if slot >= 0 else slot for slot in image_layout(columns, rows).tolist()]
        first += (1 + columns * rows) * TILE_FEATURES
    return slots


@pytest.mark.parametrize("golden", UNITS["layout"], ids=lambda golden: str(golden["tiles_wh"]))
def test_layout_is_the_references(golden: dict[str, Any]) -> None:
    assert [len(image_layout(*grid)) for grid in golden["tiles_wh"]] == golden["num_tokens"]
    slots = counted_on(golden["tiles_wh"])
    if golden["sequence"] is not None:
        assert slots == golden["sequence"]
    assert slots[-20:] == golden["last_20"]


@given(columns=st.integers(1, 9), rows=st.integers(1, 9))
def test_layout_counts_and_uses_every_feature_once(columns: int, rows: int) -> None:
    layout = image_layout(columns, rows)
    assert layout.dtype == np.int32
    assert len(layout) == 210 + 1 + 14 * rows * (14 * columns + 1)
    assert sorted(layout[layout >= 0]) == list(range((1 + columns * rows) * TILE_FEATURES))
    assert (layout == -1).sum() == 14 + 14 * rows
    assert np.flatnonzero(layout == -2).tolist() == [210]


def test_layout_is_shared_and_read_only() -> None:
    assert image_layout(2, 3) is image_layout(2, 3)
    with pytest.raises(ValueError, match="read-only"):
        image_layout(2, 3)[0] = 7


@pytest.mark.parametrize("grid", [(0, 1), (1, 0), (-1, 2)])
def test_layout_refuses_a_grid_without_tiles(grid: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no tile"):
        image_layout(*grid)


@pytest.mark.parametrize("golden", UNITS["best_resolution"], ids=lambda golden: str(golden["size"]))
def test_best_resolution_is_the_references(golden: dict[str, Any]) -> None:
    size = tuple(golden["size"])
    assert list(select_best_resolution(size, CANDIDATES)) == golden["best"]
    assert list(tile_grid(size, CANDIDATES, tiled=True)) == golden["tiles_wh"]
    assert len(image_layout(*tile_grid(size, CANDIDATES, tiled=True))) == golden["num_image_tokens"]
    assert len(image_layout(*tile_grid(size, CANDIDATES, tiled=False))) == golden["num_image_tokens_untiled"]


def test_on_a_tie_the_first_candidate_wins() -> None:
    assert select_best_resolution((500, 500), [(768, 384), (384, 768)]) == (768, 384)
    assert select_best_resolution((500, 500), [(384, 768), (768, 384)]) == (384, 768)


@given(width=st.integers(1, 200_000), height=st.integers(1, 200_000))
def test_every_size_has_a_grid_among_the_candidates(width: int, height: int) -> None:
    columns, rows = tile_grid((width, height), CANDIDATES, tiled=True)
    assert (columns * 384, rows * 384) in CANDIDATES


@pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "untiled"])
@pytest.mark.parametrize("golden", UNITS["preprocess"], ids=lambda golden: golden["file"])
def test_tiles_are_the_references(golden: dict[str, Any], tiled: bool) -> None:
    with Image.open(GOLDENS / "images" / golden["file"]) as file:
        image = file.convert("RGB")
    if sha256(image.tobytes()) != golden["rgb_sha256"]:
        assert not golden["file"].endswith(".png")
        pytest.skip("this Pillow decodes the file to other pixels than the one that made the goldens")
    if image.height > image.width and int(PIL.__version__.split(".")[0]) < 13:
        pytest.skip("before Pillow 13 the horizontal pass of a resize came first always: up to 2 levels of difference")
    expected = golden["tiled" if tiled else "untiled"]
    result = tile_image(image, CANDIDATES, tiled=tiled)
    assert [result.columns, result.rows] == expected["tiles_wh"]
    assert result.num_slots == expected["num_image_tokens"]
    assert list(result.tiles.shape) == expected["shape"]
    assert result.tiles.dtype == np.uint8
    assert [sha256(tile.tobytes()) for tile in result.tiles] == [t["sha256_uint8"] for t in expected["per_tile"]]
    assert sha256(result.tiles.tobytes()) == expected["sha256_uint8"]
    normalised = (result.tiles.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    assert sha256(normalised.tobytes()) == expected["sha256_float32"]


@pytest.mark.parametrize("size", [(10_000, 1), (1, 10_000), (2_000, 1), (1, 100_000)])
@pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "untiled"])
def test_a_side_that_rounds_to_nothing_leaves_padding(size: tuple[int, int], tiled: bool) -> None:
    result = tile_image(Image.new("RGB", size, "red"), CANDIDATES, tiled=tiled)
    assert (result.tiles[0] == 127).all()
    assert len(result.tiles) == 1 + result.columns * result.rows


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_only_rgb_is_tiled(mode: str) -> None:
    with pytest.raises(ValueError, match=mode):
        tile_image(Image.new(mode, (10, 10)), CANDIDATES, tiled=True)


def test_no_pixels_and_no_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="0x5"):
        select_best_resolution((0, 5), CANDIDATES)
    with pytest.raises(ValueError, match="no candidate"):
        select_best_resolution((5, 5), [])


def test_digest_tells_apart_what_pixel_bytes_do_not() -> None:
    wide, tall = Image.new("RGB", (400, 100), "red"), Image.new("RGB", (100, 400), "red")
    assert wide.tobytes() == tall.tobytes()
    digests = {tile_image(image, CANDIDATES, tiled=tiled).digest for image in (wide, tall) for tiled in (True, False)}
    assert len(digests) == 4
    assert all(len(digest) == 32 for digest in digests)


def test_digest_is_a_function_of_the_picture() -> None:
    image = Image.new("RGB", (64, 64), "red")
    same = tile_image(image.copy(), CANDIDATES, tiled=True).digest
    assert tile_image(image, CANDIDATES, tiled=True).digest == same
    image.putpixel((63, 63), (254, 0, 0))
    assert tile_image(image, CANDIDATES, tiled=True).digest != same
