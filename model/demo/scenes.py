"""Scenes: what is in a picture and where, drawn with Pillow, all from one seed.

A scene is composed (which things, how many, in which relation), laid out by rejection (nothing touches unless it is
meant to; whatever a description must order is apart by a clear margin), coloured with contrast, and drawn. The drawn
pixels then give the boxes. Sizes are chosen in pixels of the model's tiles, so that a picture of any size shows things
as large as the model can see.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from model.demo.architecture import CANDIDATES
from model.demo.colours import OBJECT_COLOURS, Rgb, distance, sample_ground, sample_object_colour, to_lab
from model.demo.draw import Drawable, Lettering, draw_all, letter, pictogram_drawable, shape_drawable
from model.demo.fonts import DEFAULT_FACE, TEXT_FACES, Fonts
from model.demo.shapes import SHAPES, random_form
from model.demo.words import PICTOGRAMS, PRINTED_WORDS
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
SIZE_WORDS = ("large", "small")
MIN_CONTRAST = 30.0  # between a thing and what is behind it, in L*a*b*
TEXT_CONTRAST = 42.0
TEXT_LIGHTNESS = 22.0  # small letters are told by lightness, not by hue


@dataclass(frozen=True)
class Thing:
    """One drawn thing: its noun, its colour (None for a pictogram), size word if it needs one, pixel box (x2, y2 outside)."""

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


@dataclass(frozen=True)
class _Wish:
    """A thing to be: noun, colour, longer side in pixels of the picture, size word."""

    noun: str
    colour: str | None
    size: float
    word: str = ""


@dataclass(frozen=True)
class _Plan:
    wishes: tuple[_Wish, ...]
    relation: Relation


def order_key(box: Box, size: tuple[int, int]) -> float:
    """Things are named and listed by rising key: from left to right, from top to bottom where they are in a column."""
    return (box[0] + box[2]) / 2 / size[0] + 0.3 * (box[1] + box[3]) / 2 / size[1]


def random_scene(rng: random.Random, fonts: Fonts, request: Request) -> Scene:
    """A scene of the wanted kind. The same state of ``rng`` gives the same picture."""
    for attempt in range(2000):
        if attempt % 10 == 0:  # some sizes and texts leave no room
            size = random_size(rng, request)
        scene = _try_scene(rng, fonts, request, size)
        if scene is not None:
            return scene
    raise RuntimeError(f"no layout found for {request}")


def random_size(rng: random.Random, request: Request) -> tuple[int, int]:
    """Width and height of a picture that the model cuts into that many tiles."""
    if request.simple:
        return TILE_SIZE, TILE_SIZE
    while True:
        if request.tiles == "single":
            if rng.random() < 0.45:
                return TILE_SIZE, TILE_SIZE
            longer, aspect = rng.choice((384, rng.randint(140, 384))), rng.uniform(0.45, 1.0)
        elif request.tiles == "double":
            longer, aspect = rng.choice((768, rng.randint(430, 800), rng.randint(430, 800))), rng.uniform(0.3, 0.62)
        else:
            shape = rng.random()
            if shape < 0.7:
                longer = rng.choice((768, 640, 800, rng.randint(460, 900), rng.randint(900, 1280)))
                aspect = rng.choice((1.0, 0.75, rng.uniform(0.55, 1.0)))
            else:
                longer, aspect = rng.choice((1152, 1536, rng.randint(850, 1536))), rng.uniform(0.22, 0.4)
        size = (longer, max(64, round(longer * aspect)))
        size = size if rng.random() < 0.6 else size[::-1]
        columns, rows = tile_grid(size, CANDIDATES, tiled=True)
        if (
            {"single": 1, "double": 2, "quad": 4}[request.tiles]
            >= columns * rows
            > {"single": 0, "double": 1, "quad": 2}[request.tiles]
        ):
            return size


def view_scale(size: tuple[int, int]) -> float:
    """Pixels of the global view a pixel of the picture."""
    return TILE_SIZE / max(size)


def local_scale(size: tuple[int, int]) -> float:
    """Pixels of the local view a pixel of the picture."""
    columns, rows = tile_grid(size, CANDIDATES, tiled=True)
    return min(columns * TILE_SIZE / size[0], rows * TILE_SIZE / size[1])


def _try_scene(rng: random.Random, fonts: Fonts, request: Request, size: tuple[int, int]) -> Scene | None:
    """One attempt: None when no colours contrast or nothing fits."""
    letterings = _letterings(rng, fonts, request, size)
    plan = _compose(rng, request, size, has_text=bool(letterings))
    ground, ground_rgb = sample_ground(rng)
    drawables = _colour(rng, fonts, plan, ground, ground_rgb)
    if drawables is None:
        return None
    inks = _inks(rng, len(letterings), ground, ground_rgb)
    if inks is None:
        return None
    boxes = _place(rng, plan, drawables, letterings, size)
    if boxes is None:
        return None
    corners, text_corners = boxes
    image, ids, thing_boxes, print_boxes = draw_all(
        rng,
        size,
        ground_rgb,
        list(zip(drawables, corners, strict=True)),
        [(lettering, ink[1], corner) for lettering, ink, corner in zip(letterings, inks, text_corners, strict=True)],
    )
    things = [Thing(w.noun, w.colour, w.word, box) for w, box in zip(plan.wishes, thing_boxes, strict=True)]
    if plan.relation == "front" and not 0.06 < _hidden(ids, things, drawables) < 0.4:
        return None
    prints = [
        Print(lettering.text, ink[0], box, lettering.edges_at(corner[0]))
        for lettering, ink, box, corner in zip(letterings, inks, print_boxes, text_corners, strict=True)
    ]
    if not request.simple and rng.random() < 0.1:
        image = _through_jpeg(rng, image)
    return Scene(image, ids, ground, tuple(things), tuple(prints), plan.relation)


def _through_jpeg(rng: random.Random, image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=rng.randint(55, 95))
    return Image.open(buffer).convert("RGB")


def _hidden(ids: npt.NDArray[np.uint8], things: list[Thing], drawables: list[Drawable]) -> float:
    """The share of the second thing that the first covers."""
    whole = int((np.asarray(drawables[1].mask) >= 128).sum())
    return 1 - int((ids == 2).sum()) / whole if whole and len(things) == 2 else 1.0


# -- composition ------------------------------------------------------------------------------------------------------


def _compose(rng: random.Random, request: Request, size: tuple[int, int], *, has_text: bool) -> _Plan:
    """Which things a picture shows, how large, and in which relation."""
    unit = min(size)
    floor = (30 if request.tiles == "single" else 24) / view_scale(size)
    if has_text and rng.random() < (0.25 if not request.small_print else 0.35):
        return _Plan((), "")
    if not has_text and not request.simple and rng.random() < 0.012:
        return _Plan((), "")
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
            found += [noun for noun in [_random_noun(rng, request)] if noun not in found]
        return found

    def side(low: float, high: float) -> float:
        """A longer side between two shares of the picture's shorter side; small ones are as frequent as large ones."""
        least = max(low * unit, floor)
        return least * (max(high * unit / least, 1.0) ** rng.random())

    if kind == "one":
        noun, colour = pick(1)[0]
        return _Plan((_Wish(noun, colour, side(0.14, 0.8)),), "")
    if kind == "two":
        relation: Relation = rng.choice(("beside", "above"))
        if not request.simple and rng.random() < 0.1:
            noun, colour = pick(1)[0]
            small = side(0.1, 0.22)
            wishes = [_Wish(noun, colour, small * rng.uniform(1.9, 2.4), "large"), _Wish(noun, colour, small, "small")]
            rng.shuffle(wishes)
            return _Plan(tuple(wishes), relation)
        return _Plan(tuple(_Wish(noun, colour, side(0.12, 0.45)) for noun, colour in pick(2)), relation)
    if kind == "count":
        noun, colour = pick(1)[0]
        count = rng.randint(2, 4) if request.simple or request.brief else rng.choice((2, 2, 3, 3, 4, 4, 5, 6, 7, 8))
        common = side(0.09, 0.62 / count**0.6)
        vary = rng.choice((0.0, 0.0, 0.15))
        wishes = [_Wish(noun, colour, max(floor, common * rng.uniform(1 - vary, 1 + vary))) for _ in range(count)]
        relation = rng.choice(("row", "column")) if rng.random() < 0.3 and count <= 5 else ""
        return _Plan(tuple(wishes), relation)
    if kind == "groups":
        counts = rng.choice(((1, 2), (2, 2), (1, 3), (2, 3), (3, 3), (1, 4), (2, 4), (1, 1, 2), (1, 2, 2), (1, 5)))
        top = 0.55 / sum(counts) ** 0.6
        wishes = []
        for count, (noun, colour) in zip(rng.sample(counts, len(counts)), pick(len(counts)), strict=True):
            common = side(0.09, top)
            wishes += [_Wish(noun, colour, common)] * count
        return _Plan(tuple(wishes), "")
    if kind in ("line", "scatter"):
        count = rng.choice((3, 3, 4))
        wishes = [_Wish(noun, colour, side(0.1, 0.7 / count)) for noun, colour in pick(count)]
        return _Plan(tuple(wishes), rng.choice(("row", "column")) if kind == "line" else "")
    # front and inside: the first thing is drawn over the second, which is a shape
    while True:
        (noun, colour), (back, back_colour) = pick(2)
        if back_colour is None or colour == back_colour:
            continue
        if kind == "front" and back not in ("ring", "arrow", "cross", "star"):
            return _Plan((_Wish(noun, colour, side(0.2, 0.42)), _Wish(back, back_colour, side(0.25, 0.5))), "front")
        if kind == "inside" and back in ("circle", "square", "hexagon"):
            outer = max(rng.uniform(0.55, 0.85) * unit, 3.2 * floor)
            inner = max(floor, outer * rng.uniform(0.25, 0.42))
            return _Plan((_Wish(noun, colour, inner), _Wish(back, back_colour, outer)), "inside")


