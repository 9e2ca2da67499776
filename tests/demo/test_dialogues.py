"""Answers agree with what was drawn, read off the scene again; held-out pairs are neither drawn nor mentioned."""

import random
import re
from collections.abc import Iterator
from itertools import islice

import pytest

from model.demo import chat, pairs, questions
from model.demo.evaluate import boxes_of, overlap
from model.demo.facts import box_text
from model.demo.fonts import Fonts
from model.demo.questions import Dialogue, Turn
from model.demo.rows import PRINTED_WEIGHT, WEIGHT, Wording
from model.demo.scene import HELD_OUT, Request, Scene
from model.demo.scenes import random_scene
from model.demo.words import NOUNS, NUMBERS
from model.tokenizer import Tokenizer

SCENES = 60
TURNS = 25
QUOTED = re.compile(r'"([^"]+)"')


@pytest.fixture(scope="module")
def asked(fonts: Fonts) -> list[tuple[Scene, list[Turn]]]:
    found = []
    for seed in range(SCENES):
        rng = random.Random(f"dialogues {seed}")
        scene = random_scene(rng, fonts, Request("single" if seed % 3 else "quad"))
        turns = [turn for dialogue in islice(questions.dialogues(rng, scene), TURNS) for turn in dialogue]
        found.append((scene, turns))
    return found


def _of_kind(asked: list[tuple[Scene, list[Turn]]], *kinds: str) -> Iterator[tuple[Scene, Turn]]:
    found = [(scene, turn) for scene, turns in asked for turn in turns if turn.kind in kinds]
    assert len(found) > 20
    yield from found


def _named(scene: Scene, phrase: str) -> int:
    """How many things a phrase such as "red circles" means."""
    if phrase in ("object", "objects", "shape", "shapes"):
        return len(scene.things)
    return sum(
        phrase.removeprefix(f"{thing.colour} ") in (NOUNS[thing.noun].name, NOUNS[thing.noun].plural)
        for thing in scene.things
        if not any(phrase.startswith(f"{colour} ") and colour != thing.colour for colour in _colours(scene))
    )


def _colours(scene: Scene) -> set[str]:
    return {thing.colour for thing in scene.things if thing.colour}


def test_counts(asked: list[tuple[Scene, list[Turn]]]) -> None:
    for scene, turn in _of_kind(asked, "count"):
        match = re.fullmatch(r"There (is|are) (\w+) (.+)\.", turn.answer)
        assert match is not None, turn
        assert NUMBERS.index(match[2]) == _named(scene, match[3]), turn
        assert (match[1] == "is") == (match[2] == "one")


def test_reading(asked: list[tuple[Scene, list[Turn]]]) -> None:
    for scene, turn in _of_kind(asked, "read", "caption"):
        assert QUOTED.findall(turn.answer) == [found.text for found in scene.prints], turn


def test_colours_named(asked: list[tuple[Scene, list[Turn]]]) -> None:
    for scene, turn in _of_kind(asked, "colour"):
        if match := re.fullmatch(r"The (\w+) object is an? (\w+)\.", turn.answer):
            assert [thing.noun for thing in scene.things if thing.colour == match[1]] == [match[2]], turn
            continue
        match = re.fullmatch(r"The (.+) (?:is|are) (.+)\.", turn.answer)
        assert match is not None, turn
        subject, colour = match.groups()
        if subject == "background":
            assert colour == scene.ground
        elif subject == "text":
            assert colour == scene.prints[0].colour
        else:
            nouns = [t for t in scene.things if subject in (NOUNS[t.noun].name, NOUNS[t.noun].plural)]
            assert {thing.colour for thing in nouns} == {colour}, turn


def test_yes_and_no(asked: list[tuple[Scene, list[Turn]]]) -> None:
    """Existence, the commonest question, counted anew."""
    checked = 0
    for scene, turn in _of_kind(asked, "yes/no"):
        if match := re.fullmatch(r"No, there (?:is|are) no (.+)\.", turn.answer):
            assert match[1] == "text" or not _named(scene, match[1]), turn
        elif match := re.fullmatch(r"Yes, there (?:is an?|are (\w+)) (.+)\.", turn.answer):
            assert _named(scene, match[2]) == (NUMBERS.index(match[1]) if match[1] else 1), turn
        else:
            continue
        checked += 1
    assert checked > 50


