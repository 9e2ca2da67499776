"""An RGB picture becomes tiles: choose a tile grid, resize, pad, cut.

A picture reaches the model as 384x384 tiles of 14x14 features each:

* the *global view*: the whole picture in one tile;
* the *local view*: the picture again, in the candidate resolution that fits it best, cut into ``columns x rows``
  tiles. An untiled picture still has a local view, of one tile.

Tiles stay uint8 here. The device turns them into the tower's input, ``(value / 255 - 0.5) / 0.5``.

Every size in this file is (width, height), and every grid is (columns, rows).
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

TILE_SIZE = 384  # pixels along a tile's side
TILE_GRID = 14  # features along a tile's side
TILE_FEATURES = TILE_GRID * TILE_GRID
NEWLINE = -1  # slot that ends a row of features
SEPARATOR = -2  # slot between the global and the local view
PAD_COLOR = (127, 127, 127)  # int(0.5 * 255): almost zero once normalised

Size = tuple[int, int]


@dataclass(frozen=True)
class TiledImage:
    """The tiles of one picture.

    Attributes:
        tiles: uint8 [1 + columns * rows, 3, 384, 384]; the global view, then the local tiles row by row.
        columns: local tiles from left to right.
        rows: local tiles from top to bottom.
        digest: sha256 of what the tiles were made from; equal digests mean equal tiles.
        size: (width, height) of the picture.
    """

    tiles: npt.NDArray[np.uint8]
    columns: int
    rows: int
    digest: bytes
    size: Size

    @property
    def num_slots(self) -> int:
        """How many prompt positions this picture takes."""
        return len(image_layout(self.columns, self.rows))


def select_best_resolution(size: Size, candidates: Sequence[Size]) -> Size:
    """The candidate that keeps most of the picture's pixels and, among those, wastes fewest of its own.

    The picture is scaled to fit inside the candidate; pixels that scaling up invents do not count. On a full tie the
    first candidate wins, so their order matters.

    Raises:
        ValueError: a side of the picture is not positive, or there is no candidate.
    """
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"a picture of {width}x{height} pixels has nothing to show")
    if not candidates:
        raise ValueError("there is no candidate resolution to choose from")

    def merit(candidate: Size) -> tuple[int, int]:
        scale = min(candidate[0] / width, candidate[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - candidate[0] * candidate[1]

    return max(candidates, key=merit)


def tile_grid(size: Size, candidates: Sequence[Size], *, tiled: bool) -> tuple[int, int]:
    """(columns, rows) of the local view of a picture of this size, without looking at its pixels.

    ``candidates`` are multiples of 384 on both sides, as every published configuration has them.
    """
    width, height = select_best_resolution(size, candidates) if tiled else (TILE_SIZE, TILE_SIZE)
    return width // TILE_SIZE, height // TILE_SIZE


@lru_cache(maxsize=256)
def image_layout(columns: int, rows: int) -> npt.NDArray[np.int32]:
    """The prompt positions of one picture, in order: the only place that knows their number and their meaning.

    Returns a read-only int32 [slots]. An entry ``n >= 0`` is feature ``n % 196`` of tile ``n // 196`` (tile 0 is the
    global view), -1 the newline that ends each row of features, -2 the separator. The global view comes first. The
    local view follows as one picture: its rows of features run across all the tiles of a tile row. In all
    ``14 * 15 + 1 + 14 * rows * (14 * columns + 1)`` slots.

    Raises:
        ValueError: the grid has no tile.
    """
    if columns < 1 or rows < 1:
        raise ValueError(f"a grid of {columns}x{rows} tiles has no tile")
    index = np.arange((1 + columns * rows) * TILE_FEATURES, dtype=np.int32)
    overview = index[:TILE_FEATURES].reshape(TILE_GRID, TILE_GRID)
    by_tile = index[TILE_FEATURES:].reshape(rows, columns, TILE_GRID, TILE_GRID)
    details = by_tile.transpose(0, 2, 1, 3).reshape(rows * TILE_GRID, columns * TILE_GRID)
    layout = np.concatenate([_end_rows(overview), np.array([SEPARATOR], dtype=np.int32), _end_rows(details)])
    layout.setflags(write=False)  # every caller gets the same cached array
    return layout


def tile_image(image: Image.Image, candidates: Sequence[Size], *, tiled: bool) -> TiledImage:
    """Cuts an RGB picture into tiles; ``tiled`` says whether its local view may have more than one.

    Raises:
        ValueError: the picture is not RGB, or has no pixels.
    """
    if image.mode != "RGB":
        raise ValueError(f"a picture must be RGB to be tiled, this one is {image.mode}")
    columns, rows = tile_grid(image.size, candidates, tiled=tiled)
    # Shrinking the whole picture takes as long as all the rest: beside it, as neither holds Python's lock.
    with ThreadPoolExecutor(1) as helper:
        shrinking = helper.submit(_fit, image, (TILE_SIZE, TILE_SIZE))
        digest = _digest(image, columns, rows)
        # With one local tile both views are made by the same steps, so it need not be made again.
        local = None if columns == rows == 1 else _fit(image, (columns * TILE_SIZE, rows * TILE_SIZE))
        tiles = np.empty((1 + columns * rows, 3, TILE_SIZE, TILE_SIZE), dtype=np.uint8)
        if local is not None:
            _cut(local, tiles[1:])
        _cut(shrinking.result(), tiles[:1])
    if local is None:
        tiles[1:] = tiles[:1]
    return TiledImage(tiles, columns, rows, digest, image.size)


def _end_rows(features: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """int32 [height, width] feature indices -> int32 [height * (width + 1)] slots."""
    return np.pad(features, ((0, 0), (0, 1)), constant_values=NEWLINE).reshape(-1)


def _fit(image: Image.Image, size: Size) -> Image.Image:
    """Resizes to fit inside ``size``, aspect kept, centred on the pad colour.

    The same numbers as Pillow's ``ImageOps.pad``, which some releases let fail on a side that rounds to zero pixels
    (thinner than about 768:1 for one tile). Nothing of such a picture is left to see: it is all padding. Pillow 13
    resizes tall pictures in another order of passes than releases before: values differ by up to 2 of 255 between them.
    """
    width, height = size
    aspect, target_aspect = image.width / image.height, width / height
    if aspect > target_aspect:
        height = round(image.height / image.width * width)
    elif aspect < target_aspect:
        width = round(image.width / image.height * height)
    canvas = Image.new("RGB", size, PAD_COLOR)
    if width and height:
        fits = image.size == (width, height)  # then `resize` would copy it
        resized = image if fits else image.resize((width, height), Image.Resampling.BICUBIC)
        canvas.paste(resized, (round((size[0] - width) * 0.5), round((size[1] - height) * 0.5)))
    return canvas


def _cut(view: Image.Image, tiles: npt.NDArray[np.uint8]) -> None:
    """A view whose sides are multiples of 384 into uint8 [tiles, 3, 384, 384], row by row."""
    rows, columns = view.height // TILE_SIZE, view.width // TILE_SIZE
    pixels = np.asarray(view, dtype=np.uint8).reshape(rows, TILE_SIZE, columns, TILE_SIZE, 3)
    tiles.reshape(rows, columns, 3, TILE_SIZE, TILE_SIZE)[:] = pixels.transpose(0, 2, 4, 1, 3)


def _digest(image: Image.Image, columns: int, rows: int) -> bytes:
    """sha256 of the picture and of the plan it is cut by.

    The sizes are part of it: pixel bytes alone are equal for a 100x400 and a 400x100 picture of one colour.
    """
    plan = f"{image.mode} {image.width}x{image.height} in {columns}x{rows} tiles of {TILE_SIZE}\n"
    digest = hashlib.sha256(plan.encode())
    digest.update(image.tobytes())
    return digest.digest()
