"""Two and three pictures in one conversation: the scenes, and questions that compare them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from model.demo.facts import capital, describe, groups, join, name_of, quote, things_phrase
from model.demo.fonts import Fonts
from model.demo.phrases import COUNT, DESCRIBE, READ, roughen
from model.demo.questions import Dialogue, Turn
from model.demo.scene import Request, Scene, Tiles
from model.demo.scenes import random_scene
from model.demo.words import NOUNS, article, number

ORDINALS = ("first", "second", "third")


def random_scenes(rng: random.Random, fonts: Fonts, count: int, tiles: Sequence[Tiles]) -> list[Scene]:
    """Scenes for one conversation: few things each, described differently, but for a few pairs of the same picture."""
    scenes: list[Scene] = []
    while len(scenes) < count:
        like = rng.choice(scenes[0].things).noun if scenes and scenes[0].things and rng.random() < 0.35 else None
        scene = random_scene(rng, fonts, Request(tiles=tiles[len(scenes)], brief=True, like=like))
        if not scene.things and not scene.prints:
            continue
        if describe(scene) in [describe(other) for other in scenes]:
            continue
        scenes.append(scene)
    if count == 2 and tiles[0] == tiles[1] and rng.random() < 0.06:
        scenes[1] = scenes[0]
    return scenes


def dialogues(rng: random.Random, scenes: Sequence[Scene]) -> Iterator[Dialogue]:
    """Endlessly many conversations about several pictures."""
    while True:
        turns: list[Turn] = []
        length = 1 if rng.random() < 0.9 else 2
        while len(turns) < length:
            writer = rng.choices(list(_WRITERS), list(_WRITERS.values()))[0]
            turn = writer(rng, scenes)
            if turn is not None:
                turns.append(Turn(roughen(rng, turn.question), turn.answer, turn.kind))
        yield tuple(turns)


def ordinal(rng: random.Random, index: int) -> str:
    """How a question names one of the pictures."""
    word = ORDINALS[index]
    return rng.choice(
        (f"the {word} picture", f"the {word} image", f"the {word} one", f"picture {index + 1}", f"image {index + 1}")
    )


def describe_one(rng: random.Random, scenes: Sequence[Scene]) -> Turn:
    """The caption of one of the pictures."""
    index = rng.randrange(len(scenes))
    which = ordinal(rng, index)
    forms = (
        "Describe {}.",
        "What is in {}?",
        "What does {} show?",
        "What do you see in {}?",
        "Caption {}.",
        "What is {}?",
    )
    return Turn(rng.choice(forms).format(which), describe(scenes[index]), "one of several")


def describe_all(rng: random.Random, scenes: Sequence[Scene]) -> Turn:
    """The captions of all pictures, one after the other; a plain "Describe this image." means all of them too."""
    forms = (
        "Describe the pictures.",
        "Describe both pictures.",
        "Describe both images.",
        "Describe these images.",
        "What is in these pictures?",
        "What do the pictures show?",
        "Caption both.",
        "What are these?",
        *rng.sample(DESCRIBE, 6),
    )
    question = rng.choice(forms)
    if len(scenes) > 2:
        question = question.replace("both", f"all {number(len(scenes))}")
    answer = " ".join(f"{capital(ORDINALS[index])}: {describe(scene)}" for index, scene in enumerate(scenes))
    return Turn(question, answer, "all of several")


def which_shows(rng: random.Random, scenes: Sequence[Scene]) -> Turn | None:
    """Which picture shows a thing that only one of them has."""
    index = rng.randrange(len(scenes))
    own = groups(scenes[index])
    if not own:
        return None
    group = rng.choice(own)
    tint = group.colour if rng.random() < 0.5 else None
    if any(_has(other, group.noun, tint) for place, other in enumerate(scenes) if place != index):
        return None
    total = sum(g.count for g in own if g.noun == group.noun and tint in (None, g.colour))
    thing = name_of(group.noun, tint, total)
    asked = thing
    if tint is None and total == 1 and NOUNS[group.noun].synonyms and rng.random() < 0.2:
        asked = rng.choice(NOUNS[group.noun].synonyms)
    noun = rng.choice(("picture", "image", "one"))
    forms = (
        f"Which {noun} shows the {asked}?",
        f"Which {noun} shows {article(asked)}?" if total == 1 else f"Which {noun} shows the {asked}?",
        f"Which {noun} has the {asked}?",
        f"Which of the pictures shows the {asked}?",
        f"In which picture {'is' if total == 1 else 'are'} the {asked}?",
        f"Where {'is' if total == 1 else 'are'} the {asked}, in the first or the second picture?",
    )
    question = rng.choice(forms[:-1] if len(scenes) > 2 else forms)
    return Turn(question, f"The {ORDINALS[index]} picture shows the {thing}.", "which one")


def _has(scene: Scene, noun: str, colour: str | None) -> bool:
    return any(thing.noun == noun and colour in (None, thing.colour) for thing in scene.things)


def which_is(rng: random.Random, scenes: Sequence[Scene]) -> Turn | None:
    """Which picture's thing, background or text has a colour."""
    index = rng.randrange(len(scenes))
    if rng.random() < 0.25:
        ground = scenes[index].ground
        if sum(scene.ground == ground for scene in scenes) > 1:
            return None
        question = rng.choice(
            (f"Which picture has {article(ground)} background?", f"Which one has the {ground} background?")
        )
        return Turn(question, f"The {ORDINALS[index]} picture has {article(ground)} background.", "which one")
    colours = [{thing.colour for thing in scene.things} for scene in scenes]
    if len(colours[index]) != 1 or None in colours[index]:
        return None
    colour = next(iter(colours[index]))
    if sum(colour in found for found in colours) > 1:
        return None
    forms = (
        f"Which is {colour}, the first or the second?",
        f"Which one is {colour}, the first or the second?",
        f"Which one is {colour}?",
        f"Which picture shows something {colour}?",
        f"Which is {colour}?",
    )
    question = rng.choice(forms if len(scenes) == 2 else forms[2:])
    return Turn(question, f"The {ORDINALS[index]} one is {colour}.", "which one")


