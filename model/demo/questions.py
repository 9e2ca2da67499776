"""Questions about one picture, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from model.demo import phrases
from model.demo.colours import COLOUR_SYNONYMS, GROUND_COLOURS, OBJECT_COLOURS
from model.demo.facts import (
    INVERSE_WORDS,
    RELATION_WORDS,
    Group,
    capital,
    describe,
    grounding,
    groups,
    join,
    name_of,
    quote,
    reading,
    region,
    things_phrase,
)
from model.demo.layout import MOST_LISTED
from model.demo.phrases import roughen
from model.demo.scene import HELD_OUT, Scene, Thing, order_key
from model.demo.shapes import SHAPES
from model.demo.words import NOUNS, PICTOGRAMS, article, number

MOST_BOXES = MOST_LISTED  # asked for in one question


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and the kind of task it is (a row of the evaluation table)."""

    question: str
    answer: str
    kind: str


Dialogue = tuple[Turn, ...]


def synonym(rng: random.Random, noun: str, count: int = 1) -> str:
    """The noun, or now and then another word for it, in the singular or plural."""
    others = NOUNS[noun].synonyms
    if others and rng.random() < 0.25:
        other = rng.choice(others)
        return other if count == 1 else other + "s"
    return name_of(noun, None, count)


def absent(rng: random.Random, scene: Scene) -> tuple[str, str | None]:
    """A noun and colour that the picture does not show; half the time near to something that it does show."""
    shown = {(thing.noun, thing.colour) for thing in scene.things}
    noun: str
    colour: str | None
    while True:
        shapes = [thing for thing in scene.things if thing.colour]
        if shapes and rng.random() < 0.5:
            like = rng.choice(shapes)
            noun, colour = like.noun, rng.choice(list(OBJECT_COLOURS))
            if rng.random() < 0.5:
                noun, colour = rng.choice(SHAPES), like.colour or colour
        elif rng.random() < 0.5:
            noun, colour = rng.choice(SHAPES), rng.choice((None, rng.choice(list(OBJECT_COLOURS))))
        else:
            noun, colour = rng.choice(list(PICTOGRAMS)), None
        there = any(noun == other and colour in (None, other_colour) for other, other_colour in shown)
        if not there and (colour, noun) not in HELD_OUT:
            return noun, colour


def unique(scene: Scene) -> list[Group]:
    """Single things that their noun alone, or noun and colour, picks out; the group's name does."""
    return [group for group in groups(scene) if group.count == 1]


def short_name(rng: random.Random, scene: Scene, group: Group) -> str:
    """A name that picks the group out: its full one, or the bare noun where no other thing bears it."""
    alone = sum(other.noun == group.noun for other in groups(scene)) == 1
    if alone and not group.size and rng.random() < 0.5:
        return synonym(rng, group.noun, group.count)
    return group.name


def caption(rng: random.Random, scene: Scene) -> Turn:
    return Turn(rng.choice(phrases.DESCRIBE), describe(scene), "caption")


def listing(rng: random.Random, scene: Scene) -> Turn | None:
    things = things_phrase(scene)
    answer = f"{capital(things)}." if things else "There are no objects."
    return Turn(rng.choice(phrases.LIST), answer, "list")


def count(rng: random.Random, scene: Scene) -> Turn | None:
    """How many of a kind: by noun, by noun and colour, of all things; sometimes none."""
    found = groups(scene)
    chance = rng.random()
    if chance < 0.1 or not found:
        noun, colour = absent(rng, scene)
        total = 0
    elif chance < 0.25:
        word, total = "objects", len(scene.things)
        if all(thing.colour for thing in scene.things) and rng.random() < 0.5:
            word = "shapes"
        answer = f"There is one {word[:-1]}." if total == 1 else f"There are {number(total)} {word}."
        return Turn(rng.choice(phrases.COUNT).format(word), answer, "count")
    else:
        group = max(rng.sample(found, min(2, len(found))), key=lambda g: g.count)
        noun = group.noun
        colour = group.colour if rng.random() < 0.4 else None
        total = sum(other.count for other in found if other.noun == noun and colour in (None, other.colour))
    asked = synonym(rng, noun, 2) if colour is None else name_of(noun, colour, 2)
    verb = "is" if total == 1 else "are"
    answer = f"There {verb} {number(total)} {name_of(noun, colour, total)}."
    return Turn(rng.choice(phrases.COUNT).format(asked), answer, "count")


