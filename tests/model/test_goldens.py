"""Whole conversations against the reference: prompt, tiles, features, hidden states, logits and greedy tokens.

The model runs as the engine runs it: through the paged cache, the prompt in one prefill and then one token a
step, with the sequence's pages out of order among pages that hold NaN.
"""

import hashlib
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from kernels.patches import normalize_tiles
from model.batch import PAGE_SIZE, Batch, Chunk, build_batch
from model.checkpoint import load_model
from model.prompt import Message, Prompt, build_chat_prompt
from model.tokenizer import Tokenizer
from model.vl2 import DeepseekVL2
from server.engine.core import Engine
from tests import goldens_data
from tests.engine.support import case_request, engine_config, run_all, tokens_of
from tests.goldens_data import GOLDENS, VARIANTS, case_names, cases

CPU = torch.device("cpu")
ROLES = {"<|User|>": "user", "<|Assistant|>": "assistant", "system": "system"}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(variant: str) -> DeepseekVL2:
    return load_model(goldens_data.checkpoint(variant), device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(variant: str) -> Tokenizer:
    return Tokenizer.from_folder(goldens_data.checkpoint(variant))


def messages(conversation: list[dict[str, Any]]) -> list[Message]:
    """The reference's form (pictures as `<image>` marks in the text) as messages of parts.

    An empty answer at the end, which asks the reference for one, is left out.
    """
    found = []
    for turn in conversation:
        texts = turn["content"].split("<image>")
        parts: list[str | Image.Image] = [texts[0]]
        for file, text in zip(turn.get("images", []), texts[1:], strict=True):
            parts += [Image.open(GOLDENS / "images" / file).convert("RGB"), text]
        if turn is not conversation[-1] or turn["content"]:
            found.append(Message(ROLES[turn["role"]], tuple(parts)))  # type: ignore[arg-type]
    return found


def assert_near(actual: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


class Sequence:
    """One conversation running through a paged cache of its own, its pages scattered."""

    def __init__(self, model: DeepseekVL2, prompt: Prompt) -> None:
        self.model = model
        self.prompt = prompt
        self.length = 0
        num_pages = -(-(len(prompt.token_ids) + 32) // PAGE_SIZE)
        order = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.pages = order[:num_pages]
        shape = (2 * num_pages, PAGE_SIZE, model.config.language.kv_row_size)
        self.kv_cache = [torch.full(shape, torch.nan) for _ in model.language.layers]

    def prefill(self, logits_rows: list[int]) -> Tensor:
        images = [(span.start, self.encode(span.image)) for span in self.prompt.images]
        rows = [start + i for start, embeds in images for i in range(len(embeds))]
        embeds = torch.cat([embeds for _, embeds in images]) if images else None
        return self._run(self.prompt.token_ids, logits_rows, image_rows=rows, image_embeds=embeds)

    def decode(self, token: int) -> Tensor:
        return self._run([token], [0])[0]

    def encode(self, image: Any) -> Tensor:
        features = self.model.encode_tiles(torch.from_numpy(image.tiles))
        return self.model.assemble_image(features, image.columns, image.rows)

    def _run(self, token_ids: list[int], logits_rows: list[int], **images: Any) -> Tensor:
        chunk = Chunk(token_ids=token_ids, start=self.length, pages=self.pages)
        prefills = [chunk] if self.length == 0 else []
        decodes = [chunk] if self.length else []
        batch: Batch = build_batch(decodes, prefills, logits_rows=logits_rows, device=CPU, **images)
        self.length += len(token_ids)
        return self.model(batch, self.kv_cache)


@pytest.mark.parametrize("name", case_names("mha"))
@torch.inference_mode()
def test_case_equals_the_reference(variant: str, name: str, model: DeepseekVL2, tokenizer: Tokenizer) -> None:
    listed, tensors = cases(variant)
    case = listed[name]
    golden = {key.split("/")[1]: value for key, value in tensors.items() if key.startswith(f"{name}/")}
    prompt = build_chat_prompt(messages(case["conversation"]), tokenizer, model.config)

    check_prompt(prompt, case)
    if prompt.images:
        check_vision(model, prompt, case, golden)
    check_language(Sequence(model, prompt), case, golden)


def check_prompt(prompt: Prompt, case: dict[str, Any]) -> None:
    assert prompt.token_ids == case["input_ids"]
    runs = [[span.start, span.start + span.image.num_slots] for span in prompt.images]
    assert runs == case["images_seq_mask_runs"]
    assert [[span.image.columns, span.image.rows] for span in prompt.images] == case["images_spatial_crop"]


def check_vision(model: DeepseekVL2, prompt: Prompt, case: dict[str, Any], golden: dict[str, Tensor]) -> None:
    tiles = torch.cat([torch.from_numpy(span.image.tiles) for span in prompt.images])
    assert list(tiles.shape) == case["pixel_tiles"]["shape"]
    assert hashlib.sha256(tiles.numpy().tobytes()).hexdigest() == case["pixel_tiles"]["sha256_uint8"]
    normalized = normalize_tiles(tiles, torch.float32).numpy()
    assert hashlib.sha256(normalized.tobytes()).hexdigest() == case["pixel_tiles"]["sha256_float32"]
    for what, features in (("vision", model.vision(tiles)), ("projector", model.encode_tiles(tiles))):
        index = case[f"{what}_sample_index"]
        sampled = features[index["tiles"]][:, index["positions"]]
        assert_near(sampled, golden[f"{what}_sampled"], atol=3e-5)
        assert features.mean().item() == pytest.approx(case[f"{what}_features"]["mean"], abs=1e-5)
        assert features.std().item() == pytest.approx(case[f"{what}_features"]["std"], abs=1e-5)


def check_language(sequence: Sequence, case: dict[str, Any], golden: dict[str, Tensor]) -> None:
    hidden_states = record_hidden_states(sequence.model)
    positions, stride = case["sample_positions"], case["sample_vocab_stride"]
    rows = [*positions, len(sequence.prompt.token_ids) - 1]
    logits = sequence.prefill(rows)
    for hook in hidden_states.hooks:
        hook.remove()

    sampled = torch.stack([layer[positions] for layer in hidden_states.layers])
    assert_near(sampled[0], golden["embeds_sampled"], atol=3e-5)
    final = sequence.model.language.norm(sampled[-1])
    assert_near(torch.cat((sampled[:-1], final[None])), golden["hidden_sampled"], atol=5e-4)
    assert_near(logits[:-1, ::stride], golden["prefill_logits_sampled"], atol=5e-4)

    last, tokens = logits[-1], []
    for expected in golden["logits"]:
        assert_near(last, expected, atol=5e-4)
        tokens.append(int(last.argmax()))
        last = sequence.decode(tokens[-1])
    assert tokens == case["greedy_tokens"]


class HiddenStates:
    """The residual stream before the first layer and after each one, of the next forward."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.hooks: list[Any] = []


def record_hidden_states(model: DeepseekVL2) -> HiddenStates:
    states = HiddenStates()

    def before(module: object, inputs: tuple[Tensor, ...]) -> None:
        hidden_states, residual = inputs[:2]
        states.layers.append(hidden_states if residual is None else residual + hidden_states)

    def after(module: object, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        states.layers.append(output[0] + output[1])

    states.hooks.append(model.language.layers[0].register_forward_pre_hook(before))
    states.hooks += [layer.register_forward_hook(after) for layer in model.language.layers]
    return states


def test_every_case_is_run() -> None:
    assert all(case_names(variant) == case_names("mha") for variant in VARIANTS)
    assert len(case_names("mha")) == 14


@pytest.mark.parametrize("chunk_tokens", [100, 8192])
def test_the_engine_gives_the_reference_tokens(variant: str, chunk_tokens: int) -> None:
    """All cases at once through the whole engine: continuous batching, chunked prefill, batched vision encoding."""
    config = engine_config(variant, kv_cache_tokens=32768, max_num_seqs=16, prefill_chunk_tokens=chunk_tokens)
    names = case_names(variant)
    events = run_all(Engine(config), [case_request(variant, name) for name in names])
    assert {name: tokens_of(events[name]) for name in names} == {
        name: cases(variant)[0][name]["greedy_tokens"] for name in names
    }