def _random_noun(rng: random.Random, request: Request) -> tuple[str, str | None]:
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


def random_text(rng: random.Random, longest: int) -> str:
    """Text to print: words, made-up letters, numbers; nothing whose case or characters the eye cannot tell."""
    kind = rng.random()
    if kind < 0.42:
        word = rng.choice([w for w in PRINTED_WORDS if len(w) <= longest])
        if kind < 0.1 and longest >= 9:
            other = rng.choice([w for w in PRINTED_WORDS if len(w) <= longest - 1 - len(word)] or ["a"])
            word = f"{word} {other}"
    elif kind < 0.76:
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, min(longest, 9))))
    elif kind < 0.9:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, min(longest, 6))))
    else:
        return "".join(rng.choice("ABCDEFGHJKLMNPQRTUVWXYZ2346789") for _ in range(rng.randint(2, min(longest, 7))))
    style = rng.random()
    if style < 0.55:
        return word.upper()
    # In lower case alone, letters such as o, s, x look as their capitals do, and l as I.
    if style < 0.75 and not set(word) <= set("ocsuvwxz "):
        return word.capitalize() if word[0] not in "l" else word.upper()
    return word if not set(word) <= set("ocsuvwxzil ") else word.upper()


def _letterings(rng: random.Random, fonts: Fonts, request: Request, size: tuple[int, int]) -> list[Lettering]:
    """The texts of a picture, set in random faces, at sizes that the tiles show legibly."""
    chance = 1.0 if request.small_print else 0.25 if request.simple else 0.3 if request.brief else 0.42
    if rng.random() >= chance:
        return []
    scale = local_scale(size)
    letterings = []
    for _ in range(2 if request.small_print and rng.random() < 0.35 else 1):
        longest = 5 if request.simple else 10 if not request.small_print else 14
        text = random_text(rng, longest)
        if request.simple:
            pixels = rng.uniform(48, 72)
        elif request.small_print:
            pixels = rng.uniform(19, 30)
        elif request.tiles == "single":
            pixels = 22 * (80 / 22) ** rng.random()
        else:
            pixels = 26 * (120 / 26) ** rng.random()
        face = rng.choice((*TEXT_FACES, DEFAULT_FACE))
        slant = rng.uniform(-9, 9) if not request.simple and not request.small_print and rng.random() < 0.12 else 0.0
        points = max(11, round(pixels / scale))
        lettering = letter(fonts, text, face, points, slant)
        while lettering.mask.width > 0.94 * size[0] or lettering.mask.height > 0.5 * size[1]:
            if points * scale < 20 or points <= 11:
                text = text[: max(2, len(text) - 2)].strip() if len(text) > 2 else "8"
            points = max(11, round(min(points * 0.88, points - 1)))
            lettering = letter(fonts, text, face, points, slant)
        letterings.append(lettering)
    return letterings


