"""Tiles of a scene, and what each of their patches shows: labels for the helper losses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from model.demo.colours import GROUND_COLOURS, OBJECT_COLOURS
from model.demo.facts import scaled_box
from model.demo.scene import Scene
from model.demo.words import NOUNS
from model.image import PAD_COLOR, TILE_SIZE

PATCH = 14
PATCHES = 27
IGNORED = 255

CLASSES = ("", *NOUNS, "text")
CLASS_OF = {name: index for index, name in enumerate(CLASSES)}
COLOURS = (*OBJECT_COLOURS, *(f"{name} ground" for name in GROUND_COLOURS))
COLOUR_OF = {name: index for index, name in enumerate(COLOURS)}
CHARACTERS = 96  # printable ASCII; 0 stands for no character

TEXT_REACH = 4.5  # pixels of a tile

_CENTRES = np.arange(PATCHES) * PATCH + PATCH / 2


@dataclass(frozen=True)
class TileLabels:
    """What each of the 729 patches of a tile shows: class, colour, character, box of its owner in tile pixels.

    And, of a tile that shows the whole picture, that box as an answer gives it, in 999ths of the picture; -1 elsewhere.
    """

    classes: npt.NDArray[np.uint8]
    colours: npt.NDArray[np.uint8]
    characters: npt.NDArray[np.uint8]
    boxes: npt.NDArray[np.int16]
    answers: npt.NDArray[np.int16]


def cut(scene: Scene, columns: int, rows: int) -> tuple[list[npt.NDArray[np.uint8]], list[TileLabels]]:
    """A scene's view in so many tiles: uint8 [384, 384, 3] each, and what their patches show."""
    view = (columns * TILE_SIZE, rows * TILE_SIZE)
    pixels = np.asarray(ImageOps.pad(scene.image, view, Image.Resampling.BICUBIC, color=PAD_COLOR))
    width, height = scene.size
    fit = min(view[0] / width, view[1] / height)
    drawn = (round(width * fit), round(height * fit))
    offset = (round((view[0] - drawn[0]) * 0.5), round((view[1] - drawn[1]) * 0.5))
    scale = (drawn[0] / width, drawn[1] / height)
    tables = _tables(scene, scale, offset)
    tiles, labels = [], []
    for row in range(rows):
        for column in range(columns):
            x, y = column * TILE_SIZE, row * TILE_SIZE
            tiles.append(pixels[y : y + TILE_SIZE, x : x + TILE_SIZE])
            labels.append(_labels(scene, tables, (x, y), scale, offset, whole=columns == rows == 1))
    return tiles, labels


@dataclass(frozen=True)
class _Tables:
    """Per owner (0 is the ground): class, colour, box in view pixels and in 999ths of the picture (-1: none).

    And the texts' character edges if legible.
    """

    classes: npt.NDArray[np.uint8]
    colours: npt.NDArray[np.uint8]
    boxes: npt.NDArray[np.float64]
    answers: npt.NDArray[np.int16]
    edges: list[tuple[int, npt.NDArray[np.float64], str]]


def _tables(scene: Scene, scale: tuple[float, float], offset: tuple[int, int]) -> _Tables:
    classes = [0, *(CLASS_OF[thing.noun] for thing in scene.things), *(CLASS_OF["text"] for _ in scene.prints)]
    colours = [COLOUR_OF[f"{scene.ground} ground"]]
    colours += [IGNORED if thing.colour is None else COLOUR_OF[thing.colour] for thing in scene.things]
    colours += [COLOUR_OF[found.colour] for found in scene.prints]
    drawn = [*(found.box for found in scene.things), *(found.box for found in scene.prints)]
    boxes = np.array([(0, 0, 0, 0), *drawn], dtype=np.float64) * (scale * 2) + offset * 2
    answers = np.array([[-1] * 4, *(scaled_box(box, scene.size) for box in drawn)], dtype=np.int16)
    edges = [
        (len(scene.things) + index + 1, np.array(found.edges), found.text)
        for index, found in enumerate(scene.prints)
        if found.edges is not None and (found.box[3] - found.box[1]) * scale[1] > 8
    ]
    return _Tables(np.array(classes, dtype=np.uint8), np.array(colours, dtype=np.uint8), boxes, answers, edges)


def _labels(
    scene: Scene,
    tables: _Tables,
    corner: tuple[int, int],
    scale: tuple[float, float],
    offset: tuple[int, int],
    *,
    whole: bool,
) -> TileLabels:
    x = (_CENTRES + corner[0] - offset[0]) / scale[0]
    y = (_CENTRES + corner[1] - offset[1]) / scale[1]
    inside = ((y >= 0) & (y < scene.size[1]))[:, None] & ((x >= 0) & (x < scene.size[0]))[None, :]
    columns = x.astype(np.int64).clip(0, scene.size[0] - 1)
    owners = scene.ids[y.astype(np.int64).clip(0, scene.size[1] - 1)[:, None], columns[None, :]] * inside
    # Text is thin and often between two rows of patches: all patches at its box belong to it.
    for owner in range(len(scene.things) + 1, len(tables.boxes)):
        left, top, right, bottom = tables.boxes[owner] - (*corner, *corner)
        rows = _between(top - TEXT_REACH, bottom + TEXT_REACH)
        across = _between(left - TEXT_REACH / 2, right + TEXT_REACH / 2)
        owners = np.where(rows[:, None] & across[None, :] & (owners == 0), owner, owners)
    colours = np.where(inside, tables.colours[owners], np.uint8(IGNORED))
    boxes = (tables.boxes[owners] - (*corner, *corner)).clip(0, TILE_SIZE)
    characters = np.zeros((PATCHES, PATCHES), dtype=np.uint8)
    for owner, edges, text in tables.edges:
        codes = np.array([ord(character) - 31 for character in text], dtype=np.uint8)
        at = codes[(np.searchsorted(edges, x) - 1).clip(0, len(text) - 1)]
        characters = np.where(owners == owner, at[None, :], characters)
    return TileLabels(
        tables.classes[owners].reshape(-1),
        colours.reshape(-1),
        characters.reshape(-1),
        boxes.astype(np.int16).reshape(-1, 4),
        tables.answers[owners if whole else np.zeros_like(owners)].reshape(-1, 4),
    )


def _between(low: float, high: float) -> npt.NDArray[np.bool_]:
    """Of each row or column of patches: whether its centre lies there."""
    inside: npt.NDArray[np.bool_] = np.less(low, _CENTRES) & np.less(_CENTRES, high)
    return inside
