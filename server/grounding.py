"""Boxes as data: what the model writes between its grounding markers becomes labels and pixels.

For each thing it points at, the model writes ::

    <|ref|>the red circle<|/ref|><|det|>[[102, 45, 380, 290], [500, 45, 780, 290]]<|/det|>

A box is left, top, right, bottom in 999ths of the picture's width and height.

**Grammar.** A span is exactly that: a label without markers in it (it may be empty), then at once the boxes: one or
more, four numbers each, 0 to 999 without sign or leading zero, left <= right and top <= bottom, and no white space but
spaces between the parts. Anything else between markers is no span: it stays text, and its boxes are no data.

**Text as people read it** has no markers, keeps labels, and loses the boxes of spans. What is no span loses its
markers alone, so that nothing vanishes that is not in the data. `MarkupReader` does this to a stream, and never shows
a part of a marker, nor of boxes that may yet be whole.

**Which picture.** The format has no place for it. The boxes of an answer are taken to be in the conversation's last
picture: the reference draws them there, and where it gives several pictures (an example, then the picture to search),
it asks about the last. A caller who knows better can say so.

**Pixels** are ``int(value / 999 * side)``, as in the reference, on the picture as a viewer shows it (EXIF orientation
applied): 999 is the far edge itself.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from model.prompt import Message, Part
from model.tokenizer import GROUNDING_MARKERS

REF, REF_END, DET, DET_END, GROUNDING = GROUNDING_MARKERS
FULL_SCALE = 999
DEFAULT_QUESTION = "Describe this image."

Box = tuple[int, int, int, int]

_MARKER = re.compile("(" + "|".join(map(re.escape, GROUNDING_MARKERS)) + ")")
_NO_BOX = re.compile(r"[^0-9\[\], ]")
_NUMBER = r"(?:0|[1-9][0-9]{0,2})"
_BOX = rf"\[ *+{_NUMBER}(?: *+, *+{_NUMBER}){{3}} *+\]"
_BOXES = re.compile(rf" *+\[ *+{_BOX}(?: *+, *+{_BOX})*+ *+\] *+")
_DIGITS = re.compile(r"[0-9]+")


class GroundingError(ValueError):
    """Boxes cannot be asked for like this; the message tells the client why."""


@dataclass(frozen=True)
class Span:
    """A label and its boxes, in 999ths."""

    label: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Grounding:
    """A span placed in a picture: `image_index` counts the conversation's pictures from 0."""

    label: str
    boxes: list[Box]
    boxes_pixels: list[Box]
    image_index: int


class _At(Enum):
    """Where in a span the reader stands."""

    TEXT = auto()  # in none
    LABEL = auto()  # after <|ref|>
    LABEL_END = auto()  # right after <|/ref|>
    BOXES = auto()  # after the <|det|> that came at once


