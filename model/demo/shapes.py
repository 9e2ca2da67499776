"""The geometric shapes: outlines in unit coordinates and their anti-aliased masks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SHAPES = (
    "circle",
    "square",
    "triangle",
    "rectangle",
    "oval",
    "star",
    "heart",
    "diamond",
    "pentagon",
    "hexagon",
    "cross",
    "ring",
    "arrow",
    "semicircle",
)

# How far a shape may be turned, in degrees to either side, from each of its upright positions (a list of angles).
# A square turned by 45 degrees is a diamond, so what could become another shape turns little.
_TURNS: dict[str, tuple[tuple[float, ...], float]] = {
    "circle": ((0,), 0),
    "square": ((0,), 10),
    "triangle": ((0, 0, 0, 90, 180, 270), 12),
    "rectangle": ((0, 90), 10),
    "oval": ((0, 90), 25),
    "star": ((0,), 30),
    "heart": ((0,), 18),
    "diamond": ((0,), 8),
    "pentagon": ((0, 180), 18),
    "hexagon": ((0, 30), 15),
    "cross": ((0,), 10),
    "ring": ((0,), 0),
    "arrow": ((0, 90, 180, 270), 12),
    "semicircle": ((0, 90, 180, 270), 12),
}


def _regular(corners: int, start: float = -90.0) -> np.ndarray:
    angles = np.radians(start + 360.0 / corners * np.arange(corners))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@cache
def outline(kind: str) -> np.ndarray:
    """The outline of a shape as float64 [points, 2], y downwards, of about unit radius. A ring's is its circle."""
    match kind:
        case "circle" | "ring" | "oval":
            return _regular(96)
        case "square" | "rectangle":
            return np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], dtype=np.float64)
        case "triangle":
            return np.array([(0, -1), (1, 0.8), (-1, 0.8)], dtype=np.float64)
        case "star":
            points = np.repeat(_regular(5), 2, axis=0)
            points[1::2] = _regular(5, -54.0) * 0.42
            return points
        case "heart":
            t = np.linspace(0, 2 * math.pi, 72, endpoint=False)
            x = 16 * np.sin(t) ** 3
            y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
            return np.stack([x, y + 2.5], axis=1) / 16
        case "diamond":
            return np.array([(0, -1), (0.72, 0), (0, 1), (-0.72, 0)], dtype=np.float64)
        case "pentagon":
            return _regular(5)
        case "hexagon":
            return _regular(6)
        case "cross":
            a = 0.34
            return np.array(
                [
                    (-a, -1),
                    (a, -1),
                    (a, -a),
                    (1, -a),
                    (1, a),
                    (a, a),
                    (a, 1),
                    (-a, 1),
                    (-a, a),
                    (-1, a),
                    (-1, -a),
                    (-a, -a),
                ]
            )
        case "arrow":
            return np.array([(-1, -0.26), (0.1, -0.26), (0.1, -0.7), (1, 0), (0.1, 0.7), (0.1, 0.26), (-1, 0.26)])
        case "semicircle":
            angles = np.linspace(math.pi, 2 * math.pi, 49)
            return np.stack([np.cos(angles), np.sin(angles) + 0.5], axis=1)
    raise ValueError(f"no shape is called {kind!r}")


@dataclass(frozen=True)
class ShapeForm:
    """How a shape is drawn: stretch of its width and height, turn in degrees, hole of a ring, smooth or jagged."""

    kind: str
    stretch: tuple[float, float]
    turn: float
    hole: float
    smooth: bool
    border: int  # width in pixels of a border in another colour, 0 for none


def random_form(rng: random.Random, kind: str) -> ShapeForm:
    """A random way to draw a shape that nobody would call another one."""
    stretch = (1.0, 1.0)
    if kind == "rectangle":
        stretch = (1.0, rng.uniform(0.36, 0.66))
    elif kind == "oval":
        stretch = (1.0, rng.uniform(0.42, 0.7))
    elif kind == "triangle":
        stretch = (1.0, rng.uniform(0.85, 1.2))
    elif kind == "arrow":
        stretch = (1.0, rng.uniform(0.7, 1.0))
    elif kind == "diamond":
        stretch = (rng.uniform(0.9, 1.25), 1.0)
    uprights, most = _TURNS[kind]
    turn = rng.choice(uprights)
    if most and rng.random() < 0.4:
        turn += rng.uniform(-most, most)
    border = rng.randint(1, 3) if rng.random() < 0.12 and kind != "ring" else 0
    return ShapeForm(kind, stretch, turn, rng.uniform(0.45, 0.72), rng.random() < 0.8, border)


def _points(form: ShapeForm, size: float) -> np.ndarray:
    points = outline(form.kind) * np.array(form.stretch)
    angle = math.radians(form.turn)
    cos, sin = math.cos(angle), math.sin(angle)
    points = points @ np.array([[cos, sin], [-sin, cos]])
    points = points - points.min(axis=0)
    scaled: np.ndarray = points * (size / points.max())
    return scaled


def shape_extent(form: ShapeForm, size: float) -> tuple[int, int]:
    """Width and height in whole pixels of the shape whose longer side is ``size`` pixels."""
    extent = _points(form, size).max(axis=0)
    return max(2, math.ceil(extent[0])), max(2, math.ceil(extent[1]))


def shape_mask(form: ShapeForm, size: float) -> Image.Image:
    """The coverage of a shape, mode ``L``, whose longer side is ``size`` pixels."""
    points = _points(form, size)
    width, height = shape_extent(form, size)
    scale = 1 if not form.smooth else 4 if size < 70 else 3 if size < 140 else 2
    mask = Image.new("L", (width * scale, height * scale), 0)
    draw = ImageDraw.Draw(mask)
    draw.polygon([(x, y) for x, y in (points * scale).tolist()], fill=255)
    if form.kind == "ring":
        middle = points.max(axis=0) / 2
        inner = middle + (points - middle) * form.hole
        draw.polygon([(x, y) for x, y in (inner * scale).tolist()], fill=0)
    return mask.reduce(scale) if scale > 1 else mask


def inner_mask(mask: Image.Image, border: int) -> Image.Image:
    """The mask without a border of that many pixels."""
    return mask.filter(ImageFilter.MinFilter(2 * border + 1))