# -- colours ----------------------------------------------------------------------------------------------------------


def _colour(rng: random.Random, fonts: Fonts, plan: _Plan, ground: str, ground_rgb: Rgb) -> list[Drawable] | None:
    """Things as masks with colours that stand out; None when this ground does not suit them."""
    drawables: list[Drawable] = []
    shared: dict[tuple[str, str], Rgb] = {}
    behind = [ground_rgb] * len(plan.wishes)
    for index in reversed(range(len(plan.wishes))):  # what is behind comes last and is coloured first
        wish = plan.wishes[index]
        covered = [behind[index]] + ([ground_rgb] if plan.relation == "front" and index == 0 else [])
        if wish.colour is None:
            pictogram = fonts.pictogram(wish.noun)
            for rgb in covered:
                near = sum(distance(tuple(pixel), rgb) < 22 for pixel in pictogram.rim[::4].tolist())
                if near > 0.35 * len(pictogram.rim[::4]):
                    return None
            drawables.append(pictogram_drawable(pictogram, wish.size, flip=False))
            continue
        key = (wish.noun, wish.colour)
        for _ in range(8):
            rgb = shared.get(key) or sample_object_colour(rng, wish.colour)
            if wish.colour != ground and all(distance(rgb, other) > MIN_CONTRAST for other in covered):
                break
        else:
            return None
        shared[key] = rgb
        if index > 0 and plan.relation in ("front", "inside"):
            behind[index - 1] = rgb
        form = random_form(rng, wish.noun)
        if plan.relation in ("front", "inside"):
            form = replace(form, border=0)
        edge = sample_object_colour(rng, rng.choice(("black", "white", "grey")))
        drawables.append(shape_drawable(form, wish.size, rgb, edge if distance(edge, rgb) > MIN_CONTRAST else None))
    return drawables[::-1]