def read(rng: random.Random, scene: Scene) -> Turn | None:
    """What is printed, or that nothing is."""
    question = rng.choice(phrases.READ)
    if scene.prints:
        return Turn(question, reading(scene, "say"), "read")
    return Turn(question, "There is no text.", "read") if rng.random() < 0.15 else None


def colour(rng: random.Random, scene: Scene) -> Turn | None:
    """The colour of a shape, of the background, of the text."""
    chance = rng.random()
    if chance < 0.25:
        question = rng.choice(phrases.COLOUR).format("background")
        return Turn(question, f"The background is {scene.ground}.", "colour")
    if chance < 0.4 and len(scene.prints) == 1:
        question = rng.choice(phrases.COLOUR).format(rng.choice(("text", "word", "writing")))
        return Turn(question, f"The text is {scene.prints[0].colour}.", "colour")
    coloured = [group for group in groups(scene) if group.colour]
    single = [group for group in coloured if sum(other.noun == group.noun for other in coloured) == 1]
    if not single:
        return None
    group = rng.choice(single)
    if len(groups(scene)) == 1 and group.count == 1 and rng.random() < 0.2:
        question = rng.choice(phrases.COLOUR_IT)
    else:
        forms = phrases.COLOUR if group.count == 1 else phrases.COLOUR_PLURAL
        question = rng.choice(forms).format(synonym(rng, group.noun, group.count))
    verb = "is" if group.count == 1 else "are"
    return Turn(question, f"The {name_of(group.noun, None, group.count)} {verb} {group.colour}.", "colour")


def what_is_coloured(rng: random.Random, scene: Scene) -> Turn | None:
    """Which thing has a colour that only it has."""
    candidates = [group for group in groups(scene) if group.colour and group.count == 1]
    candidates = [g for g in candidates if sum(other.colour == g.colour for other in groups(scene)) == 1]
    if not candidates or any(thing.colour is None for thing in scene.things):
        return None
    group = rng.choice(candidates)
    assert group.colour is not None
    asked = rng.choice((group.colour, group.colour, *COLOUR_SYNONYMS.get(group.colour, ())))
    question = rng.choice(phrases.WHICH_COLOUR).format(asked)
    return Turn(question, f"The {group.colour} object is {article(group.noun)}.", "colour")


def yes_no(rng: random.Random, scene: Scene) -> Turn | None:
    """Is there such a thing, is it of that colour, are there so many, is there text, does it stand there."""
    writers: list[Callable[[random.Random, Scene], Turn | None]] = [_exists, _exists, _exists, _is_colour, _are_so_many]
    writers += [_has_text, _ground_is, _stands]
    return rng.choice(writers)(rng, scene)


