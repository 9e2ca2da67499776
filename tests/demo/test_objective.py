"""The losses see pictures as from many cameras; the helper heads know what patches show."""

import math
import random

import torch

from model.demo.architecture import CANDIDATES
from model.demo.facts import scaled_box
from model.demo.fonts import Fonts
from model.demo.labels import cut
from model.demo.objective import DIGIT_WEIGHTS, Helpers, disturb
from model.demo.scene import Request, Scene
from model.demo.scenes import random_scene
from model.image import tile_grid


def test_disturbed_pictures_stay_near() -> None:
    seed = 3
    tiles = torch.randint(0, 256, (16, 1, 24, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    values = disturb(tiles, torch.Generator().manual_seed(seed))
    assert values.shape == (16, 24, 24, 3) and values.dtype == torch.float32
    assert values.min() >= -1 and values.max() <= 1
    plain = (tiles.float() / 127.5 - 1).flatten(0, 1)
    assert (values - plain).abs().mean(dim=(1, 2, 3)).max() < 0.15
    # Some pictures get noise, some none: those are an exact line of contrast and brightness, but for the limits.
    middle = plain.abs() < 0.8
    noisy = []
    for mine, given, inside in zip(values, plain, middle, strict=True):
        x, y = given[inside], mine[inside]
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        assert 0.9 < slope < 1.1
        noisy.append(float((y - y.mean() - slope * (x - x.mean())).std()) > 1e-4)
    assert 2 <= sum(noisy) <= 14
    again = disturb(tiles, torch.Generator().manual_seed(seed))
    assert torch.equal(values, again)


def labels_of(scene: Scene) -> dict[str, torch.Tensor]:
    """A batch of the one tile that shows all of a scene, as far as the helper heads need it."""
    patches = cut(scene, 1, 1)[1][0]
    return {
        "tile_used": torch.ones(1, 1, dtype=torch.uint8),
        "classes": torch.from_numpy(patches.classes)[None, None],
        "colours": torch.from_numpy(patches.colours)[None, None],
        "characters": torch.from_numpy(patches.characters)[None, None],
        "boxes": torch.from_numpy(patches.boxes)[None, None],
        "answer_boxes": torch.from_numpy(patches.answers)[None, None],
    }


def test_patches_know_the_box_that_an_answer_gives(fonts: Fonts) -> None:
    """Only of tiles that show the whole picture, and only where they show a thing."""
    scene = random_scene(random.Random(5), fonts, Request("double"))
    boxes = [scaled_box(found.box, scene.size) for found in (*scene.things, *scene.prints)]
    whole = cut(scene, 1, 1)[1][0]
    owned = whole.classes > 0
    assert owned.any() and (whole.answers[~owned] == -1).all()
    assert {tuple(box) for box in whole.answers[owned].tolist()} <= {tuple(box) for box in boxes}
    columns, rows = tile_grid(scene.size, CANDIDATES, tiled=True)
    assert columns * rows > 1
    assert all((tile.answers == -1).all() for tile in cut(scene, columns, rows)[1])


def test_heads_that_spell_the_box_have_less_to_learn(fonts: Fonts) -> None:
    batch = labels_of(random_scene(random.Random(5), fonts, Request("single")))
    helpers = Helpers(4)
    torch.nn.init.zeros_(helpers.heads.weight)
    nothing = helpers(torch.zeros(1, 729, 4), batch)
    answers = batch["answer_boxes"][0, 0]
    shown = answers[answers[:, 0] >= 0][0]  # all patches say the box of the first thing
    digits = torch.zeros(4, 3, 10)
    for number, value in enumerate(shown.tolist()):
        for place, digit in enumerate((value // 100, value // 10 % 10, value % 10)):
            digits[number, place, digit] = 20.0
    with torch.no_grad():
        helpers.heads.bias[-120:] = digits.flatten()
    same = (answers == shown).all(-1, keepdim=True)
    batch["answer_boxes"] = torch.where(same, answers, -1)[None, None]
    right = helpers(torch.zeros(1, 729, 4), batch)
    assert nothing - right > 0.9 * sum(DIGIT_WEIGHTS) * math.log(10)
