"""Scenes: one seed one picture, boxes as drawn, held-out pairs held out, every kind of size."""

import random

import numpy as np
import pytest

from model.demo.architecture import CANDIDATES
from model.demo.colours import GROUND_COLOURS, OBJECT_COLOURS, Range, sample_ground, to_lab
from model.demo.facts import describe
from model.demo.fonts import Fonts
from model.demo.scene import HELD_OUT, Request
from model.demo.scenes import random_scene
from model.image import tile_grid

REQUESTS = [Request(), Request(simple=True), Request("double"), Request("quad", small_print=True), Request(brief=True)]


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_seed_gives_one_scene(request_: Request, fonts: Fonts) -> None:
    first, second = (random_scene(random.Random("seed"), fonts, request_) for _ in range(2))
    assert first.image.tobytes() == second.image.tobytes()
    assert (first.things, first.prints, describe(first)) == (second.things, second.prints, describe(second))
    assert random_scene(random.Random("other"), fonts, request_).image.tobytes() != first.image.tobytes()


@pytest.mark.parametrize("seed", range(40))
def test_boxes_hold_the_drawn_pixels(seed: int, fonts: Fonts) -> None:
    scene = random_scene(random.Random(seed), fonts, REQUESTS[seed % len(REQUESTS)])
    boxes = [*(found.box for found in scene.things), *(found.box for found in scene.prints)]
    for owner, box in enumerate(boxes, start=1):
        rows, columns = np.nonzero(scene.ids == owner)
        drawn = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        covered = scene.relation in ("front", "inside") and owner == 2
        if covered:
            assert all(inner >= outer for inner, outer in zip(drawn[:2], box[:2], strict=True))
            assert all(inner <= outer for inner, outer in zip(drawn[2:], box[2:], strict=True))
        else:
            assert drawn == box
    assert set(np.unique(scene.ids)) <= set(range(len(scene.things) + len(scene.prints) + 1))


@pytest.mark.parametrize("tiles", ["single", "double", "quad"])
def test_sizes_take_the_wanted_tiles(tiles: str, fonts: Fonts) -> None:
    allowed = {"single": {1}, "double": {2}, "quad": {3, 4}}[tiles]
    for seed in range(12):
        scene = random_scene(random.Random(seed), fonts, Request(tiles))  # type: ignore[arg-type]
        columns, rows = tile_grid(scene.size, CANDIDATES, tiled=True)
        assert columns * rows in allowed


def test_held_out_pairs_are_never_drawn_in_training(fonts: Fonts) -> None:
    shown = {
        (thing.colour, thing.noun)
        for seed in range(250)
        for thing in random_scene(random.Random(seed), fonts, Request(brief=seed % 2 == 0)).things
    }
    assert not shown & HELD_OUT
    held_out = random_scene(random.Random(1), fonts, Request(held_out=True))
    assert {(thing.colour, thing.noun) for thing in held_out.things} <= HELD_OUT


@pytest.mark.parametrize("ranges", [OBJECT_COLOURS, GROUND_COLOURS], ids=["objects", "grounds"])
def test_named_colours_do_not_meet(ranges: dict[str, tuple[Range, ...]]) -> None:
    """Samples of two names never come near to each other, so that each has one name."""
    rng = random.Random(3)
    samples = {name: [to_lab(rng.choice(mine).sample(rng)) for _ in range(150)] for name, mine in ranges.items()}
    for name, mine in samples.items():
        for other, theirs in samples.items():
            if name < other:
                gaps = np.linalg.norm(np.array(mine)[:, None] - np.array(theirs)[None], axis=-1)
                assert gaps.min() > 8, f"{name} and {other}"


def test_grounds_cover_their_names() -> None:
    rng = random.Random(4)
    assert {sample_ground(rng)[0] for _ in range(1500)} == set(GROUND_COLOURS)