def _inks(rng: random.Random, count: int, ground: str, ground_rgb: Rgb) -> list[tuple[str, Rgb]] | None:
    """A colour for each text."""
    inks = []
    for _ in range(count):
        for _ in range(12):
            name = rng.choice(("black", "white", rng.choice(list(OBJECT_COLOURS))))
            rgb = sample_object_colour(rng, name)
            lighter = abs(to_lab(rgb)[0] - to_lab(ground_rgb)[0])
            if name != ground and lighter > TEXT_LIGHTNESS and distance(rgb, ground_rgb) > TEXT_CONTRAST:
                inks.append((name, rgb))
                break
        else:
            return None
    return inks


# -- layout -----------------------------------------------------------------------------------------------------------

Corner = tuple[int, int]


def _place(
    rng: random.Random,
    plan: _Plan,
    drawables: list[Drawable],
    letterings: list[Lettering],
    size: tuple[int, int],
) -> tuple[list[Corner], list[Corner]] | None:
    """Upper left corners of things and texts, or None when a few attempts find none."""
    gap = max(2, round(5 / view_scale(size)))
    for _ in range(6):
        taken: list[Box] = []
        text_corners: list[Corner] = []
        for lettering in letterings:
            corner = _free(rng, lettering.mask.size, taken, size, gap)
            if corner is None:
                break
            text_corners.append(corner)
            taken.append((*corner, corner[0] + lettering.mask.width, corner[1] + lettering.mask.height))
        middles = [(box[1] + box[3]) / 2 / size[1] for box in taken]
        if len(text_corners) < len(letterings) or (len(middles) == 2 and middles[1] - middles[0] < 0.08):
            continue
        corners = _place_things(rng, plan, [drawable.mask.size for drawable in drawables], taken, size, gap)
        if corners is not None and _clear(plan, corners, drawables, size):
            return corners, text_corners
    return None


def _place_things(
    rng: random.Random, plan: _Plan, extents: list[tuple[int, int]], taken: list[Box], size: tuple[int, int], gap: int
) -> list[Corner] | None:
    if plan.relation in ("row", "column"):
        return _line(rng, plan.relation, extents, taken, size, gap)
    if plan.relation in ("front", "inside"):
        return _stack(rng, plan.relation, extents, taken, size, gap)
    taken = list(taken)
    corners = []
    for extent in extents:
        corner = _free(rng, extent, taken, size, gap)
        if corner is None:
            return None
        corners.append(corner)
        taken.append((*corner, corner[0] + extent[0], corner[1] + extent[1]))
    return corners


