"""The evaluation: overlaps, scores by line, and that its greedy answers are greedy."""

import random

import pytest
import torch

from model.checkpoint import empty_model, initialize_randomly
from model.config import ModelConfig
from model.demo import dense
from model.demo.dataset import empty_arrays, pack
from model.demo.evaluate import Example, Score, count_answer, greedy, mean_overlap, overlap, table, targets
from model.demo.fonts import Fonts
from model.demo.questions import Turn
from model.demo.rows import KINDS, Answer, Wording, random_row
from model.demo.train import demo_config
from model.tokenizer import Tokenizer

TOY = {
    "vision_config": {"layers": 1, "width": 32, "heads": 1},
    "projector_config": {"input_dim": 32, "n_embed": 32},
    "language_config": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
}


def test_overlap() -> None:
    assert overlap((0, 0, 10, 10), (0, 0, 10, 10)) == 1
    assert overlap((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert overlap((0, 0, 10, 10), (20, 20, 30, 30)) == 0


def test_mean_overlap_counts_missing_boxes_as_none() -> None:
    two = "[[0, 0, 10, 10], [20, 20, 30, 30]]"
    assert mean_overlap(two, two) == 1
    assert mean_overlap(two, "[[0, 0, 10, 10]]") == 0.5
    assert mean_overlap(two, "[[0, 0, 10,") == 0


def _example(kind: str, answer: str, row_kind: str = "single", *, small: bool = False) -> Example:
    return Example(row_kind, Answer(Turn("?", answer, kind), 0, 1), square=True, small_print=small)


def test_answers_are_right_to_the_letter_and_print_is_judged_alone() -> None:
    scores: dict[str, Score] = {}
    example = _example("caption", 'A cat on a white background. The text reads "HI".')
    count_answer(scores, example, example.answer.turn.answer)
    count_answer(scores, example, 'A dog on a white background. The text reads "HI".')
    assert (scores["caption"].right, scores["caption"].total) == (1, 2)
    assert (scores["printed text in any answer (one tile)"].right, scores["caption"].total) == (2, 2)
    assert scores["caption"].wrong[0][2].startswith("A dog")
    count_answer(scores, _example("read", 'The text says "a".', "quad", small=True), 'The text says "b".')
    assert scores["small print read (needs tiles)"].right == 0
    count_answer(scores, _example("which one", "The first picture shows the cat.", "pair"), "The second one.")
    assert (scores["two pictures: all questions"].right, scores["two pictures: all questions"].total) == (0, 1)
    assert "| caption | 50.0 % | 2 |" in table(scores)


def test_targets_say_what_is_reached() -> None:
    scores: dict[str, Score] = {}
    for _ in range(50):
        count_answer(scores, _example("count", "There is one cat."), "There is one cat.")
    box = "<|ref|>the cat<|/ref|><|det|>[[0, 0, 100, 100]]<|/det|>"
    count_answer(scores, _example("box", box), box.replace("100", "90", 1))
    found = targets(scores)
    assert "| counting | 99 % | 100.0 % | yes |" in found
    assert "| mean IoU of boxes | 0.97 | 0.900 | no |" in found
    assert "| captions | 97 % | not measured | no |" in found


def test_greedy_answers_are_greedy(fonts: Fonts, tokenizer: Tokenizer, wording: Wording) -> None:
    """Of a random model, whose answers are wrong from the first token on: as found token by token."""
    kind = KINDS["single"]
    model = empty_model(
        ModelConfig.model_validate(demo_config(tokenizer, TOY)), device=torch.device("cpu"), dtype=torch.float32
    )
    initialize_randomly(model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    row = random_row(random.Random(8), fonts, wording, kind)
    arrays = empty_arrays(kind, 1)
    pack(row, arrays, 0, kind, tokenizer.pad_token_id)
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    answer = row.answers[0]
    [[got]] = greedy(model, batch, [[answer]], tokenizer.pad_token_id, tokenizer.eos_token_id)

    pixels = dense.normalise(batch["tiles"].flatten(0, 1), torch.float32)
    with torch.inference_mode():
        tokens = dense.project(model, dense.tower(model, pixels, dense.eager()))
        for place in range(answer.start, min(answer.start + 8, answer.end)):
            output = dense.decode(model, batch, tokens, dense.eager(), pad_id=tokenizer.pad_token_id)
            batch["ids"][0, place] = int(dense.logits(model, output.hidden)[0, place - 1].argmax())
    expected = batch["ids"][0, answer.start : answer.start + 8].tolist()
    assert got[:8] == expected[: len(got)]
