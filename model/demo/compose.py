"""Composition: which things a picture shows, how many, how large, and in which relation."""

from __future__ import annotations

import random
from dataclasses import dataclass

from model.demo.colours import OBJECT_COLOURS
from model.demo.scene import HELD_OUT, Relation, Request, view_scale
from model.demo.shapes import SHAPES
from model.demo.words import PICTOGRAMS

LEAST_SIZE = 36  # a thing's longer side, in pixels of the global view
LEAST_TILED_SIZE = 30  # where local tiles show it larger


@dataclass(frozen=True)
class Wish:
    """A thing to be: noun, colour, longer side in pixels of the picture, size word."""

    noun: str
    colour: str | None
    size: float
    word: str = ""


@dataclass(frozen=True)
class Plan:
    wishes: tuple[Wish, ...]
    relation: Relation


def compose(rng: random.Random, request: Request, size: tuple[int, int], *, has_text: bool) -> Plan:
    """Which things a picture shows, how large, and in which relation."""
    unit = min(size)
    floor = (LEAST_SIZE if request.tiles == "single" else LEAST_TILED_SIZE) / view_scale(size)
    if has_text and rng.random() < (0.25 if not request.small_print else 0.35):
        return Plan((), "")
    if not has_text and not request.simple and rng.random() < 0.012:
        return Plan((), "")
    kinds = {"one": 16.0, "two": 26, "count": 14, "groups": 12, "line": 8, "scatter": 6, "front": 4, "inside": 4}
    if request.simple:
        kinds = {"one": 4, "two": 4, "count": 2}
    elif request.brief:
        kinds = {"one": 5, "two": 3, "count": 3}
    elif has_text:
        kinds = {"one": 5, "two": 5, "count": 2, "groups": 1, "line": 1, "scatter": 1}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]

    def pick(count: int) -> list[tuple[str, str | None]]:
        """Different kinds of things."""
        found: list[tuple[str, str | None]] = []
        while len(found) < count:
            found += [noun for noun in [random_noun(rng, request)] if noun not in found]
        return found

    def side(low: float, high: float) -> float:
        """A longer side between two shares of the picture's shorter side; small ones are as frequent as large ones."""
        least = max(low * unit, floor)
        return float(least * max(high * unit / least, 1.0) ** rng.random())

    if kind == "one":
        noun, colour = pick(1)[0]
        return Plan((Wish(noun, colour, side(0.14, 0.8)),), "")
    if kind == "two":
        relation: Relation = rng.choice(("beside", "above"))
        if not request.simple and rng.random() < 0.1:
            noun, colour = pick(1)[0]
            small = side(0.1, 0.22)
            wishes = [Wish(noun, colour, small * rng.uniform(1.9, 2.4), "large"), Wish(noun, colour, small, "small")]
            rng.shuffle(wishes)
            return Plan(tuple(wishes), relation)
        return Plan(tuple(Wish(noun, colour, side(0.12, 0.45)) for noun, colour in pick(2)), relation)
    if kind == "count":
        noun, colour = pick(1)[0]
        count = rng.randint(2, 4) if request.simple or request.brief else rng.choice((2, 2, 3, 3, 4, 4, 5, 6, 7, 8))
        common = side(0.09, 0.62 / count**0.6)
        vary = rng.choice((0.0, 0.0, 0.15))
        wishes = [Wish(noun, colour, max(floor, common * rng.uniform(1 - vary, 1 + vary))) for _ in range(count)]
        relation = rng.choice(("row", "column")) if rng.random() < 0.3 and count <= 5 else ""
        return Plan(tuple(wishes), relation)
    if kind == "groups":
        counts = rng.choice(((1, 2), (2, 2), (1, 3), (2, 3), (3, 3), (1, 4), (2, 4), (1, 1, 2), (1, 2, 2), (1, 5)))
        top = 0.55 / sum(counts) ** 0.6
        wishes = []
        for count, (noun, colour) in zip(rng.sample(counts, len(counts)), pick(len(counts)), strict=True):
            common = side(0.09, top)
            wishes += [Wish(noun, colour, common)] * count
        return Plan(tuple(wishes), "")
    if kind in ("line", "scatter"):
        count = rng.choice((3, 3, 4))
        wishes = [Wish(noun, colour, side(0.1, 0.7 / count)) for noun, colour in pick(count)]
        return Plan(tuple(wishes), rng.choice(("row", "column")) if kind == "line" else "")
    # front and inside: the first thing is drawn over the second, which is a shape
    while True:
        (noun, colour), (back, back_colour) = pick(2)
        if back_colour is None or colour == back_colour:
            continue
        if kind == "front" and back not in ("ring", "arrow", "cross", "star"):
            return Plan((Wish(noun, colour, side(0.2, 0.42)), Wish(back, back_colour, side(0.25, 0.5))), "front")
        if kind == "inside" and back in ("circle", "square", "hexagon"):
            outer = max(rng.uniform(0.55, 0.85) * unit, 3.2 * floor)
            inner = max(floor, outer * rng.uniform(0.25, 0.42))
            return Plan((Wish(noun, colour, inner), Wish(back, back_colour, outer)), "inside")


def random_noun(rng: random.Random, request: Request) -> tuple[str, str | None]:
    """A noun and its colour: half shapes, half pictograms."""
    if request.held_out:
        colour, noun = rng.choice(sorted(HELD_OUT))
        return noun, colour
    like = request.like if request.like is not None and rng.random() < 0.7 else None
    if like in PICTOGRAMS or (like is None and rng.random() < 0.5):
        return like or rng.choice(list(PICTOGRAMS)), None
    while True:
        noun, colour = like or rng.choice(SHAPES), rng.choice(list(OBJECT_COLOURS))
        if (colour, noun) not in HELD_OUT:
            return noun, colour
