"""Named colours as ranges.

A name stands for one or several boxes in hue-saturation-lightness space; a picture draws its colours anywhere inside
them. The boxes of different names keep a distance, so that every drawn colour has one name.
"""

from __future__ import annotations

import colorsys
import math
import random
from dataclasses import dataclass

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Range:
    """A box of colours: hue in degrees (may be negative), saturation and lightness in 0..1."""

    hue: tuple[float, float]
    saturation: tuple[float, float]
    lightness: tuple[float, float]

    def sample(self, rng: random.Random) -> Rgb:
        hue = rng.uniform(*self.hue) % 360 / 360
        red, green, blue = colorsys.hls_to_rgb(hue, rng.uniform(*self.lightness), rng.uniform(*self.saturation))
        return round(red * 255), round(green * 255), round(blue * 255)


ANY_HUE = (0.0, 360.0)

OBJECT_COLOURS: dict[str, tuple[Range, ...]] = {
    "red": (Range((-9, 6), (0.78, 1), (0.41, 0.56)), Range((-4, 4), (0.66, 0.8), (0.45, 0.54))),
    "orange": (Range((23, 38), (0.85, 1), (0.47, 0.57)),),
    "yellow": (Range((49, 61), (0.8, 1), (0.46, 0.64)),),
    "green": (Range((88, 150), (0.4, 1), (0.22, 0.52)),),
    "cyan": (Range((174, 189), (0.7, 1), (0.42, 0.6)),),
    "blue": (Range((205, 241), (0.58, 1), (0.27, 0.6)),),
    "purple": (Range((269, 292), (0.38, 1), (0.27, 0.56)), Range((292, 302), (0.6, 1), (0.22, 0.36))),
    "pink": (Range((318, 350), (0.6, 1), (0.69, 0.87)), Range((322, 340), (0.8, 1), (0.55, 0.7))),
    "brown": (Range((12, 30), (0.4, 0.8), (0.18, 0.36)), Range((-2, 12), (0.38, 0.58), (0.22, 0.37))),
    "black": (Range(ANY_HUE, (0, 0.25), (0, 0.09)),),
    "white": (Range(ANY_HUE, (0, 0.3), (0.965, 1)),),
    "grey": (Range(ANY_HUE, (0, 0.06), (0.38, 0.7)),),
}

GROUND_COLOURS: dict[str, tuple[Range, ...]] = {
    "white": (Range(ANY_HUE, (0, 0.3), (0.97, 1)),),
    "light grey": (Range(ANY_HUE, (0, 0.05), (0.77, 0.87)),),
    "grey": (Range(ANY_HUE, (0, 0.06), (0.42, 0.66)),),
    "dark grey": (Range(ANY_HUE, (0, 0.06), (0.19, 0.3)),),
    "black": (Range(ANY_HUE, (0, 0.25), (0, 0.05)),),
    "light blue": (Range((200, 226), (0.65, 1), (0.78, 0.88)),),
    "blue": (Range((207, 241), (0.58, 1), (0.38, 0.6)),),
    "dark blue": (Range((212, 234), (0.55, 1), (0.13, 0.23)),),
    "light green": (Range((95, 150), (0.45, 0.95), (0.75, 0.87)),),
    "green": (Range((92, 150), (0.4, 1), (0.31, 0.52)),),
    "dark green": (Range((100, 150), (0.5, 1), (0.11, 0.19)),),
    "light purple": (Range((268, 290), (0.6, 0.95), (0.78, 0.87)),),
    "purple": (Range((269, 292), (0.42, 0.95), (0.36, 0.56)),),
    "dark purple": (Range((274, 298), (0.5, 1), (0.13, 0.22)),),
    "pink": (Range((328, 352), (0.65, 1), (0.74, 0.86)),),
    "red": (Range((-9, 6), (0.7, 1), (0.42, 0.56)),),
    "dark red": (Range((-7, 4), (0.75, 1), (0.14, 0.23)),),
    "orange": (Range((24, 40), (0.85, 1), (0.48, 0.6)),),
    "light orange": (Range((23, 33), (0.85, 1), (0.75, 0.84)),),
    "yellow": (Range((49, 60), (0.8, 1), (0.48, 0.62)),),
    "light yellow": (Range((50, 60), (0.75, 1), (0.8, 0.9)),),
    "brown": (Range((18, 30), (0.4, 0.75), (0.24, 0.36)),),
    "cyan": (Range((174, 189), (0.7, 1), (0.42, 0.6)),),
}

GROUND_WEIGHTS: dict[str, float] = {name: 1.0 for name in GROUND_COLOURS} | {"white": 6.0, "black": 2.0}

COLOUR_SYNONYMS: dict[str, tuple[str, ...]] = {"grey": ("gray",), "purple": ("violet",), "cyan": ("turquoise",)}


def sample_object_colour(rng: random.Random, name: str) -> Rgb:
    """An RGB colour that is called ``name`` on an object."""
    return rng.choice(OBJECT_COLOURS[name]).sample(rng)


def sample_ground(rng: random.Random) -> tuple[str, Rgb]:
    """A name and an RGB colour for a background."""
    name = rng.choices(list(GROUND_WEIGHTS), list(GROUND_WEIGHTS.values()))[0]
    return name, rng.choice(GROUND_COLOURS[name]).sample(rng)


def to_lab(colour: Rgb) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of an sRGB colour of 0..255."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    red, green, blue = linear
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(first: Rgb, second: Rgb) -> float:
    """How different two colours look: Euclidean distance in L*a*b* (2 is just visible, 100 is black to white)."""
    return math.dist(to_lab(first), to_lab(second))
