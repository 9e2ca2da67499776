"""The dense forward of training computes what the serving path computes."""

import random

import pytest
import torch

from model.batch import PAGE_SIZE, Chunk, build_batch
from model.checkpoint import empty_model, initialize_randomly
from model.config import ModelConfig
from model.demo import dense
from model.demo.dataset import empty_arrays, pack
from model.demo.fonts import Fonts
from model.demo.rows import KINDS, Answer, Row, Wording, random_row
from model.demo.train import demo_config
from model.image import image_layout
from model.prompt import Message, Prompt, build_chat_prompt
from model.tokenizer import Tokenizer
from model.vl2 import DeepseekVL2

SMALL = {
    "vision_config": {"layers": 2, "width": 32, "heads": 2},
    "projector_config": {"input_dim": 32, "n_embed": 48},
    "language_config": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 64},
}


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> DeepseekVL2:
    config = ModelConfig.model_validate(demo_config(tokenizer, SMALL))
    built = empty_model(config, device=torch.device("cpu"), dtype=torch.float32)
    initialize_randomly(built, 5)
    with torch.no_grad():  # large enough that attention and routing are not almost uniform
        for name, parameter in built.named_parameters():
            if "norm" not in name:
                parameter.mul_(5)
    return built.requires_grad_(False)


def _row(fonts: Fonts, wording: Wording, kind: str, seed: int) -> tuple[Row, dict[str, torch.Tensor]]:
    row = random_row(random.Random(seed), fonts, wording, KINDS[kind])
    arrays = empty_arrays(KINDS[kind], 1)
    pack(row, arrays, 0, KINDS[kind], wording.tokenizer.pad_token_id)
    return row, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _dense_logits(model: DeepseekVL2, batch: dict[str, torch.Tensor], pad_id: int) -> torch.Tensor:
    pixels = dense.normalise(batch["tiles"].flatten(0, 1), torch.float32)
    functions = dense.eager()
    tokens = dense.project(model, dense.tower(model, pixels, functions))
    return dense.logits(model, dense.decode(model, batch, tokens, functions, pad_id=pad_id).hidden)[0]


def _serving_logits(
    model: DeepseekVL2, ids: list[int], spans: list[tuple[int, torch.Tensor, int, int]]
) -> torch.Tensor:
    """Logits at every position of one sequence. ``spans``: start, tiles [n, 3, 384, 384], columns, rows of pictures."""
    rows: list[int] = []
    embeds: list[torch.Tensor] = []
    for start, tiles, columns, high in spans:
        embeds.append(model.assemble_image(model.encode_tiles(tiles), columns, high))
        rows += range(start, start + len(embeds[-1]))
    pages = -(-len(ids) // PAGE_SIZE)
    chunk = Chunk(ids, 0, list(range(pages)))
    batch = build_batch(
        [],
        [chunk],
        logits_rows=list(range(len(ids))),
        device=torch.device("cpu"),
        image_rows=rows,
        image_embeds=torch.cat(embeds) if embeds else None,
    )
    row_size = model.config.language.kv_row_size
    caches = [torch.zeros(pages, PAGE_SIZE, row_size) for _ in range(model.config.language.num_hidden_layers)]
    with torch.inference_mode():
        logits: torch.Tensor = model(batch, caches)
    return logits


def _segments(row: Row) -> list[list[Answer]]:
    by_segment: dict[int, list[Answer]] = {}
    for answer in row.answers:
        by_segment.setdefault(row.segment[answer.start], []).append(answer)
    return list(by_segment.values())


@pytest.mark.parametrize(("kind", "seed"), [("single", 1), ("double", 2), ("quad", 3), ("pair", 4)])
def test_dense_equals_serving(
    kind: str, seed: int, model: DeepseekVL2, fonts: Fonts, tokenizer: Tokenizer, wording: Wording
) -> None:
    """Logits of segments, each run as a conversation of its own by the serving forward."""
    row, batch = _row(fonts, wording, kind, seed)
    got = _dense_logits(model, batch, tokenizer.pad_token_id)
    segments = _segments(row)
    for answers in (segments[0], segments[-1]):
        number = row.segment[answers[0].start]
        places = [place for place, segment in enumerate(row.segment) if segment == number]
        prompt = _conversation(row, answers, tokenizer, model.config)
        spans = [
            (span.start, torch.from_numpy(span.image.tiles), span.image.columns, span.image.rows)
            for span in prompt.images
        ]
        ids = [*prompt.token_ids, *row.ids[answers[-1].start : answers[-1].end]]
        expected = _serving_logits(model, ids, spans)[-len(places) :]
        torch.testing.assert_close(got[places], expected, atol=2e-4, rtol=2e-4)


def _conversation(row: Row, answers: list[Answer], tokenizer: Tokenizer, config: ModelConfig) -> Prompt:
    """The prompt that a server builds for a plain segment's conversation, up to its last answer."""
    pictures = [scene.image for scene in row.scenes]
    messages: list[Message] = []
    for index, answer in enumerate(answers):
        before = pictures if index == 0 else []
        messages += [Message("user", (*before, answer.turn.question)), Message("assistant", (answer.turn.answer,))]
    return build_chat_prompt(messages[:-1], tokenizer, config)


@pytest.mark.parametrize("kind", ["single", "double", "quad", "pair", "triple", "wide pair"])
def test_rows_are_the_prompts_a_server_builds(
    kind: str, fonts: Fonts, tokenizer: Tokenizer, wording: Wording, model: DeepseekVL2
) -> None:
    """Token ids, places of pictures and tiles of plain conversations equal `build_chat_prompt`'s."""
    for seed in range(3):
        row, _ = _row(fonts, wording, kind, seed + 100)
        if row.prefix_ids[1:3] != [*wording.user, wording.colon[0]] or row.prefix_ids[3:5] != [wording.colon[1], -1]:
            continue  # a system text or a question before the pictures
        for answers in _segments(row):
            first = row.segment.index(row.segment[answers[0].start])
            if row.visible[first] == 1 or not answers[0].turn.question:
                continue  # talk without a picture
            prompt = _conversation(row, answers, tokenizer, model.config)
            image = tokenizer.image_token_id
            prefix = [image if token < 0 else token for token in row.prefix_ids]
            length = len(prompt.token_ids) - len(prefix)
            if prompt.token_ids[: len(prefix)] != prefix:
                break  # the second picture came in a later turn
            assert prompt.token_ids[len(prefix) :] == row.ids[first : first + length]
            gather = [place for place in row.gather if place != -1]
            expected = [n for span in prompt.images for n in image_layout(span.image.columns, span.image.rows)]
            assert [place < -1 for place in gather] == [n < 0 for n in expected]
            tile = 0
            for span in prompt.images:
                distinct = span.image.tiles if len(span.image.tiles) > 2 else span.image.tiles[:1]
                for pixels in distinct:
                    assert (row.tiles[tile] == pixels.transpose(1, 2, 0)).all()
                    tile += 1
            assert tile == len(row.tiles)
