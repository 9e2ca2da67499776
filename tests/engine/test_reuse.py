"""What was computed is found again, by the right requests only, and gives the logits and tokens of a new start."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from server.engine.core import Engine
from server.engine.request import TILE_SHAPE, EngineRequest, ImageInput, SamplingParams
from server.engine.runner import StepOutput
from server.engine.scheduler import StepPlan
from tests.engine.support import case_request, engine_config, greedy_tokens, run_all, tokens_of
from tests.goldens_data import VARIANTS

VARIANT = "mla-softmax"
PAGE = 64
ATOL = 5e-4  # of logits, as against the recorded ones


@dataclass
class Watch:
    """An engine, and what its steps computed since the last look."""

    engine: Engine
    logits: dict[str, list[Tensor]] = field(default_factory=dict)
    prompt_tokens: int = 0
    tiles: int = 0

    def __post_init__(self) -> None:
        execute = self.engine.runner.execute

        def watched(plan: StepPlan) -> StepOutput:
            output = execute(plan)
            self.prompt_tokens += sum(chunk.end - chunk.start for chunk in plan.prefills)
            self.tiles += sum(encode.last - encode.first for encode in plan.encodes)
            for request, row in zip(plan.sampled, output.logits, strict=True):
                self.logits.setdefault(request.request_id, []).append(row.clone())
            return output

        self.engine.runner.execute = watched  # type: ignore[method-assign]

    def run(self, *requests: EngineRequest) -> dict[str, tuple[list[int], int]]:
        """Each request's tokens, and how many tokens of its prompt were found computed."""
        self.logits, self.prompt_tokens, self.tiles = {}, 0, 0
        answers = {}
        for name, events in run_all(self.engine, requests).items():
            assert events[0].cached_tokens is not None
            assert all(event.cached_tokens is None for event in events[1:])
            answers[name] = tokens_of(events), events[0].cached_tokens
        return answers


def watch(variant: str = VARIANT, **settings: Any) -> Watch:
    return Watch(Engine(engine_config(variant, **settings)))


@pytest.fixture(scope="module")
def cold() -> Watch:
    """An engine that never finds anything."""
    return watch(prefix_caching=False)


def assert_same_logits(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=ATOL, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["text_long", "two_images", "multi_turn"])
def test_a_repeated_prompt_is_not_computed_again(variant: str, name: str) -> None:
    engine = watch(variant)
    request = case_request(variant, name, max_tokens=8)
    assert engine.run(request)[name] == (greedy_tokens(variant, name)[:8], 0)
    assert engine.prompt_tokens == len(request.token_ids)
    first = engine.logits[name]
    cached = (len(request.token_ids) - 1) // PAGE * PAGE
    assert engine.run(request)[name] == (greedy_tokens(variant, name)[:8], cached)
    assert (engine.prompt_tokens, engine.tiles) == (len(request.token_ids) - cached, 0)
    assert_same_logits(engine.logits[name], first)


@pytest.mark.parametrize("chunk", [2048, 100])
def test_a_hit_may_end_at_any_page_inside_a_picture_too(chunk: int, cold: Watch) -> None:
    """434 tokens, the picture's from 4 to 424: each of the 6 whole pages is taken away in turn."""
    engine = watch(prefill_chunk_tokens=chunk)
    request = case_request(VARIANT, "image_rgba", max_tokens=2)
    expected = cold.run(request)["image_rgba"]
    engine.run(request)
    pool = engine.engine.pool
    keys = list(pool._page_of)[:6]
    for pages in (3, 5, 0, 4, 1, 2):
        (page,) = pool.find([keys[pages]])
        pool.share([page])
        pool.forget([page])
        pool.free([page])
        assert engine.run(request)["image_rgba"] == (expected[0], pages * PAGE)
        assert (engine.prompt_tokens, engine.tiles) == (434 - pages * PAGE, 0)
        assert_same_logits(engine.logits["image_rgba"], cold.logits["image_rgba"])


def test_a_hit_inside_a_picture_whose_features_are_gone_encodes_it_again(cold: Watch) -> None:
    engine = watch(vision_cache_bytes=0, max_model_len=2400, vision_tile_budget=1)
    request = case_request(VARIANT, "image_rgba", max_tokens=2)
    expected = cold.run(request)["image_rgba"]
    engine.run(request)
    engine.run(case_request(VARIANT, "two_images", max_tokens=1))  # its 2250 slots push the other's 421 out
    assert len(engine.engine.runner._features) == 2
    assert engine.run(request)["image_rgba"] == (expected[0], 6 * PAGE)
    assert engine.tiles == 2  # the last 41 slots of the picture are computed anew, and need it
    assert_same_logits(engine.logits["image_rgba"], cold.logits["image_rgba"])