def _exists(rng: random.Random, scene: Scene) -> Turn | None:
    found = groups(scene)
    if found and rng.random() < 0.5:
        group = rng.choice(found)
        tint = group.colour if group.colour and rng.random() < 0.5 else None
        total = sum(other.count for other in found if other.noun == group.noun and tint in (None, other.colour))
        if total > 1 and rng.random() < 0.7:
            asked = synonym(rng, group.noun, 2) if tint is None else name_of(group.noun, tint, 2)
            answer = f"Yes, there are {number(total)} {name_of(group.noun, tint, total)}."
            return Turn(rng.choice(phrases.ARE_THERE).format(asked), answer, "yes/no")
        asked = synonym(rng, group.noun) if tint is None else name_of(group.noun, tint, 1)
        told = name_of(group.noun, tint, total)
        answer = f"Yes, there is {article(told)}." if total == 1 else f"Yes, there are {number(total)} {told}."
        return Turn(rng.choice(phrases.IS_THERE).format(article(asked)), answer, "yes/no")
    noun, tint = absent(rng, scene)
    if rng.random() < 0.25:
        asked = rng.choice(("", "any ")) + name_of(noun, tint, 2)
        return Turn(
            rng.choice(phrases.ARE_THERE).format(asked), f"No, there are no {name_of(noun, tint, 2)}.", "yes/no"
        )
    asked = synonym(rng, noun) if tint is None else name_of(noun, tint, 1)
    answer = f"No, there is no {name_of(noun, tint, 1)}."
    return Turn(rng.choice(phrases.IS_THERE).format(article(asked)), answer, "yes/no")


def _is_colour(rng: random.Random, scene: Scene) -> Turn | None:
    coloured = [group for group in groups(scene) if group.colour]
    single = [group for group in coloured if sum(other.noun == group.noun for other in coloured) == 1]
    if not single:
        return None
    group = rng.choice(single)
    others = [name for name in OBJECT_COLOURS if name != group.colour and (name, group.noun) not in HELD_OUT]
    asked = group.colour if rng.random() < 0.5 else rng.choice(others)
    verb = "is" if group.count == 1 else "are"
    name = name_of(group.noun, None, group.count)
    answer = f"{'Yes' if asked == group.colour else 'No'}, the {name} {verb} {group.colour}."
    return Turn(f"{capital(verb)} the {name} {asked}?", answer, "yes/no")


def _are_so_many(rng: random.Random, scene: Scene) -> Turn | None:
    many = [group for group in groups(scene) if sum(o.noun == group.noun for o in groups(scene)) == 1]
    if not many:
        return None
    group = max(many, key=lambda g: g.count)
    asked = group.count if rng.random() < 0.5 else max(2, group.count + rng.choice((-1, 1)))
    if asked == 1:
        return None
    told = f"there are {number(group.count)}" if group.count > 1 else "there is one"
    answer = f"{'Yes' if asked == group.count else 'No'}, {told} {name_of(group.noun, None, group.count)}."
    return Turn(f"Are there {number(asked)} {name_of(group.noun, None, 2)}?", answer, "yes/no")


def _has_text(rng: random.Random, scene: Scene) -> Turn | None:
    question = rng.choice(("Is there any text?", "Is there text in the image?", "Does the picture contain text?"))
    if scene.prints:
        return Turn(question, f"Yes, {reading(scene, 'say')[0].lower()}{reading(scene, 'say')[1:]}", "yes/no")
    return Turn(question, "No, there is no text.", "yes/no") if rng.random() < 0.5 else None


def _ground_is(rng: random.Random, scene: Scene) -> Turn | None:
    asked = scene.ground if rng.random() < 0.5 else rng.choice(list(GROUND_COLOURS))
    answer = f"{'Yes' if asked == scene.ground else 'No'}, the background is {scene.ground}."
    return Turn(f"Is the background {asked}?", answer, "yes/no")


def _stands(rng: random.Random, scene: Scene) -> Turn | None:
    """Is the first to the left of (above, in front of, inside) the second, or the other way round."""
    if scene.relation not in RELATION_WORDS:
        return None
    first, second = groups(scene)
    word, inverse = RELATION_WORDS[scene.relation], INVERSE_WORDS[scene.relation]
    asked = rng.choice((word, inverse)) if scene.relation in ("beside", "above") else word
    answer = f"{'Yes' if asked == word else 'No'}, the {first.name} is {word} the {second.name}."
    return Turn(f"Is the {first.name} {asked} the {second.name}?", answer, "yes/no")


