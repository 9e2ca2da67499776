"""Drawing: masks and bitmaps onto a ground, with the pixels' owners and boxes kept."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from model.demo.colours import Rgb
from model.demo.fonts import Fonts, Pictogram
from model.demo.shapes import ShapeForm, inner_mask, shape_mask

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Drawable:
    """Something to paste: a mask (mode L) with a colour or a bitmap, and perhaps a filling over it."""

    mask: Image.Image
    paint: Image.Image | Rgb
    filling: tuple[Image.Image, Rgb] | None = None


@dataclass(frozen=True)
class Lettering:
    """Text as a mask, with the x of its characters' edges (one more than characters; None when slanted).

    ``small``: its strokes are too thin to show any but the plainest colours.
    """

    text: str
    mask: Image.Image
    edges: tuple[float, ...] | None
    small: bool = False

    def edges_at(self, x: int) -> tuple[float, ...] | None:
        """The edges when the mask's left side stands at ``x``."""
        return None if self.edges is None else tuple(edge + x for edge in self.edges)


def shape_drawable(form: ShapeForm, size: float, colour: Rgb, edge: Rgb | None) -> Drawable:
    """A shape whose longer side is ``size`` pixels, with a border in ``edge`` where its form asks for one."""
    mask = shape_mask(form, size)
    if edge is None or not form.border or size < 40:
        return Drawable(mask, colour)
    return Drawable(mask, edge, (inner_mask(mask, form.border), colour))


def pictogram_drawable(pictogram: Pictogram, size: float, *, flip: bool) -> Drawable:
    """A pictogram whose longer side is ``size`` pixels, mirrored if ``flip``."""
    bitmap = pictogram.bitmap
    scale = size / max(bitmap.size)
    bitmap = bitmap.resize(
        (max(2, round(bitmap.width * scale)), max(2, round(bitmap.height * scale))),
        Image.Resampling.BICUBIC,
    )
    if flip:
        bitmap = bitmap.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return Drawable(bitmap.getchannel("A"), bitmap.convert("RGB"))


def letter(fonts: Fonts, text: str, face: str, points: int, slant: float, *, small: bool = False) -> Lettering:
    """Text set in a face at a size in pixels, turned by ``slant`` degrees; the mask is cropped to the ink."""
    font = fonts.text(face, points)
    left, top, right, bottom = (int(value) for value in font.getbbox(text))
    mask = Image.new("L", (max(1, right - left) + 2, max(1, bottom - top) + 2), 0)
    ImageDraw.Draw(mask).text((1 - left, 1 - top), text, font=font, fill=255)
    if slant:
        mask = mask.rotate(slant, Image.Resampling.BICUBIC, expand=True)
    box = mask.getbbox() or (0, 0, *mask.size)
    edges = None
    if not slant:
        advances = [font.getlength(text[:count]) for count in range(len(text) + 1)]
        edges = tuple(advance + 1 - left - box[0] for advance in advances)
    return Lettering(text, mask.crop(box), edges, small)


@lru_cache(maxsize=8)
def _ramp(size: tuple[int, int], angle: int) -> npt.NDArray[np.float32]:
    """float32 [height, width, 1] rising from -1 to 1 in one of four directions."""
    width, height = size
    x = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    field = {0: x + 0 * y, 1: y + 0 * x, 2: (x + y) / 2, 3: (x - y) / 2}[angle]
    return np.ascontiguousarray(field[:, :, None])


def draw_all(
    rng: random.Random,
    size: tuple[int, int],
    ground: Rgb,
    things: list[tuple[Drawable, tuple[int, int]]],
    texts: list[tuple[Lettering, Rgb, tuple[int, int]]],
) -> tuple[Image.Image, npt.NDArray[np.uint8], list[Box], list[Box]]:
    """The picture, its id map, and the boxes of things and texts as drawn.

    Things are drawn from last to first, so that the first lies on top. A box spans the pixels that are at least half
    covered, whether or not something lies over them. Ids: see `model.demo.scenes.Scene`.
    """
    image = Image.new("RGB", size, ground)
    if rng.random() < 0.12:
        strength = rng.uniform(3, 9)
        shaded = np.asarray(image, dtype=np.float32) + strength * _ramp(size, rng.randint(0, 3))
        image = Image.fromarray(shaded.clip(0, 255).astype(np.uint8))
    ids = np.zeros((size[1], size[0]), dtype=np.uint8)
    boxes: list[Box] = []
    for index in reversed(range(len(things))):
        drawable, corner = things[index]
        image.paste(drawable.paint, corner, drawable.mask)
        if drawable.filling is not None:
            inner, colour = drawable.filling
            image.paste(colour, corner, inner)
        boxes.append(_own(ids, drawable.mask, corner, index + 1, 128))
    text_boxes = []
    for index, (lettering, ink, corner) in enumerate(texts):
        image.paste(ink, corner, lettering.mask)
        text_boxes.append(_own(ids, lettering.mask, corner, len(things) + index + 1, 96))
    return image, ids, boxes[::-1], text_boxes


def _own(ids: npt.NDArray[np.uint8], mask: Image.Image, corner: tuple[int, int], owner: int, level: int) -> Box:
    """Marks a mask's pixels in the id map and returns their box."""
    x, y = corner
    solid = np.asarray(mask) >= level
    region = ids[y : y + solid.shape[0], x : x + solid.shape[1]]
    region[solid] = owner
    columns, rows = np.flatnonzero(solid.any(axis=0)), np.flatnonzero(solid.any(axis=1))
    if not len(columns):
        return x, y, x + mask.width, y + mask.height
    return x + int(columns[0]), y + int(rows[0]), x + int(columns[-1]) + 1, y + int(rows[-1]) + 1