def test_the_next_turn_finds_the_answer(cold: Watch) -> None:
    engine = watch()
    request = case_request(VARIANT, "image_rgba", max_tokens=80)
    answer, _ = engine.run(request)["image_rgba"]
    turn = msgspec.structs.replace(
        request,
        request_id="turn",
        token_ids=[*request.token_ids, *answer, 5, 6, 7],
        sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
    )
    cached = (len(request.token_ids) + len(answer) - 1) // PAGE * PAGE
    assert cached == 512 > len(request.token_ids)
    assert engine.run(turn)["turn"] == (cold.run(turn)["turn"][0], cached)
    assert engine.tiles == 0
    assert_same_logits(engine.logits["turn"], cold.logits["turn"])


def repaint(image: ImageInput, seed: int) -> ImageInput:
    """Another picture of the same size."""
    tiles = np.random.default_rng(seed).integers(0, 256, len(image.tiles), dtype=np.uint8).tobytes()
    return msgspec.structs.replace(image, tiles=tiles, digest=bytes([seed]) * 32)


def with_pictures(request: EngineRequest, order: list[int], request_id: str) -> EngineRequest:
    """The request with other pictures, by number, in place of its own."""
    images = [repaint(image, seed) for image, seed in zip(request.images, order, strict=True)]
    return msgspec.structs.replace(request, images=images, request_id=request_id)


def test_other_pictures_or_another_order_under_the_same_text_are_never_taken_for_each_other(cold: Watch) -> None:
    base = case_request(VARIANT, "three_images", max_tokens=6)
    engine = watch()
    # Pictures start at 10, 440 and 870: what two prompts have in common ends where the first other picture begins.
    for order, cached in (([1, 2, 3], 0), ([2, 1, 3], 0), ([1, 3, 2], 6 * PAGE), ([1, 2, 4], 13 * PAGE)):
        request = with_pictures(base, order, "r")
        assert engine.run(request)["r"] == (cold.run(request)["r"][0], cached)
        assert_same_logits(engine.logits["r"], cold.logits["r"])
    assert engine.engine.stats().tiles_encoded == 4 * 2
    assert engine.engine.stats().vision_cache_hits == 3 + 3 + 2


def test_the_same_pixels_cut_otherwise_are_another_picture() -> None:
    """Even if a digest did not say how it was cut: features of one grid must not be laid out as another's."""
    engine = Engine(engine_config(VARIANT))
    root = engine.keys.root("")
    assert len({engine.keys.picture(root, b"d", *grid) for grid in ((1, 1), (2, 1), (1, 2))}) == 3


def test_requests_with_different_salts_share_nothing() -> None:
    engine = watch()
    for salt, cached in (("", 0), ("a", 0), ("b", 0), ("a", 6 * PAGE)):
        request = case_request(VARIANT, "image_rgba", max_tokens=2, cache_salt=salt)
        assert engine.run(request)["image_rgba"][1] == cached
        assert engine.tiles == (0 if cached else 2)


def test_two_engines_name_the_same_content_differently() -> None:
    keys = [Engine(engine_config(VARIANT)).keys.root("") for _ in range(2)]
    assert keys[0] != keys[1] and len(keys[0]) == 32


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_tokens": 100}, {"vision_tile_budget": 1}])
def test_choices_of_one_prompt_encode_and_compute_it_once(settings: dict[str, int], cold: Watch) -> None:
    """434 tokens: 6 whole pages, which are shared, and 50 more, which each choice computes."""
    engine = watch(**settings)
    choices = [
        case_request(VARIANT, "image_rgba", request_id=str(i), temperature=1.0, seed=i, max_tokens=8) for i in range(4)
    ]
    answers = engine.run(*choices)
    assert (engine.tiles, engine.prompt_tokens) == (2, 434 + 3 * 50)
    assert [cached for _, cached in answers.values()] == [0, 384, 384, 384]
    for choice in choices:
        assert answers[choice.request_id][0] == cold.run(choice)[choice.request_id][0]


def test_one_new_picture_in_many_requests_is_encoded_once() -> None:
    """Other text before it: nothing to share but the picture."""
    engine = watch(prefix_caching=False)
    base = case_request(VARIANT, "image_rgba", max_tokens=2)
    requests = [
        msgspec.structs.replace(base, request_id=str(i), token_ids=[base.token_ids[0], 100 + i, *base.token_ids[2:]])
        for i in range(6)
    ]
    engine.run(*requests)
    assert (engine.tiles, engine.engine.stats().vision_cache_hits) == (2, 5)