def which_reads(rng: random.Random, scenes: Sequence[Scene]) -> Turn | None:
    """Which picture has text, which has this text, or what the text of one says."""
    index = rng.randrange(len(scenes))
    if len(scenes[index].prints) != 1:
        return None
    text = quote(scenes[index].prints[0].text)
    alone = sum(bool(scene.prints) for scene in scenes) == 1
    if alone and rng.random() < 0.5:
        question = rng.choice(("Which picture has text?", "Which one has text?", "Which image shows a word?"))
        return Turn(question, f"The {ORDINALS[index]} picture has text.", "which one")
    if alone and rng.random() < 0.3:
        return Turn(rng.choice(READ), f"The text says {text}.", "read one of several")
    elsewhere = [quote(found.text) for place, scene in enumerate(scenes) if place != index for found in scene.prints]
    if text not in elsewhere and rng.random() < 0.3:
        forms = (f"Which picture says {text}?", f"Which one says {text}?", f"Which image has the word {text}?")
        return Turn(rng.choice(forms), f"The {ORDINALS[index]} picture says {text}.", "which one")
    which = ordinal(rng, index)
    asking = ("What does {} say?", "What is written in {}?", "Read the text in {}.", "What does the text in {} say?")
    return Turn(rng.choice(asking).format(which), f"The text says {text}.", "read one of several")


def count_each(rng: random.Random, scenes: Sequence[Scene]) -> Turn | None:
    """How many of a thing one picture, each of them, or all together show; which shows more."""
    index = rng.randrange(len(scenes))
    if not scenes[index].things:
        return None
    noun = rng.choice(scenes[index].things).noun
    totals = [sum(thing.noun == noun for thing in scene.things) for scene in scenes]
    plural = name_of(noun, None, 2)
    chance = rng.random()
    if chance < 0.35:
        which = ordinal(rng, index)
        verb = "is" if totals[index] == 1 else "are"
        answer = f"There {verb} {number(totals[index])} {name_of(noun, None, totals[index])}."
        return Turn(f"How many {plural} are in {which}?", answer, "count in several")
    if chance < 0.55 and sum(totals) < 11:
        total = sum(totals)
        question = rng.choice(COUNT).format(plural) if rng.random() < 0.3 else f"How many {plural} are there in total?"
        verb = "is" if total == 1 else "are"
        return Turn(question, f"There {verb} {number(total)} {name_of(noun, None, total)}.", "count in several")
    if len(scenes) == 2 and totals[0] != totals[1] and min(totals) > 0:
        more = 0 if totals[0] > totals[1] else 1
        question = rng.choice((f"Which picture has more {plural}?", f"Which one shows more {plural}?"))
        return Turn(question, f"The {ORDINALS[more]} picture has more {plural}.", "which one")
    return None


def compare(rng: random.Random, scenes: Sequence[Scene]) -> Turn | None:
    """Whether two pictures show the same, and what differs."""
    if len(scenes) != 2:
        return None
    forms = (
        "What differs?",
        "What is the difference?",
        "What is different?",
        "Compare the pictures.",
        "What is the difference between the two pictures?",
        "What is different between the images?",
        "How do they differ?",
        "What changed?",
    )
    if scenes[0] is scenes[1]:
        question = rng.choice(
            (*forms, "Are they the same?", "Do both pictures show the same?", "Are the pictures the same?")
        )
        return Turn(question, "Both pictures are the same.", "difference")
    things = [things_phrase(scene) or "no object" for scene in scenes]
    if rng.random() < 0.3:
        question = rng.choice(("Are they the same?", "Do both pictures show the same?", "Are the pictures the same?"))
        return Turn(question, f"No, {_difference(scenes, things)}.", "difference")
    return Turn(rng.choice(forms), f"{capital(_difference(scenes, things))}.", "difference")


def _difference(scenes: Sequence[Scene], things: list[str]) -> str:
    """What tells the two pictures apart: their things, or else their backgrounds, or else their texts."""
    if things[0] != things[1]:
        return f"the first picture shows {things[0]}, the second {things[1]}"
    if scenes[0].ground != scenes[1].ground:
        return f"the background of the first picture is {scenes[0].ground}, of the second {scenes[1].ground}"
    texts = [join([quote(found.text) for found in scene.prints]) if scene.prints else "nothing" for scene in scenes]
    return f"the text of the first picture says {texts[0]}, of the second {texts[1]}"


_WRITERS = {
    describe_one: 2.5,
    describe_all: 1.5,
    which_shows: 2.5,
    which_is: 2.0,
    which_reads: 1.5,
    count_each: 1.2,
    compare: 1.6,
}