def where(rng: random.Random, scene: Scene) -> Turn | None:
    """The region of the picture that a single thing or the text is in."""
    if len(scene.prints) == 1 and rng.random() < 0.3:
        place = region(scene.prints[0].box, scene.size)
        return Turn(rng.choice(phrases.WHERE).format("text"), f"The text is {place}.", "where") if place else None
    placed = [(group, region(group.things[0].box, scene.size)) for group in unique(scene)]
    placed = [(group, place) for group, place in placed if place]
    if not placed:
        return None
    group, place = rng.choice(placed)
    if len(scene.things) == 1 and rng.random() < 0.2:
        return Turn(rng.choice(phrases.WHERE_IT), f"The {group.name} is {place}.", "where")
    asked = short_name(rng, scene, group)
    told = group.name if asked == group.name else group.noun
    return Turn(rng.choice(phrases.WHERE).format(asked), f"The {told} is {place}.", "where")


def relation(rng: random.Random, scene: Scene) -> Turn | None:
    """What stands to the left of it, which is larger, what is in the middle, does anything overlap."""
    parts = groups(scene)
    if scene.relation in ("row", "column") and len(parts) == len(scene.things) >= 3:
        ends = ("on the left", "on the right") if scene.relation == "row" else ("at the top", "at the bottom")
        places = [(ends[0], parts[0]), (ends[1], parts[-1])] + (
            [("in the middle", parts[1])] if len(parts) == 3 else []
        )
        place, group = rng.choice(places)
        question = rng.choice(("What is {}?", "Which object is {}?", "What do you see {}?")).format(place)
        return Turn(question, f"{capital(group.phrase)} is {place}.", "relation")
    if len(scene.things) != 2 or len(parts) != 2:
        return None
    first, second = parts
    lengths = [max(t.box[2] - t.box[0], t.box[3] - t.box[1]) for t in (first.things[0], second.things[0])]
    if max(lengths) > 1.5 * min(lengths) and rng.random() < 0.4:
        larger, smaller = (first, second) if lengths[0] > lengths[1] else (second, first)
        word, group = rng.choice((("larger", larger), ("smaller", smaller)))
        ask = rng.choice((word, {"larger": "bigger", "smaller": "smaller"}[word]))
        either = [first.name, second.name]
        rng.shuffle(either)
        forms = (f"Which is {ask}, the {either[0]} or the {either[1]}?", f"Which object is {ask}?", f"What is {ask}?")
        return Turn(rng.choice(forms), f"The {group.name} is {word}.", "relation")
    if scene.relation not in RELATION_WORDS:
        return None
    if scene.relation == "front" and rng.random() < 0.3:
        question = rng.choice(("Do any objects overlap?", "Does anything overlap?", "Do they overlap?"))
        return Turn(question, f"Yes, the {first.name} is in front of the {second.name}.", "relation")
    if scene.relation in ("beside", "above") and rng.random() < 0.08:
        return Turn(rng.choice(("Do any objects overlap?", "Do they overlap?")), "No, nothing overlaps.", "relation")
    sides = [(first, RELATION_WORDS[scene.relation], second), (second, INVERSE_WORDS[scene.relation], first)]
    subject, word, anchor = rng.choice(sides[:1] if scene.relation == "inside" else sides)
    question = rng.choice((f"What is {word} the {anchor.name}?", f"Which object is {word} the {anchor.name}?"))
    return Turn(question, f"{capital(subject.phrase)} is {word} the {anchor.name}.", "relation")


