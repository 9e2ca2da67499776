"""Printed text: what is written, in which face, at which size."""

from __future__ import annotations

import random

from model.demo.draw import Lettering, letter
from model.demo.fonts import DEFAULT_FACE, TEXT_FACES, Fonts
from model.demo.scene import Request, local_scale
from model.demo.words import PRINTED_WORDS

NARROW = ("LiberationSansNarrow-Regular.ttf", "LiberationSansNarrow-Bold.ttf")
LEAST_PIXELS = 24  # of a font, in the tile that shows it largest
LEAST_NARROW_PIXELS = 32
LEAST_SLANTED_PIXELS = 34
LEAST_POINTS = 14  # in the picture itself, however much the tile enlarges it
SMALL_POINTS = 32  # below, in the tile, the letters' strokes are too thin for any colour


def random_text(rng: random.Random, longest: int) -> str:
    """Text to print: words, made-up letters, numbers; nothing whose case or characters the eye cannot tell."""
    kind = rng.random()
    made_up = kind >= 0.5
    if not made_up:
        word = rng.choice([w for w in PRINTED_WORDS if len(w) <= longest])
        if kind < 0.1 and longest >= 9:
            other = rng.choice([w for w in PRINTED_WORDS if len(w) <= longest - 1 - len(word)] or ["a"])
            word = f"{word} {other}"
    elif kind < 0.76:
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, min(longest, 7))))
    elif kind < 0.91:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, min(longest, 6))))
    else:
        return "".join(rng.choice("ABCDEFGHJKLMNPQRTUVWXYZ2346789") for _ in range(rng.randint(2, min(longest, 7))))
    style = rng.random()
    if style < 0.55:
        return word.upper()
    # In many faces a capital I looks like a small l, which only a known word tells apart; and o, s, x by themselves
    # look as their capitals do.
    if set(word) <= set("ocsuvwxzil ") or (made_up and word[0] in "il"):
        return word.upper()
    return word.capitalize() if style < 0.75 else word


def random_letterings(rng: random.Random, fonts: Fonts, request: Request, size: tuple[int, int]) -> list[Lettering]:
    """The texts of a picture, set in random faces, at sizes that the tiles show legibly."""
    chance = 1.0 if request.small_print else 0.25 if request.simple else 0.3 if request.brief else 0.42
    if rng.random() >= chance:
        return []
    letterings = []
    for _ in range(2 if request.small_print and rng.random() < 0.2 else 1):
        text = random_text(rng, 5 if request.simple else 10)
        lettering = _fit(rng, fonts, request, size, text)
        if lettering is not None:
            letterings.append(lettering)
    return letterings


def _fit(rng: random.Random, fonts: Fonts, request: Request, size: tuple[int, int], text: str) -> Lettering | None:
    """The text in a random face, as large as there is room and at least legible, cut short if need be; or None."""
    scale = local_scale(size)
    if request.simple:
        pixels = rng.uniform(48, 72)
    elif request.small_print:
        pixels = rng.uniform(LEAST_PIXELS, 32)
    else:
        pixels = LEAST_PIXELS * (4 ** rng.random())
    faces = (*TEXT_FACES, DEFAULT_FACE)
    face = rng.choice(faces if pixels >= LEAST_NARROW_PIXELS else [name for name in faces if name not in NARROW])
    least = max(LEAST_POINTS, round((LEAST_PIXELS if face not in NARROW else LEAST_NARROW_PIXELS) / scale))
    slant = rng.uniform(-8, 8) if pixels >= LEAST_SLANTED_PIXELS and not request.simple and rng.random() < 0.1 else 0.0
    points = max(least, round(pixels / scale))
    while True:
        lettering = letter(fonts, text, face, points, slant, small=points * scale < SMALL_POINTS)
        if lettering.mask.width <= 0.94 * size[0] and lettering.mask.height <= 0.5 * size[1]:
            return lettering
        if points > least:
            points = max(least, round(points * 0.88))
        elif len(text) > 2:
            text = text[: max(2, len(text) - 2)].strip()
        else:
            return None