def test_boxes(asked: list[tuple[Scene, list[Turn]]]) -> None:
    for scene, turn in _of_kind(asked, "box"):
        drawn = {
            box_text(box, scene.size)
            for box in (*(found.box for found in scene.things), *(found.box for found in scene.prints))
        }
        given = re.findall(r"\[\d+, \d+, \d+, \d+\]", turn.answer)
        assert given and set(given) <= drawn and len(set(given)) == len(given), turn
        for box in boxes_of(turn.answer):
            assert 0 <= box[0] < box[2] <= 999 and 0 <= box[1] < box[3] <= 999
            assert overlap(box, box) == 1


def _mentions_held_out(turn: Turn) -> bool:
    text = f"{turn.question} {turn.answer}".lower()
    for colour, noun in HELD_OUT:
        words = "|".join((NOUNS[noun].name, NOUNS[noun].plural, *NOUNS[noun].synonyms))
        if re.search(rf"\b{colour} (?:{words})\b|\bis the (?:{words}) {colour}\b", text):
            return True
    return False


def test_held_out_pairs_are_not_mentioned(asked: list[tuple[Scene, list[Turn]]], fonts: Fonts) -> None:
    assert _mentions_held_out(Turn("Is there a purple star?", "No.", "yes/no"))
    for scene, turns in asked:
        assert not {(thing.colour, thing.noun) for thing in scene.things} & HELD_OUT
        assert not any(map(_mentions_held_out, turns))
    for seed in range(12):
        rng = random.Random(f"pairs {seed}")
        scenes = pairs.random_scenes(rng, fonts, 2, ("single", "single"))
        assert not {(thing.colour, thing.noun) for scene in scenes for thing in scene.things} & HELD_OUT
        dialogues: list[Dialogue] = list(islice(pairs.dialogues(rng, scenes), 20))
        assert not any(_mentions_held_out(turn) for dialogue in dialogues for turn in dialogue)


def test_which_of_two(fonts: Fonts) -> None:
    checked = 0
    for seed in range(25):
        rng = random.Random(f"which {seed}")
        scenes = pairs.random_scenes(rng, fonts, 2, ("single", "single"))
        for dialogue in islice(pairs.dialogues(rng, scenes), 20):
            for turn in dialogue:
                match = re.fullmatch(r"The (first|second) picture shows the (.+)\.", turn.answer)
                if match:
                    mine = ("first", "second").index(match[1])
                    assert _named(scenes[mine], match[2]) and not _named(scenes[1 - mine], match[2]), turn
                    checked += 1
    assert checked > 30


def test_talk_without_a_picture_asks_for_one() -> None:
    rng = random.Random(1)
    answers = {turn.answer for _ in range(200) for turn in chat.text_only(rng)}
    assert {chat.SELF, chat.NO_PICTURE, chat.LIMITS} <= answers
    assert all(turn.question for turn in chat.text_only(rng))


@pytest.mark.parametrize(
    ("answer", "heavy"),
    [
        ('The text says "A1 b".', 'A1 b"'),
        ('<|ref|>the text "42"<|/ref|><|det|>[[7, 10, 21, 30]]<|/det|>', '42"'),
        ("There are two red circles.", ""),
    ],
)
def test_weights_of_answers(answer: str, heavy: str, tokenizer: Tokenizer, wording: Wording) -> None:
    """Printed characters and the end of the print count more."""
    ids = wording.encode(answer)
    weights = wording.weights(ids)
    found = {
        weight: b"".join(tokenizer.token_bytes(i) for i, w in zip(ids, weights, strict=True) if w == weight).decode()
        for weight in (PRINTED_WEIGHT, WEIGHT)
    }
    assert found[PRINTED_WEIGHT] == heavy
    assert len(found[WEIGHT]) == len(answer) - len(heavy)
