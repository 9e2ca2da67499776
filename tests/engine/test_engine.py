"""The whole engine on the recorded checkpoints: company, chunks, preemption and failures change no request's tokens."""

from typing import Any

import pytest
import torch

from server.engine.core import Engine
from server.engine.request import EngineRequest, ImageInput, RequestRejected, SamplingParams, TokenEvent
from server.engine.runner import StepOutput
from server.engine.scheduler import StepPlan
from tests.engine.support import case_request, engine_config, greedy_tokens, run_all, tokens_of
from tests.goldens_data import VARIANTS

VARIANT = "mla-softmax"
MIXED = ("text_long", "image_rgba", "text_short", "three_images", "multi_turn")


def make_engine(variant: str = VARIANT, **settings: Any) -> Engine:
    return Engine(engine_config(variant, **settings))


def mixed_requests(variant: str = VARIANT) -> list[EngineRequest]:
    """Greedy, seeded, and penalised requests, some with images."""
    return [
        case_request(variant, "text_long", max_tokens=12),
        case_request(variant, "image_rgba", max_tokens=12, temperature=0.8, seed=5, top_p=0.9),
        case_request(variant, "text_short", max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.4),
        case_request(variant, "three_images", max_tokens=12),
        case_request(variant, "multi_turn", max_tokens=12, temperature=1.2, seed=6, repetition_penalty=1.1),
    ]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """The tokens of each mixed request without company, its prompt in one piece."""
    engine = make_engine()
    return {r.request_id: tokens_of(run_all(engine, [r])[r.request_id]) for r in mixed_requests()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_answers_in_company(variant: str) -> None:
    names = [*MIXED, "image_exif"]
    events = run_all(make_engine(variant), [case_request(variant, name, max_tokens=12) for name in names])
    assert {name: tokens_of(events[name]) for name in names} == {n: greedy_tokens(variant, n)[:12] for n in names}
    assert [events[name][-1].finish_reason for name in names] == ["length"] * len(names)


@pytest.mark.parametrize("chunk", [64, 100, 421, 422, 512])
def test_chunks_change_nothing(chunk: int, alone: dict[str, list[int]]) -> None:
    events = run_all(make_engine(prefill_chunk_tokens=chunk), mixed_requests())
    assert {name: tokens_of(found) for name, found in events.items()} == alone


def test_chunks_of_one_token_change_nothing() -> None:
    events = run_all(make_engine(prefill_chunk_tokens=1), [case_request(VARIANT, "text_short", max_tokens=6)])
    assert tokens_of(events["text_short"]) == greedy_tokens(VARIANT, "text_short")[:6]


def test_a_small_tile_budget_changes_nothing() -> None:
    engine = make_engine(vision_tile_budget=3)
    largest = 0
    execute = engine.runner.execute

    def watched(plan: StepPlan) -> StepOutput:
        nonlocal largest
        largest = max(largest, sum(encode.last - encode.first for encode in plan.encodes))
        return execute(plan)

    engine.runner.execute = watched  # type: ignore[method-assign]
    requests = [case_request(VARIANT, name, max_tokens=6) for name in ("two_images", "image_rgba")]
    events = run_all(engine, requests)
    assert {name: tokens_of(found) for name, found in events.items()} == {
        name: greedy_tokens(VARIANT, name)[:6] for name in ("two_images", "image_rgba")
    }
    assert largest == 3
    assert engine.stats().tiles_encoded == 7 + 4 + 2


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_image_requests_keep_their_picture_and_change_nothing(prefix_caching: bool) -> None:
    """15 pages hold two such prompts, but not their answers: 434 tokens take 7 pages, 448 are full.

    Each request has a picture of its own, and the vision cache has room for two of them.
    """
    config = dict(kv_cache_tokens=15 * 64, max_model_len=15 * 64, vision_cache_bytes=0, prefix_caching=prefix_caching)
    engine = make_engine(**config)
    requests = [
        case_request(VARIANT, "image_rgba", request_id=str(i), temperature=0.7 * (i % 2), seed=i, cache_salt=str(i))
        for i in range(5)
    ]
    events = run_all(engine, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().tiles_encoded == 10
    large = make_engine()
    assert {name: tokens_of(found) for name, found in events.items()} == {
        request.request_id: tokens_of(run_all(large, [request])[request.request_id]) for request in requests
    }


def test_penalties_survive_preemption() -> None:
    params: dict[str, Any] = dict(max_tokens=150, temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2)
    requests = [case_request(VARIANT, "text_short", request_id=str(i), seed=i, **params) for i in range(3)]
    small, large = make_engine(kv_cache_tokens=4 * 64, max_model_len=4 * 64), make_engine()
    events = run_all(small, requests)
    assert small.stats().preemptions > 0
    assert {name: tokens_of(found) for name, found in events.items()} == {
        request.request_id: tokens_of(run_all(large, [request])[request.request_id]) for request in requests
    }


def test_aborts_in_every_state_free_pages_and_leave_the_others_alone(alone: dict[str, list[int]]) -> None:
    engine = make_engine(prefill_chunk_tokens=256, max_num_seqs=3)
    bystanders = [r for r in mixed_requests() if r.request_id in ("text_short", "multi_turn")]
    victims = [case_request(VARIANT, "image_rgba", request_id=f"victim {i}", repetition_penalty=1.1) for i in range(4)]
    states = []

    def abort(step: int) -> None:
        name = {0: "victim 3", 1: "victim 0", 4: "victim 1", 9: "victim 2"}.get(step)
        if name is not None:
            request = engine.scheduler.requests[name]
            states.append((request.status.value, request.num_computed > 0, request.num_generated > 0))
            assert engine.abort(name) == TokenEvent(request_id=name, finish_reason="abort")
            assert request.pages == []
            assert engine.check_integrity()

    order = [victims[0], bystanders[0], victims[1], bystanders[1], *victims[2:]]
    events = run_all(engine, order, abort)
    assert states == [
        ("waiting", False, False),
        ("running", True, False),
        ("running", True, True),
        ("running", True, True),
    ]
    assert {r.request_id: tokens_of(events[r.request_id]) for r in bystanders} == {
        r.request_id: alone[r.request_id] for r in bystanders
    }
    assert engine.abort("victim 0") is None
    assert engine.runner._features.keys() == engine.pictures._kept.keys()


def test_requests_join_between_steps(alone: dict[str, list[int]]) -> None:
    engine = make_engine(prefill_chunk_tokens=200)
    late = {3 * i: request for i, request in enumerate(mixed_requests())}
    tokens: dict[str, list[int]] = {request.request_id: [] for request in late.values()}
    for step in range(100):
        if step in late:
            engine.add_request(late[step])
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert not engine.has_work
    assert tokens == alone


def test_eos_and_stop_ids_end_an_answer_with_their_token() -> None:
    variant = "mla-sigmoid"  # its recorded "assistant_prefix" comes to eos at step 19
    answer, short = greedy_tokens(variant, "assistant_prefix"), greedy_tokens(variant, "text_short")
    requests = [
        case_request(variant, "assistant_prefix", ignore_eos=False),
        case_request(variant, "assistant_prefix", request_id="longer", ignore_eos=False, min_tokens=22),
        case_request(variant, "text_short", stop_token_ids=[short[2]]),
    ]
    events = run_all(make_engine(variant), requests)
    assert tokens_of(events["assistant_prefix"]) == answer[:20]
    assert tokens_of(events["text_short"]) == short[: short.index(short[2]) + 1]
    assert events["assistant_prefix"][-1].finish_reason == events["text_short"][-1].finish_reason == "stop"
    assert len(tokens_of(events["longer"])) >= 22
    assert tokens_of(events["longer"])[:19] == answer[:19]


def test_logprobs_come_with_each_token() -> None:
    (events,) = run_all(make_engine(), [case_request(VARIANT, "text_short", max_tokens=3, logprobs=2)]).values()
    for event in events:
        assert event.logprobs is not None
        (record,) = event.logprobs
        assert len(record.top) == 2
        assert record.top[0] == (event.token_ids[0], record.logprob)


def test_requests_without_a_seed_differ() -> None:
    requests = [case_request(VARIANT, "text_short", request_id=str(i), temperature=2.0, max_tokens=8) for i in range(2)]
    first, second = run_all(make_engine(), requests).values()
    assert tokens_of(first) != tokens_of(second)


@pytest.mark.parametrize("culprit", ["text_long", "image_rgba"])
def test_a_failure_ends_the_request_it_belongs_to_alone(culprit: str, alone: dict[str, list[int]]) -> None:
    engine = make_engine(prefill_chunk_tokens=300)
    execute = engine.runner.execute

    def failing(plan: StepPlan) -> StepOutput:
        output = execute(plan)
        for request in plan.requests:
            if request.request_id == culprit and request.num_computed >= 300:
                raise RuntimeError("broken on purpose")
        return output

    engine.runner.execute = failing  # type: ignore[method-assign]
    events = run_all(engine, mixed_requests())
    last = events.pop(culprit)[-1]
    assert (last.finish_reason, last.error) == ("error", "RuntimeError: broken on purpose")
    expected = {name: tokens for name, tokens in alone.items() if name != culprit}
    # Penalised requests count a step's token when it is sampled, so a repeated step must not count it twice.
    assert {name: tokens_of(found) for name, found in events.items()} == expected
    assert engine.stats().failed_requests == 1
    assert engine.runner._features.keys() == engine.pictures._kept.keys()


def test_logits_that_are_not_numbers_fail_their_request(alone: dict[str, list[int]]) -> None:
    engine = make_engine()
    weight = engine.runner.model.language.embed_tokens.weight
    used = {token for r in mixed_requests() for token in [*r.token_ids, *alone[r.request_id]]}
    poison = next(token for token in range(engine.info.vocab_size) if token not in used)
    with torch.inference_mode():
        weight[poison] = float("nan")
    poisoned = EngineRequest(request_id="poisoned", token_ids=[0, poison, 3], sampling=SamplingParams(max_tokens=4))
    events = run_all(engine, [mixed_requests()[2], poisoned])
    assert events["poisoned"] == [
        TokenEvent(request_id="poisoned", finish_reason="error", error="the model's logits are not finite numbers")
    ]
    assert tokens_of(events["text_short"]) == alone["text_short"]


def test_a_lost_device_is_not_survived() -> None:
    engine = make_engine()

    def lost(plan: StepPlan) -> StepOutput:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine.runner.execute = lost  # type: ignore[method-assign]
    engine.add_request(case_request(VARIANT, "text_short"))
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_bad_requests_are_rejected_and_harm_nobody(alone: dict[str, list[int]]) -> None:
    engine = make_engine(max_model_len=1000)
    vocab = engine.info.vocab_size
    good = case_request(VARIANT, "image_rgba")
    (image,) = good.images

    def rejected(message: str, tokens: list[int], images: list[ImageInput], **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 4, **sampling})
        with pytest.raises(RequestRejected, match=message):
            engine.add_request(EngineRequest(request_id="bad", token_ids=tokens, images=images, sampling=params))

    def changed(**fields: Any) -> ImageInput:
        values = {name: getattr(image, name) for name in ("start", "columns", "rows", "tiles", "digest")}
        return ImageInput(**{**values, **fields})

    rejected(f"token id {vocab} is outside the vocabulary of {vocab}", [1, vocab], [])
    rejected("token id -1", [-1], [])
    rejected("no tokens", [], [])
    rejected("more than the context of 1000", [5] * 997, [])
    rejected("logit_bias has token id 9999", [5], [], logit_bias={9999: 1.0})
    rejected("image 0 has 100 bytes for 2 tiles", good.token_ids, [changed(tiles=bytes(100))])
    rejected("image 0 has 0 columns", good.token_ids, [changed(columns=0)])
    rejected("image 0 takes positions -1", good.token_ids, [changed(start=-1)])
    rejected("image 0 takes positions 100", good.token_ids, [changed(start=100)])
    rejected("image 1 takes positions", good.token_ids, [image, image])
    assert not engine.has_work
    (request,) = [r for r in mixed_requests() if r.request_id == "text_short"]
    assert tokens_of(run_all(engine, [request])["text_short"]) == alone["text_short"]


def test_the_context_is_no_longer_than_the_pool() -> None:
    engine = make_engine(kv_cache_tokens=300)
    assert engine.info.max_model_len == engine.info.kv_cache_tokens == 320
    with pytest.raises(ValueError, match="max_model_len 5000 is more than the checkpoint's 4096"):
        make_engine(max_model_len=5000)


def test_the_rehearsal_of_a_largest_step_leaves_no_trace() -> None:
    """CUDA runs it at the start to measure memory; the same code runs here."""
    engine = make_engine(max_num_seqs=3, vision_tile_budget=2, kv_cache_tokens=1024, prefill_chunk_tokens=128)
    engine.runner._rehearse(512)
    events = run_all(engine, [case_request(VARIANT, name, max_tokens=4) for name in ("image_rgba", "text_short")])
    assert tokens_of(events["image_rgba"]) == greedy_tokens(VARIANT, "image_rgba")[:4]
    assert tokens_of(events["text_short"]) == greedy_tokens(VARIANT, "text_short")[:4]
    assert len(engine.runner.sampler.history._free) == 3


def test_integrity_errors_are_counted() -> None:
    engine = make_engine()
    engine.pool.allocate(1)
    assert not engine.check_integrity()
    assert engine.stats().integrity_errors == 1


def test_logs_say_nothing_of_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    with caplog.at_level("DEBUG"):
        engine.runner.execute = lambda plan: (_ for _ in ()).throw(RuntimeError("broken on purpose"))  # type: ignore[method-assign]
        run_all(engine, [EngineRequest(request_id="r", token_ids=[987, 654], sampling=SamplingParams(max_tokens=2))])
    assert "broken on purpose" in caplog.text
    assert "987" not in caplog.text and "654" not in caplog.text
