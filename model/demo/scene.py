"""What a picture shows, as data: things, prints, how they stand; and what kind of scene may be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from model.demo.architecture import CANDIDATES
from model.image import TILE_SIZE, tile_grid

Box = tuple[int, int, int, int]
Relation = Literal["", "beside", "above", "front", "inside", "row", "column"]
Tiles = Literal["single", "double", "quad"]

# Colour-shape pairs that training never shows and never mentions; evaluation asks about them.
HELD_OUT: frozenset[tuple[str, str]] = frozenset(
    {
        ("purple", "star"),
        ("orange", "hexagon"),
        ("cyan", "triangle"),
        ("brown", "ring"),
        ("pink", "square"),
        ("green", "diamond"),
        ("grey", "heart"),
        ("yellow", "cross"),
        ("blue", "arrow"),
    }
)


@dataclass(frozen=True)
class Thing:
    """A drawn thing: noun, colour (None for a pictogram), size word if it needs one, pixel box (x2, y2 outside)."""

    noun: str
    colour: str | None
    size: str
    box: Box

    @property
    def name(self) -> str:
        """What a description calls it: size, colour, noun."""
        return " ".join(word for word in (self.size, self.colour, self.noun) if word)


@dataclass(frozen=True)
class Print:
    """Printed text: its colour, pixel box, and the x of each character's edges (None when it is slanted)."""

    text: str
    colour: str
    box: Box
    edges: tuple[float, ...] | None


@dataclass(frozen=True)
class Scene:
    """A picture and all that is true of it.

    Attributes:
        image: the RGB picture.
        ids: uint8 [height, width]; 0 ground, i + 1 ``things[i]``, len(things) + j + 1 ``prints[j]``.
        things: in the order a description names them (see `order_key`).
        prints: from top to bottom.
        relation: how two things stand to each other, or three and more in a line.
    """

    image: Image.Image
    ids: npt.NDArray[np.uint8]
    ground: str
    things: tuple[Thing, ...]
    prints: tuple[Print, ...]
    relation: Relation

    @property
    def size(self) -> tuple[int, int]:
        return self.image.size


@dataclass(frozen=True)
class Request:
    """What kind of scene is wanted."""

    tiles: Tiles = "single"
    simple: bool = False  # a first lesson: few, large, square
    held_out: bool = False  # only colour-shape pairs that training never shows
    brief: bool = False  # one of two pictures of a conversation: at most two groups
    small_print: bool = False  # text that only the local tiles can read
    like: str | None = None  # a noun that shall be likely


def order_key(box: Box, size: tuple[int, int]) -> float:
    """Things are named and listed by rising key: from left to right, from top to bottom where they are in a column."""
    return (box[0] + box[2]) / 2 / size[0] + 0.3 * (box[1] + box[3]) / 2 / size[1]


def view_scale(size: tuple[int, int]) -> float:
    """Pixels of the global view a pixel of the picture."""
    return TILE_SIZE / max(size)


def local_scale(size: tuple[int, int]) -> float:
    """Pixels of the local view a pixel of the picture."""
    columns, rows = tile_grid(size, CANDIDATES, tiled=True)
    return min(columns * TILE_SIZE / size[0], rows * TILE_SIZE / size[1])