def box(rng: random.Random, scene: Scene) -> Turn | None:
    """Boxes of a thing, of several alike, of the text; or that there is no such thing."""
    chance = rng.random()
    if chance < 0.04:
        noun, tint = absent(rng, scene)
        asked = f"the {name_of(noun, tint, 1)}"
        return Turn(rng.choice(phrases.LOCATE).format(asked), f"There is no {name_of(noun, tint, 1)}.", "no box")
    if scene.prints and (chance < 0.35 or not scene.things):
        if len(scene.prints) == 1:
            label, boxes = rng.choice(("the text", "the text", "the word")), [scene.prints[0].box]
        else:
            chosen = rng.choice(scene.prints)
            label, boxes = (
                rng.choice((f"the text {quote(chosen.text)}", f"the word {quote(chosen.text)}")),
                [chosen.box],
            )
        return Turn(rng.choice(phrases.LOCATE).format(label), grounding(label, boxes, scene.size), "box")
    found = groups(scene)
    if not found:
        return None
    group = rng.choice(found)
    alike = [other for other in found if other.noun == group.noun]
    if len(alike) > 1 and not group.size and rng.random() < 0.3:
        members = [thing for thing in listed(scene) if thing.noun == group.noun]
        label, boxes = f"the {name_of(group.noun, None, 2)}", [thing.box for thing in members]
    else:
        label, boxes = f"the {short_name(rng, scene, group)}", [thing.box for thing in group.things]
        if rng.random() < 0.1 and group.count == 1:
            label = label.replace("the ", article(group.name).split(" ")[0] + " ", 1)
            label = article(label.split(" ", 1)[1])
    if len(boxes) > MOST_BOXES:
        return None
    return Turn(rng.choice(phrases.LOCATE).format(label), grounding(label, boxes, scene.size), "box")


def listed(scene: Scene) -> list[Thing]:
    """All things in listing order."""
    return sorted(scene.things, key=lambda thing: order_key(thing.box, scene.size))


def grounded_caption(rng: random.Random, scene: Scene) -> Turn | None:
    """The caption's things, each with its boxes."""
    parts = groups(scene)
    if not parts or len(scene.things) > 4 or (scene.relation in ("row", "column") and len(parts) > 2):
        return None
    marked = [grounding(g.phrase, [thing.box for thing in g.things], scene.size) for g in parts]
    if scene.relation in RELATION_WORDS:
        answer = f"{marked[0]} {RELATION_WORDS[scene.relation]} {marked[1]}"
    else:
        answer = join(marked)
    answer = f"{answer} on {article(scene.ground)} background."
    return Turn(rng.choice(phrases.GROUNDED), answer, "grounded")


Writer = Callable[[random.Random, Scene], "Turn | None"]
WRITERS: dict[str, tuple[Writer, float]] = {
    "caption": (caption, 1.5),
    "list": (listing, 0.6),
    "count": (count, 2.0),
    "read": (read, 3.0),
    "colour": (colour, 1.6),
    "what": (what_is_coloured, 0.5),
    "yes/no": (yes_no, 2.2),
    "where": (where, 1.6),
    "relation": (relation, 1.5),
    "box": (box, 3.2),
    "grounded": (grounded_caption, 0.35),
}


def ask(rng: random.Random, scene: Scene, kind: str | None = None) -> Turn | None:
    """One question of a kind, or of a random one; None when the scene does not lend itself to it."""
    if kind is None:
        kind = rng.choices(list(WRITERS), [weight for _, weight in WRITERS.values()])[0]
    turn = WRITERS[kind][0](rng, scene)
    return None if turn is None else Turn(roughen(rng, turn.question), turn.answer, turn.kind)


def dialogues(rng: random.Random, scene: Scene) -> Iterator[Dialogue]:
    """Endlessly many conversations about one picture. The first has the caption, most have one turn, some four."""
    opening = ask(rng, scene, "caption")
    assert opening is not None
    turns: list[Turn] = [opening]
    while True:
        length = 1 if rng.random() < 0.86 else rng.choice((2, 2, 3, 4))
        while len(turns) < length:
            turn = ask(rng, scene)
            if turn is not None:
                turns.append(turn)
        yield tuple(turns)
        turns = []
        while not turns:
            turn = ask(rng, scene)
            turns = [turn] if turn is not None else []