class MarkupReader:
    """Reads an answer piece by piece: gives the text for people, and collects the `spans`.

    However the answer is cut, the joined texts and the spans are the same. Time is linear in the answer's length.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._at = _At.TEXT
        self._tail = ""  # what may become a marker
        self._label: list[str] = []
        self._boxes: list[str] = []  # held back: dropped if they turn out to be boxes, shown if not

    def feed(self, text: str) -> str:
        """The text that is now certain."""
        pieces = _MARKER.split(self._tail + text)
        pieces[-1], self._tail = _cut_marker(pieces[-1])
        return self._read(pieces)

    def finish(self) -> str:
        """The text that was held back, once no more can come."""
        tail, self._tail = self._tail, ""
        return self._read([tail]) + self._give_up()

    def _read(self, pieces: list[str]) -> str:
        """`pieces` are text and markers in turn."""
        shown = []
        for place, piece in enumerate(pieces):
            if place % 2:
                shown.append(self._marker(piece))
            elif piece:
                shown.append(self._text(piece))
        return "".join(shown)

    def _text(self, text: str) -> str:
        if self._at is _At.LABEL:
            self._label.append(text)
        elif self._at is _At.LABEL_END:
            self._at = _At.TEXT
        elif self._at is _At.BOXES:
            self._boxes.append(text)
            return self._give_up() if _NO_BOX.search(text) is not None else ""
        return text

    def _marker(self, marker: str) -> str:
        if marker == DET_END and self._at is _At.BOXES:
            boxes = _parse_boxes("".join(self._boxes))
            if boxes is not None:
                self.spans.append(Span("".join(self._label), boxes))
                self._boxes.clear()
        before = self._at
        shown = self._give_up()
        if marker == REF:
            self._label.clear()
            self._at = _At.LABEL
        elif marker == REF_END and before is _At.LABEL:
            self._at = _At.LABEL_END
        elif marker == DET and before is _At.LABEL_END:
            self._at = _At.BOXES
        return shown

    def _give_up(self) -> str:
        """Leave the span; what was held of it."""
        self._at = _At.TEXT
        shown = "".join(self._boxes)
        self._boxes.clear()
        return shown


def strip_markup(text: str) -> str:
    """A whole answer as people read it."""
    reader = MarkupReader()
    return reader.feed(text) + reader.finish()


def read_spans(text: str) -> list[Span]:
    """The spans of a whole answer."""
    reader = MarkupReader()
    reader.feed(text)
    return reader.spans


def place_spans(
    spans: Sequence[Span], image_sizes: Sequence[tuple[int, int]], *, image_index: int | None = None
) -> list[Grounding]:
    """Spans with pixels. Without pictures there is nothing to point into, and the result is empty.

    Args:
        image_sizes: (width, height) of every picture of the conversation, upright, in order.
        image_index: the picture that the boxes are in; by default the last.

    Raises:
        GroundingError: there is no picture `image_index`.
    """
    if image_index is not None:
        _check_index(image_index, len(image_sizes))
    if not image_sizes:
        return []
    index = len(image_sizes) - 1 if image_index is None else image_index
    width, height = image_sizes[index]
    return [
        Grounding(span.label, list(span.boxes), [_pixels(box, width, height) for box in span.boxes], index)
        for span in spans
    ]


def locate_prompt(what: str) -> str:
    """The text that makes the model locate a thing, in the reference's form.

    Raises:
        GroundingError: there is nothing to locate, or the text has a grounding marker in it.
    """
    what = what.strip()
    if not what:
        raise GroundingError("there is nothing to locate: the text is empty")
    marker = _MARKER.search(what)
    if marker is not None:
        raise GroundingError(f"the text to locate must not have {marker[0]} in it; the server adds what is needed")
    return f"{REF}{what}{REF_END}."


def describe_prompt(question: str = DEFAULT_QUESTION) -> str:
    """The text that makes the model answer with boxes for what it mentions."""
    return question if GROUNDING in question else f"{GROUNDING}{question}"


def ask_for_boxes(
    messages: Sequence[Message], *, locate: str | None = None, describe: bool = False, image_index: int | None = None
) -> list[Message]:
    """The conversation with its last question put so that the answer has boxes.

    `locate`: the thing is added at the end of the question. `describe`: the question, or `DEFAULT_QUESTION` if the
    message has no text, is asked for an answer with boxes. Just one of them. `image_index`, which `place_spans` will
    be given, changes nothing here, but is checked before the model works in vain.

    Raises:
        GroundingError: both or none are given, the last message is not the user's, the conversation has no picture or
            none with this index, or `locate_prompt` refuses.
    """
    if (locate is not None) == describe:
        raise GroundingError("give either locate or describe")
    if not messages or messages[-1].role != "user":
        raise GroundingError("boxes can be asked for only where the last message is the user's")
    num_images = sum(not isinstance(part, str) for message in messages for part in message.content)
    if num_images == 0:
        raise GroundingError("boxes can be asked for only in a conversation with a picture")
    if image_index is not None:
        _check_index(image_index, num_images)
    last = messages[-1]
    parts = list(last.content)
    if locate is not None:
        parts = [*_with_space(parts), locate_prompt(locate)]
    else:
        place = next((i for i, part in enumerate(parts) if isinstance(part, str) and part.strip()), None)
        if place is None:
            parts.append(describe_prompt())
        else:
            parts[place] = describe_prompt(str(parts[place]).lstrip())
    return [*messages[:-1], replace(last, content=tuple(parts))]


def _check_index(index: int, num_images: int) -> None:
    if not 0 <= index < num_images:
        raise GroundingError(f"there is no picture {index}: counted from 0, the conversation has {num_images}")


def _with_space(parts: list[Part]) -> list[Part]:
    """With a space at the end, if it is a word that ends there. (After a picture the prompt has a newline anyway.)"""
    words = parts and isinstance(parts[-1], str) and parts[-1] and not parts[-1][-1].isspace()
    return [*parts, " "] if words else parts


def _cut_marker(text: str) -> tuple[str, str]:
    """Text without markers, and its end apart if that may begin one."""
    start = text.rfind("<")
    if start >= 0 and any(marker.startswith(text[start:]) for marker in GROUNDING_MARKERS):
        return text[:start], text[start:]
    return text, ""


def _parse_boxes(text: str) -> tuple[Box, ...] | None:
    """Boxes, or None if the text is none by the grammar."""
    if _BOXES.fullmatch(text) is None:
        return None
    numbers = [int(digits) for digits in _DIGITS.findall(text)]
    boxes = tuple(zip(numbers[0::4], numbers[1::4], numbers[2::4], numbers[3::4], strict=True))
    if any(left > right or top > bottom for left, top, right, bottom in boxes):
        return None
    return boxes


def _pixels(box: Box, width: int, height: int) -> Box:
    left, top, right, bottom = box
    return (
        int(left / FULL_SCALE * width),
        int(top / FULL_SCALE * height),
        int(right / FULL_SCALE * width),
        int(bottom / FULL_SCALE * height),
    )