def test_tiles_leave_the_host_when_they_are_encoded() -> None:
    engine = Engine(engine_config(VARIANT, vision_tile_budget=1, prefix_caching=False))
    for i in range(2):
        engine.add_request(case_request(VARIANT, "image_rgba", request_id=str(i)))
    requests = list(engine.scheduler.requests.values())
    sizes = []
    for _ in range(3):
        pictures = {id(i.picture): i.picture for r in requests for i in r.images if i.picture is not None}
        held = sum(len(image.tiles) for request in requests for image in request.images)
        sizes.append(held + sum(len(picture.tiles) for picture in pictures.values()))
        engine.step()
    tile = int(np.prod(TILE_SHAPE))
    assert sizes == [4 * tile, 2 * tile, 0]


def test_the_vision_cache_keeps_to_its_budget() -> None:
    """900 slots hold two pictures of 421: the third pushes the first out, and of six at once two run at a time."""
    budget = 900 * Engine(engine_config(VARIANT)).runner.slot_bytes
    engine = watch(vision_cache_bytes=budget, max_model_len=480, prefix_caching=False)
    base = case_request(VARIANT, "image_rgba", max_tokens=2)
    for seed, tiles in ((1, 2), (2, 2), (1, 0), (3, 2), (1, 0), (2, 2)):
        engine.run(with_pictures(base, [seed], "r"))
        assert engine.tiles == tiles
    engine.run(*[with_pictures(base, [seed], f"all {seed}") for seed in range(10, 16)])
    assert engine.tiles == 12 and len(engine.engine.runner._features) == 2


def crowd(**sampling: Any) -> list[EngineRequest]:
    """Greedy and seeded questions, some on the same picture, some the same."""
    names = ("image_rgba", "multi_turn", "text_short", "image_exif")
    return [
        case_request(VARIANT, names[i % 4], request_id=str(i), temperature=0.9 * (i % 3 > 0), seed=i % 5, **sampling)
        for i in range(16)
    ]


@pytest.fixture(scope="module")
def alone(cold: Watch) -> list[list[int]]:
    return [cold.run(request)[request.request_id][0] for request in crowd()]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("pages", [18, 40])
def test_a_crowd_of_questions_on_shared_pictures(prefix_caching: bool, pages: int, alone: list[list[int]]) -> None:
    """Evictions, preemptions, hits and shared pictures at once: every request has the tokens it has alone."""
    engine = watch(kv_cache_tokens=pages * PAGE, max_model_len=pages * PAGE, prefix_caching=prefix_caching)
    assert [tokens for tokens, _ in engine.run(*crowd()).values()] == alone
    stats = engine.engine.stats()
    assert (stats.prefix_hit_tokens > 0) == prefix_caching
    assert stats.preemptions > 0 or pages == 40
    assert stats.vision_cache_hits > 0 and stats.integrity_errors == 0


@pytest.mark.parametrize("most", [5, 1])
def test_a_vision_tower_out_of_memory_is_asked_for_half(most: int, cold: Watch) -> None:
    engine = watch()
    engine.engine.runner.batch_invariant = False  # or tiles are encoded one by one from the start
    encode = engine.engine.runner.model.encode_tiles
    batches: list[int] = []

    def small(tiles: Tensor) -> Tensor:
        batches.append(len(tiles))
        if len(tiles) > most:
            raise torch.OutOfMemoryError("no room")
        return encode(tiles)

    engine.engine.runner.model.encode_tiles = small  # type: ignore[method-assign]
    request = case_request(VARIANT, "two_images", max_tokens=4)
    assert engine.run(request)["two_images"][0] == greedy_tokens(VARIANT, "two_images")[:4]
    assert batches[0] == 11 and sum(size for size in batches if size <= most) == 11


def test_a_picture_that_never_fits_fails_its_own_requests_alone() -> None:
    engine = Engine(engine_config(VARIANT))

    def never(tiles: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    engine.runner.model.encode_tiles = never  # type: ignore[method-assign]
    names = ("text_short", "image_rgba", "multi_turn")
    events = run_all(engine, [case_request(VARIANT, name, max_tokens=4) for name in names])
    assert tokens_of(events["text_short"]) == greedy_tokens(VARIANT, "text_short")[:4]
    for name in names[1:]:
        assert (events[name][-1].finish_reason, events[name][-1].error) == ("error", "OutOfMemoryError: no room")
    assert engine.stats().failed_requests == 2 and engine.runner._features == {}


def test_a_seeded_request_is_the_same_among_63_others() -> None:
    engine = watch(max_num_seqs=64)
    names = ("text_short", "system_prompt", "assistant_prefix", "image_rgba")
    requests = [
        case_request(VARIANT, names[i % 4], request_id=str(i), temperature=1.0, top_p=0.95, seed=i, max_tokens=6)
        for i in range(64)
    ]
    together = engine.run(*requests)
    assert len({tuple(tokens) for tokens, _ in together.values()}) > 32
    for request in requests[::9]:
        assert engine.run(request)[request.request_id][0] == together[request.request_id][0]
