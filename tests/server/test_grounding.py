"""Boxes from the model's markup, the text without it, and the questions that ask for boxes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from model.prompt import Message
from model.tokenizer import GROUNDING_MARKERS, Tokenizer
from server.grounding import (
    Box,
    Grounding,
    GroundingError,
    MarkupReader,
    Span,
    ask_for_boxes,
    describe_prompt,
    locate_prompt,
    place_spans,
    read_spans,
    strip_markup,
)

GIRAFFE = "<|ref|>The giraffe at the back.<|/ref|><|det|>[[580, 270, 999, 900]]<|/det|>"  # the reference's example
IMAGE = Image.new("RGB", (4, 4))

WORDS = st.text(alphabet="ab <|>/[],09é🙂\n", max_size=12)
BOXES = st.tuples(*[st.integers(0, 999)] * 4).map(
    lambda n: (min(n[0], n[2]), min(n[1], n[3]), max(n[0], n[2]), max(n[1], n[3]))
)
SPANS = st.builds(Span, WORDS, st.lists(BOXES, min_size=1, max_size=4).map(tuple))
# What a model might write when it is confused: markers, halves of them, boxes and halves of them, in any order.
SCRAPS = st.one_of(
    st.sampled_from(GROUNDING_MARKERS),
    st.sampled_from(["<|", "<|re", "f|>", "<|/", "det|>", "<", "|>", "<|ref|>a<|/ref|><|det|>", "]]<|/det|>"]),
    st.sampled_from(["[[", "]]", "[", "]", ", ", "1", "999", " ", "a cat", "\n", "é"]),
    st.sampled_from(["[[1, 2, 3, 4]]", "[[1,2,3,4], [5,6,7,8]]", "[[4, 2, 3, 1]]", "[[1, 2, 3, 1000]]"]),
)
HOSTILE = st.lists(SCRAPS, max_size=16).map("".join)


def markup(span: Span) -> str:
    boxes = ", ".join("[" + ", ".join(map(str, box)) + "]" for box in span.boxes)
    return f"<|ref|>{span.label}<|/ref|><|det|>[{boxes}]<|/det|>"


def read_in_pieces(text: str, cuts: Sequence[int]) -> tuple[list[str], list[Span]]:
    """The texts that come out when the answer comes in pieces that end at the cuts."""
    reader = MarkupReader()
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = [reader.feed(text[start:end]) for start, end in pairwise(bounds)]
    return [*shown, reader.finish()], reader.spans


def by_the_book(text: str) -> tuple[str, list[Span]]:
    """The rules of the module, told once more with one regular expression for a whole span."""
    number, gap = "(?:0|[1-9][0-9]?[0-9]?)", " *, *"
    box = rf"\[ *{gap.join([number] * 4)} *\]"
    label = f"(?:(?!{'|'.join(map(re.escape, GROUNDING_MARKERS))}).)*"
    whole = re.compile(rf"<\|ref\|>({label})<\|/ref\|><\|det\|>( *\[ *{box}(?:{gap}{box})* *\] *)<\|/det\|>", re.DOTALL)
    any_marker = re.compile("|".join(map(re.escape, GROUNDING_MARKERS)))
    shown, spans, end = [], [], 0
    for match in whole.finditer(text):
        boxes = [tuple(map(int, re.findall("[0-9]+", part))) for part in re.findall(box, match[2])]
        if all(x1 <= x2 and y1 <= y2 for x1, y1, x2, y2 in boxes):
            shown += [any_marker.sub("", text[end : match.start()]), match[1]]
            spans.append(Span(match[1], tuple((x1, y1, x2, y2) for x1, y1, x2, y2 in boxes)))
            end = match.end()
    return "".join([*shown, any_marker.sub("", text[end:])]), spans


# Reading


def test_the_example_of_the_reference() -> None:
    assert read_spans(GIRAFFE) == [Span("The giraffe at the back.", ((580, 270, 999, 900),))]
    assert strip_markup(GIRAFFE) == "The giraffe at the back."


def test_several_spans_and_boxes_in_a_sentence() -> None:
    text = (
        "<|ref|>Two red circles<|/ref|><|det|>[[0, 0, 9, 9], [10,20,30,40]]<|/det|> above "
        "<|ref|>a cat<|/ref|><|det|>[[500, 500, 500, 999]]<|/det|> on a white background."
    )
    circles, cat = Span("Two red circles", ((0, 0, 9, 9), (10, 20, 30, 40))), Span("a cat", ((500, 500, 500, 999),))
    assert read_spans(text) == [circles, cat]
    assert strip_markup(text) == "Two red circles above a cat on a white background."


@pytest.mark.parametrize(
    "boxes",
    [
        "[]",
        "[[]]",
        "[1, 2, 3, 4]",
        "[[1, 2, 3]]",
        "[[1, 2, 3, 4, 5]]",
        "[[1, 2, 3, 4],]",
        "[[1, 2, 3, 4] [1, 2, 3, 4]]",
        "[[1, 2, 3, 4]][[1, 2, 3, 4]]",
        "[[1, 2, 3, 4]",
        "[[1, 2, 3, 1000]]",
        "[[-1, 2, 3, 4]]",
        "[[+1, 2, 3, 4]]",
        "[[01, 2, 3, 4]]",
        "[[1.0, 2, 3, 4]]",
        "[[1e1, 2, 30, 4]]",
        "[[1 0, 2, 30, 4]]",
        "[[3, 2, 1, 4]]",
        "[[1, 4, 3, 2]]",
        "[[1, 2, 3, 4], [3, 2, 1, 4]]",
        "[[1, 2, 3, ４]]",  # noqa: RUF001
        "[[1,\n2, 3, 4]]",
        "[[1, 2, 3, 4]];",
        "((1, 2, 3, 4))",
        "__import__('os')",
        "",
    ],
)
def test_what_is_no_box_stays_text(boxes: str) -> None:
    text = f"<|ref|>a cat<|/ref|><|det|>{boxes}<|/det|>."
    assert read_spans(text) == []
    assert strip_markup(text) == f"a cat{boxes}."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<|ref|>a cat<|/ref|>", "a cat"),
        ("<|ref|>a cat<|/ref|> <|det|>[[1, 2, 3, 4]]<|/det|>", "a cat [[1, 2, 3, 4]]"),
        ("<|ref|>a cat<|/ref|><|det|>[[1, 2, 3, 4]]", "a cat[[1, 2, 3, 4]]"),
        ("<|ref|>a cat<|/ref|><|det|>[[1, 2, 3, 4]]<|/de", "a cat[[1, 2, 3, 4]]<|/de"),
        ("<|ref|>a cat<|det|>[[1, 2, 3, 4]]<|/det|>", "a cat[[1, 2, 3, 4]]"),
        ("a cat<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>", "a cat[[1, 2, 3, 4]]"),
        ("<|det|>[[1, 2, 3, 4]]<|/det|>", "[[1, 2, 3, 4]]"),
        ("<|ref|>a<|grounding|>b<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>", "ab[[1, 2, 3, 4]]"),
        ("<|ref|>a<|/ref|><|det|>[[1, <|ref|>2, 3, 4]]<|/det|>", "a[[1, 2, 3, 4]]"),
        ("<|ref|>a cat", "a cat"),
        ("<|ref|", "<|ref|"),
        ("1 < 2 |> <|User|>", "1 < 2 |> <|User|>"),
        ("", ""),
    ],
)
def test_what_is_no_span_loses_its_markers_alone(text: str, shown: str) -> None:
    assert read_spans(text) == []
    assert strip_markup(text) == shown


def test_a_span_after_a_broken_one() -> None:
    assert read_spans(f"<|ref|>lost {GIRAFFE}") == read_spans(GIRAFFE)
    assert strip_markup(f"<|ref|>lost {GIRAFFE}") == "lost The giraffe at the back."
    assert read_spans("<|ref|><|/ref|><|det|>[[0, 0, 0, 0]]<|/det|>") == [Span("", ((0, 0, 0, 0),))]


@given(st.lists(st.one_of(SPANS, WORDS), max_size=6))
def test_what_is_written_is_read(parts: list[Span | str]) -> None:
    text = "".join(part if isinstance(part, str) else markup(part) for part in parts)
    assert read_spans(text) == [part for part in parts if isinstance(part, Span)]
    assert strip_markup(text) == "".join(part if isinstance(part, str) else part.label for part in parts)


@given(HOSTILE)
def test_hostile_text_is_read_by_the_rules(text: str) -> None:
    assert (strip_markup(text), read_spans(text)) == by_the_book(text)


@given(st.text(max_size=60))
def test_any_text_without_markers_stays_as_it_is(text: str) -> None:
    assert strip_markup(text) == text
    assert read_spans(text) == []


@given(st.one_of(HOSTILE, SPANS.map(markup)), st.lists(st.integers(0, 200), max_size=12))
def test_streams_give_what_whole_answers_give(text: str, cuts: list[int]) -> None:
    for places in (cuts, range(len(text))):
        shown, spans = read_in_pieces(text, places)
        assert "".join(shown) == strip_markup(text)
        assert spans == read_spans(text)


def test_streams_show_labels_at_once_and_never_a_part_of_markup() -> None:
    shown, _ = read_in_pieces(f"See {GIRAFFE} there", range(200))
    assert "".join(shown) == "See The giraffe at the back. there"
    assert [piece for piece in shown if piece] == list("See The giraffe at the back. there")
    # What cannot become boxes any more is not held back.
    reader = MarkupReader()
    assert [reader.feed(piece) for piece in ("<|ref|>a<|/ref|><|det|>", "[[1", ", x", "y")] == ["a", "", "[[1, x", "y"]


@pytest.mark.parametrize(
    "scrap",
    [
        "<|ref|>",
        "<|ref|>a<|/ref|>",
        "<|ref|>a<|/ref|><|det|>",
        "<|det|>[[",
        "<|ref|>a<|/ref|><|det|>[[1, 2, 3, 4]",
        "<|",
        "<|re",
        "<",
        "[[1, 2, 3, 4], ",
        " ",
        GIRAFFE,
    ],
)
def test_time_is_linear(scrap: str) -> None:
    """Half a megabyte, whole and in crumbs: if time grew with the square of the length, this would take hours."""
    for start in ("", "<|ref|>", "<|ref|>a<|/ref|><|det|>", "<|ref|>a<|/ref|><|det|>[["):
        text = start + scrap * (500_000 // len(scrap))
        assert strip_markup(text + "]]<|/det|>") is not None
    reader = MarkupReader()
    for character in "<|ref|>a<|/ref|><|det|>[[" + scrap * (50_000 // len(scrap)):
        reader.feed(character)
    reader.finish()


# Pixels


def test_pixels_of_the_reference() -> None:
    span = Span("x", ((0, 0, 999, 999), (580, 270, 999, 900), (1, 1, 998, 998), (500, 333, 501, 334)))
    (placed,) = place_spans([span], [(1000, 301)])
    assert placed.boxes == list(span.boxes)
    assert placed.boxes_pixels == [(0, 0, 1000, 301), (580, 81, 1000, 271), (1, 0, 998, 300), (500, 100, 501, 100)]


@given(BOXES, st.integers(1, 20_000), st.integers(1, 20_000))
def test_pixels_are_within_the_picture_and_in_order(box: Box, width: int, height: int) -> None:
    (placed,) = place_spans([Span("x", (box,))], [(width, height)])
    ((left, top, right, bottom),) = placed.boxes_pixels
    assert 0 <= left <= right <= width
    assert 0 <= top <= bottom <= height
    assert (left, bottom) == (int(box[0] / 999 * width), int(box[3] / 999 * height))


def test_which_picture() -> None:
    span, sizes = Span("x", ((0, 0, 999, 999),)), [(10, 20), (30, 40)]
    assert place_spans([span], sizes[:1]) == [Grounding("x", [(0, 0, 999, 999)], [(0, 0, 10, 20)], 0)]
    assert place_spans([span], sizes) == [Grounding("x", [(0, 0, 999, 999)], [(0, 0, 30, 40)], 1)]
    assert place_spans([span], sizes, image_index=0) == place_spans([span], sizes[:1])
    assert place_spans([span], []) == []
    assert place_spans([], sizes) == []
    for index in (-1, 2):
        with pytest.raises(GroundingError, match="there is no picture"):
            place_spans([span], sizes, image_index=index)


# Asking


def test_prompts_of_the_reference() -> None:
    assert locate_prompt("The giraffe at the back.") == "<|ref|>The giraffe at the back.<|/ref|>."
    assert locate_prompt(" the red circle\n") == "<|ref|>the red circle<|/ref|>."
    assert describe_prompt() == "<|grounding|>Describe this image."
    assert describe_prompt("What is it?") == "<|grounding|>What is it?"
    assert describe_prompt("<|grounding|>What is it?") == "<|grounding|>What is it?"


@pytest.mark.parametrize("marker", GROUNDING_MARKERS)
def test_labels_smuggle_no_markers(marker: str) -> None:
    for text in (f"a{marker}b", marker, f"<|ref|{marker}"):
        with pytest.raises(GroundingError, match=re.escape(marker)):
            locate_prompt(text)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(__file__).parents[1] / "goldens" / "mla-softmax" / "checkpoint")


@given(HOSTILE.filter(str.strip), st.sampled_from(["", "<", "<|", "<|/ref", "<|/ref|", "<|User|>", "<image>"]))
def test_a_label_is_framed_by_two_markers_and_has_none_itself(text: str, end: str) -> None:
    try:
        prompt = locate_prompt(text + end)
    except GroundingError:
        assert any(marker in text + end for marker in GROUNDING_MARKERS)
        return
    special = [token for token in tokenizer().encode(prompt) if tokenizer().is_special(token)]
    assert special == [tokenizer().grounding_token_ids[marker] for marker in ("<|ref|>", "<|/ref|>")]
    assert strip_markup(prompt) == f"{(text + end).strip()}."


def user(*content: str | Image.Image) -> Message:
    return Message("user", content)


@pytest.mark.parametrize(
    ("content", "located", "described"),
    [
        ([IMAGE], [IMAGE, "<|ref|>it<|/ref|>."], [IMAGE, "<|grounding|>Describe this image."]),
        ([IMAGE, " \n"], [IMAGE, " \n", "<|ref|>it<|/ref|>."], [IMAGE, " \n", "<|grounding|>Describe this image."]),
        ([IMAGE, ""], [IMAGE, "", "<|ref|>it<|/ref|>."], [IMAGE, "", "<|grounding|>Describe this image."]),
        ([IMAGE, "Find"], [IMAGE, "Find", " ", "<|ref|>it<|/ref|>."], [IMAGE, "<|grounding|>Find"]),
        ([IMAGE, "\nFind "], [IMAGE, "\nFind ", "<|ref|>it<|/ref|>."], [IMAGE, "<|grounding|>Find "]),
        (["Look", IMAGE], ["Look", IMAGE, "<|ref|>it<|/ref|>."], ["<|grounding|>Look", IMAGE]),
    ],
)
def test_the_last_question_asks_for_boxes(
    content: list[str | Image.Image], located: list[str | Image.Image], described: list[str | Image.Image]
) -> None:
    before = [user(IMAGE, "first"), Message("assistant", ("answer",))]
    assert ask_for_boxes([*before, user(*content)], locate="it") == [*before, user(*located)]
    assert ask_for_boxes([*before, user(*content)], describe=True, image_index=1) == [*before, user(*described)]


def test_a_picture_of_an_earlier_turn_will_do() -> None:
    before = [user(IMAGE, "first"), Message("assistant", ("answer",))]
    assert ask_for_boxes([*before, user()], locate="it")[-1] == user("<|ref|>it<|/ref|>.")


def test_when_boxes_cannot_be_asked_for() -> None:
    question = [user(IMAGE, "x")]
    with pytest.raises(GroundingError, match="either"):
        ask_for_boxes(question)
    with pytest.raises(GroundingError, match="either"):
        ask_for_boxes(question, locate="it", describe=True)
    with pytest.raises(GroundingError, match="nothing to locate"):
        ask_for_boxes(question, locate=" ")
    with pytest.raises(GroundingError, match="last message"):
        ask_for_boxes([*question, Message("assistant", ("It",))], locate="it")
    with pytest.raises(GroundingError, match="last message"):
        ask_for_boxes([], describe=True)
    with pytest.raises(GroundingError, match="with a picture"):
        ask_for_boxes([user("x")], describe=True)
    with pytest.raises(GroundingError, match="no picture 1: counted from 0, the conversation has 1"):
        ask_for_boxes(question, describe=True, image_index=1)
