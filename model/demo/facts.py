"""What is true of a scene, in words: groups, descriptions, regions, boxes. Questions are answered from here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from model.demo.scene import Box, Scene, Thing, order_key
from model.demo.words import NOUNS, article, number


@dataclass(frozen=True)
class Group:
    """Things that share size word, colour and noun, in listing order."""

    noun: str
    colour: str | None
    size: str
    things: tuple[Thing, ...]

    @property
    def count(self) -> int:
        return len(self.things)

    @property
    def name(self) -> str:
        """Size, colour and noun in the number of the group: "red circle", "two"-less "red circles"."""
        return name_of(self.noun, self.colour, self.count, self.size)

    @property
    def phrase(self) -> str:
        """ "a red circle" or "three red circles"."""
        return article(self.name) if self.count == 1 else f"{number(self.count)} {self.name}"


def name_of(noun: str, colour: str | None, count: int, size: str = "") -> str:
    """Words for ``count`` things of a kind, without article or number."""
    word = NOUNS[noun].name if count == 1 else NOUNS[noun].plural
    return " ".join(part for part in (size, colour, word) if part)


def groups(scene: Scene) -> list[Group]:
    """The things of a scene by kind; groups, and things within them, by rising order key."""
    found: dict[tuple[str, str | None, str], list[Thing]] = {}
    things: Iterable[Thing] = scene.things
    if scene.relation not in ("front", "inside", "beside", "above"):
        things = sorted(scene.things, key=lambda thing: order_key(thing.box, scene.size))
    for thing in things:
        found.setdefault((thing.noun, thing.colour, thing.size), []).append(thing)
    return [Group(*key, tuple(members)) for key, members in found.items()]


def join(phrases: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


RELATION_WORDS = {"beside": "to the left of", "above": "above", "front": "in front of", "inside": "inside"}
INVERSE_WORDS = {"beside": "to the right of", "above": "below", "front": "behind", "inside": "around"}


def things_phrase(scene: Scene) -> str:
    """The things of a scene and how they stand, without the background: "a red circle above a cat". Empty if none."""
    parts = groups(scene)
    if not parts:
        return ""
    phrases = [group.phrase for group in parts]
    if scene.relation in RELATION_WORDS:
        return f"{phrases[0]} {RELATION_WORDS[scene.relation]} {phrases[1]}"
    if scene.relation in ("row", "column") and len(parts) == len(scene.things) >= 3:
        return f"{'from left to right' if scene.relation == 'row' else 'from top to bottom'}, {join(phrases)}"
    return join(phrases)


def quote(text: str) -> str:
    return f'"{text}"'


def reading(scene: Scene, verb: str) -> str:
    """A sentence that tells all printed text; ``verb`` is "read" or "say"."""
    texts = [quote(found.text) for found in scene.prints]
    return f"The text {verb}s {texts[0]}." if len(texts) == 1 else f"The texts {verb} {join(texts)}."


def describe(scene: Scene) -> str:
    """The caption."""
    background = f"{article(scene.ground)} background"
    things = things_phrase(scene)
    if things:
        caption = f"{capital(things)} on {background}."
    elif scene.prints:
        ink = f"{scene.prints[0].colour} text" if len(scene.prints) == 1 else "two texts"
        caption = f"{capital(ink)} on {background}."
    else:
        caption = f"A plain {scene.ground} background."
    return f"{caption} {reading(scene, 'read')}" if scene.prints else caption


def region(box: Box, size: tuple[int, int]) -> str | None:
    """Where in the picture a box is, in words with their preposition; None where two answers would do."""
    column = _third((box[0] + box[2]) / 2 / size[0], ("left", "centre", "right"))
    row = _third((box[1] + box[3]) / 2 / size[1], ("top", "centre", "bottom"))
    if column is None or row is None:
        return None
    if row == "centre":
        return "in the centre" if column == "centre" else f"on the {column}"
    return f"at the {row}" if column == "centre" else f"at the {row} {column}"


def _third(position: float, names: tuple[str, str, str]) -> str | None:
    for low, high, name in ((0.0, 0.35, names[0]), (0.415, 0.585, names[1]), (0.65, 1.0, names[2])):
        if low <= position <= high:
            return name
    return None


def scaled_box(box: Box, size: tuple[int, int]) -> list[int]:
    """A pixel box in 999ths of the picture's width and height."""
    scaled = (round(value / size[axis % 2] * 999) for axis, value in enumerate(box))
    return [min(999, max(0, value)) for value in scaled]


def box_text(box: Box, size: tuple[int, int]) -> str:
    """A pixel box as the model writes it."""
    return "[" + ", ".join(map(str, scaled_box(box, size))) + "]"


def grounding(label: str, boxes: Sequence[Box], size: tuple[int, int]) -> str:
    """A label with its boxes between the grounding markers."""
    joined = ", ".join(box_text(box, size) for box in boxes)
    return f"<|ref|>{label}<|/ref|><|det|>[{joined}]<|/det|>"
