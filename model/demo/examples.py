"""Draws the example pictures of the tests, with what is true of them: layouts written out here, none by the generator.

python -m model.demo.examples --out tests/data
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.demo.colours import Rgb
from model.demo.draw import Drawable, Lettering, draw_all, letter, pictogram_drawable, shape_drawable
from model.demo.facts import describe
from model.demo.fonts import Fonts, find_fonts
from model.demo.scene import Print, Relation, Scene, Thing
from model.demo.shapes import ShapeForm

WHITE, BLACK = (255, 255, 255), (0, 0, 0)


@dataclass(frozen=True)
class Placed:
    """A thing: its noun and colour (None for a pictogram), longer side and centre in pixels."""

    noun: str
    colour: str | None
    rgb: Rgb | None
    size: int
    centre: tuple[int, int]


@dataclass(frozen=True)
class Written:
    """A text: its face, size, colour and upper left corner."""

    text: str
    face: str
    points: int
    colour: str
    rgb: Rgb
    corner: tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A whole picture. Things in the order in which a description names them."""

    size: tuple[int, int]
    ground: str
    rgb: Rgb
    things: tuple[Placed, ...] = ()
    texts: tuple[Written, ...] = ()
    relation: Relation = ""


LAYOUTS: dict[str, Layout] = {
    "two_shapes": Layout(
        (384, 384),
        "white",
        WHITE,
        (
            Placed("circle", "red", (222, 26, 30), 120, (102, 205)),
            Placed("square", "blue", (32, 74, 214), 104, (278, 188)),
        ),
        relation="beside",
    ),
    "three_rockets": Layout(
        (384, 384),
        "white",
        WHITE,
        (
            Placed("rocket", None, None, 84, (72, 130)),
            Placed("rocket", None, None, 84, (190, 270)),
            Placed("rocket", None, None, 84, (306, 118)),
        ),
    ),
    "word": Layout(
        (384, 256), "white", WHITE, texts=(Written("COFFEE", "DejaVuSans-Bold.ttf", 58, "black", BLACK, (62, 98)),)
    ),
    "wide": Layout(
        (720, 320),
        "white",
        WHITE,
        (Placed("apple", None, None, 170, (170, 160)), Placed("star", "yellow", (250, 214, 16), 160, (530, 166))),
        relation="beside",
    ),
    "dark": Layout(
        (384, 384),
        "black",
        (6, 6, 8),
        (Placed("heart", "red", (226, 24, 40), 110, (196, 104)), Placed("owl", None, None, 124, (188, 282))),
        relation="above",
    ),
    "small_print": Layout(
        (768, 768),
        "white",
        WHITE,
        (Placed("umbrella", None, None, 260, (300, 300)),),
        (Written("OPEN DOOR", "LiberationSans-Bold.ttf", 27, "black", BLACK, (530, 640)),),
    ),
    "first": Layout((384, 384), "white", WHITE, (Placed("dog", None, None, 170, (180, 200)),)),
    "second": Layout((384, 384), "white", WHITE, (Placed("circle", "green", (30, 160, 60), 160, (210, 180)),)),
}


@dataclass(frozen=True)
class Asked:
    """A question about pictures: the words that a true answer has, and the demo's own answer (its caption if None).

    ``needs_tiles``: a model that sees one picture of one tile at a time cannot know it.
    """

    pictures: tuple[str, ...]
    question: str
    facts: tuple[str, ...]
    answer: str | None = None
    needs_tiles: bool = False


QUESTIONS: tuple[Asked, ...] = (
    Asked(("two_shapes",), "Describe this image.", ("red circle", "left of", "blue square", "white background")),
    Asked(("two_shapes",), "What colour is the square?", ("blue",), "The square is blue."),
    Asked(("three_rockets",), "Describe this image.", ("three rockets", "white background")),
    Asked(("three_rockets",), "How many rockets are there?", ("three rockets",), "There are three rockets."),
    Asked(("word",), "What does the text say?", ('"COFFEE"',), 'The text says "COFFEE".'),
    Asked(("wide",), "Describe this image.", ("apple", "left of", "yellow star")),
    Asked(("wide",), "Is there a cat?", ("No",), "No, there is no cat."),
    Asked(("dark",), "Describe this image.", ("red heart", "above", "owl", "black background")),
    Asked(("dark",), "What colour is the background?", ("black",), "The background is black."),
    Asked(
        ("small_print",), "What does the text say?", ('"OPEN DOOR"',), 'The text says "OPEN DOOR".', needs_tiles=True
    ),
    Asked(
        ("first", "second"),
        "Which picture shows the dog?",
        ("first picture",),
        "The first picture shows the dog.",
        needs_tiles=True,
    ),
    Asked(("first", "second"), "What is in the second picture?", ("green circle",), needs_tiles=True),
)


def draw(layout: Layout, fonts: Fonts) -> Scene:
    """The picture of a layout."""
    things = [(_drawable(placed, fonts), placed) for placed in layout.things]
    texts = [(letter(fonts, found.text, found.face, found.points, 0.0), found) for found in layout.texts]
    image, ids, boxes, text_boxes = draw_all(
        random.Random(0),  # lots nobody sees: a plain ground comes from this seed
        layout.size,
        layout.rgb,
        [(drawable, _corner(drawable, placed)) for drawable, placed in things],
        [(lettering, found.rgb, found.corner) for lettering, found in texts],
    )
    return Scene(
        image,
        ids,
        layout.ground,
        tuple(Thing(placed.noun, placed.colour, "", box) for (_, placed), box in zip(things, boxes, strict=True)),
        tuple(_print(*text, box) for text, box in zip(texts, text_boxes, strict=True)),
        layout.relation,
    )


def _drawable(placed: Placed, fonts: Fonts) -> Drawable:
    if placed.rgb is None:
        return pictogram_drawable(fonts.pictogram(placed.noun), placed.size, flip=False)
    form = ShapeForm(placed.noun, (1.0, 1.0), turn=0.0, hole=0.5, smooth=True, border=0)
    return shape_drawable(form, placed.size, placed.rgb, None)


def _corner(drawable: Drawable, placed: Placed) -> tuple[int, int]:
    return placed.centre[0] - drawable.mask.width // 2, placed.centre[1] - drawable.mask.height // 2


def _print(lettering: Lettering, found: Written, box: tuple[int, int, int, int]) -> Print:
    return Print(found.text, found.colour, box, lettering.edges_at(found.corner[0]))


def entries(scenes: dict[str, Scene]) -> list[dict[str, Any]]:
    """What ``captions.json`` says: pictures, question, facts and true answer of each."""
    return [
        {
            "files": [f"{name}.png" for name in asked.pictures],
            "question": asked.question,
            "facts": list(asked.facts),
            "answer": asked.answer or describe(scenes[asked.pictures[-1]]),
            "needs_tiles": asked.needs_tiles,
        }
        for asked in QUESTIONS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the example pictures of the tests.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures and captions.json")
    parser.add_argument("--fonts", type=Path, default=None, help="folder with the fonts (default: the system's)")
    arguments = parser.parse_args()
    fonts = find_fonts(arguments.fonts)
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    scenes = {name: draw(layout, fonts) for name, layout in LAYOUTS.items()}
    for name, scene in scenes.items():
        scene.image.save(folder / f"{name}.png", optimize=True)
    text = json.dumps(entries(scenes), indent=1, ensure_ascii=False)
    (folder / "captions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