def _line(
    rng: random.Random,
    relation: Relation,
    extents: list[tuple[int, int]],
    taken: list[Box],
    size: tuple[int, int],
    gap: int,
) -> list[Corner] | None:
    """Things side by side, or one below the other, with about equal gaps."""
    along, across = (0, 1) if relation == "row" else (1, 0)
    room = size[along] - sum(extent[along] for extent in extents)
    spaces = len(extents) + 1
    widest = max(extent[across] for extent in extents)
    if room < spaces * 2 * gap or widest + 2 * gap > size[across]:
        return None
    space = room / spaces * rng.uniform(0.55, 1.0)
    position = rng.uniform(gap, room - (spaces - 2) * space - gap) if spaces > 2 else gap
    middle = rng.uniform(widest / 2 + gap, size[across] - widest / 2 - gap)
    corners = []
    for extent in extents:
        drift = rng.uniform(-0.02, 0.02) * size[across]
        other = min(max(middle - extent[across] / 2 + drift, gap), size[across] - extent[across] - gap)
        corner = (round(position), round(other)) if along == 0 else (round(other), round(position))
        if _hits((*corner, corner[0] + extent[0], corner[1] + extent[1]), taken, gap):
            return None
        corners.append(corner)
        position += extent[along] + space
    return corners


def _stack(
    rng: random.Random,
    relation: Relation,
    extents: list[tuple[int, int]],
    taken: list[Box],
    size: tuple[int, int],
    gap: int,
) -> list[Corner] | None:
    """The first thing over a part of the second, or well within it."""
    back = _free(rng, extents[1], taken, size, gap)
    if back is None:
        return None
    middle = (back[0] + extents[1][0] / 2, back[1] + extents[1][1] / 2)
    if relation == "inside":
        reach = [0.08 * extent for extent in extents[1]]
        shift = (rng.uniform(-reach[0], reach[0]), rng.uniform(-reach[1], reach[1]))
    else:
        angle = rng.uniform(0, 2 * np.pi)
        away = rng.uniform(0.55, 0.85)
        shift = (
            away * float(np.cos(angle)) * (extents[0][0] + extents[1][0]) / 2,
            away * float(np.sin(angle)) * (extents[0][1] + extents[1][1]) / 2,
        )
    front = (round(middle[0] + shift[0] - extents[0][0] / 2), round(middle[1] + shift[1] - extents[0][1] / 2))
    box = (*front, front[0] + extents[0][0], front[1] + extents[0][1])
    inside = box[0] >= gap and box[1] >= gap and box[2] <= size[0] - gap and box[3] <= size[1] - gap
    return [front, back] if inside and not _hits(box, taken, gap) else None


def _free(
    rng: random.Random, extent: tuple[int, int], taken: list[Box], size: tuple[int, int], gap: int
) -> Corner | None:
    """A corner at which the thing touches nothing."""
    room = (size[0] - extent[0] - gap, size[1] - extent[1] - gap)
    if room[0] < gap or room[1] < gap:
        return None
    for _ in range(30):
        corner = (rng.randint(gap, room[0]), rng.randint(gap, room[1]))
        if not _hits((*corner, corner[0] + extent[0], corner[1] + extent[1]), taken, gap):
            return corner
    return None


def _hits(box: Box, taken: list[Box], gap: int) -> bool:
    return any(
        box[0] < other[2] + gap and other[0] < box[2] + gap and box[1] < other[3] + gap and other[1] < box[3] + gap
        for other in taken
    )


def _clear(plan: _Plan, corners: list[Corner], drawables: list[Drawable], size: tuple[int, int]) -> bool:
    """Whether what a description must put in order is apart by a margin, and the plan's relation is plain to see."""
    boxes = [
        (x, y, x + drawable.mask.width, y + drawable.mask.height)
        for (x, y), drawable in zip(corners, drawables, strict=True)
    ]
    if plan.relation in ("beside", "above"):
        (ax, ay), (bx, by) = (((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in boxes)
        dx, dy = bx - ax, by - ay
        if plan.relation == "beside":
            return dx > 1.6 * abs(dy) and dx > 0.06 * size[0]
        return dy > 1.6 * abs(dx) and dy > 0.06 * size[1]
    if plan.relation in ("front", "inside"):
        return True
    keys = [order_key(box, size) for box in boxes]
    leaders: dict[tuple[str, str | None], float] = {}
    for wish, key in zip(plan.wishes, keys, strict=True):
        group = (wish.noun, wish.colour)
        leaders[group] = min(key, leaders.get(group, key))
    order = list(leaders.values())
    if any(later - earlier < 0.06 for earlier, later in zip(order, order[1:], strict=False)):
        return False
    ranked = sorted(keys)
    return all(later - earlier > 0.015 for earlier, later in zip(ranked, ranked[1:], strict=False))
