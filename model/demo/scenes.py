"""Scenes: what is in a picture and where, drawn with Pillow, all from one seed.

A scene is composed (which things, how many, in which relation), laid out by rejection (nothing touches unless it is
meant to; whatever a description must order is apart by a clear margin), coloured with contrast, and drawn. The drawn
pixels then give the boxes. Sizes are chosen in pixels of the model's tiles, so that a picture of any size shows things
as large as the model can see.
"""

from __future__ import annotations

import io
import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from model.demo.architecture import CANDIDATES
from model.demo.colours import OBJECT_COLOURS, Rgb, distance, sample_ground, sample_object_colour, to_lab
from model.demo.compose import Plan, compose
from model.demo.draw import Drawable, draw_all, pictogram_drawable, shape_drawable
from model.demo.fonts import Fonts
from model.demo.layout import place
from model.demo.printing import random_letterings
from model.demo.scene import Print, Request, Scene, Thing
from model.demo.shapes import random_form
from model.image import TILE_SIZE, tile_grid

MIN_CONTRAST = 30.0  # between a thing and what is behind it, in L*a*b*
TEXT_CONTRAST = 48.0
TEXT_LIGHTNESS = 28.0  # small letters are told by lightness, not by hue
SMALL_INKS = ("black", "white", "red", "blue", "green", "yellow")  # thin strokes do not show a hue's shades


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
            longer, aspect = rng.choice((384, rng.randint(200, 384))), rng.uniform(0.45, 1.0)
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


def _try_scene(rng: random.Random, fonts: Fonts, request: Request, size: tuple[int, int]) -> Scene | None:
    """One attempt: None when no colours contrast or nothing fits."""
    letterings = random_letterings(rng, fonts, request, size)
    plan = compose(rng, request, size, has_text=bool(letterings))
    ground, ground_rgb = sample_ground(rng)
    drawables = _colour(rng, fonts, plan, ground, ground_rgb)
    if drawables is None:
        return None
    inks = _inks(rng, [lettering.small for lettering in letterings], ground, ground_rgb)
    if inks is None:
        return None
    boxes = place(rng, plan, drawables, letterings, size)
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
    image.save(buffer, "JPEG", quality=rng.randint(70, 95))
    return Image.open(buffer).convert("RGB")


def _hidden(ids: npt.NDArray[np.uint8], things: list[Thing], drawables: list[Drawable]) -> float:
    """The share of the second thing that the first covers."""
    whole = int((np.asarray(drawables[1].mask) >= 128).sum())
    return 1 - int((ids == 2).sum()) / whole if whole and len(things) == 2 else 1.0


# -- colours ----------------------------------------------------------------------------------------------------------


def _colour(rng: random.Random, fonts: Fonts, plan: Plan, ground: str, ground_rgb: Rgb) -> list[Drawable] | None:
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


def _inks(rng: random.Random, small: list[bool], ground: str, ground_rgb: Rgb) -> list[tuple[str, Rgb]] | None:
    """A colour for each text; ``small`` says of each whether it is small print."""
    inks = []
    for thin in small:
        for _ in range(12):
            name = rng.choice(("black", "white", rng.choice(SMALL_INKS if thin else tuple(OBJECT_COLOURS))))
            rgb = sample_object_colour(rng, name)
            lighter = abs(to_lab(rgb)[0] - to_lab(ground_rgb)[0])
            if name != ground and lighter > TEXT_LIGHTNESS and distance(rgb, ground_rgb) > TEXT_CONTRAST:
                inks.append((name, rgb))
                break
        else:
            return None
    return inks
