"""A step is launched before the tokens of the one before are known: nothing is lost, mixed up or said twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.batch import PAGE_SIZE
from server.engine.core import Engine
from server.engine.request import (
    EngineConfig,
    EngineInfo,
    EngineRequest,
    Grammar,
    Request,
    SamplingParams,
    TokenEvent,
)
from server.engine.runner import Runner, StepOutput
from server.engine.sampler import Sampled, SampledToken
from server.engine.scheduler import StepPlan
from tests.engine.support import case_request, engine_config, greedy_tokens, run_all, tokens_of

EOS = 0
VOCAB = 50
BROKEN = 49
"""A prompt with this token gives logits that are not numbers."""
VARIANT = "mla-softmax"


def following(row: int) -> int:
    """The token that follows a cache row: anything but BROKEN, always the same, now and then eos."""
    return row % 23


def extended(row: int, token: int) -> int:
    """The cache row of a token: it depends on all rows before it."""
    return random.Random(row * VOCAB + token).getrandbits(48)


def answer_of(request: EngineRequest) -> list[int]:
    """What the fake model says to a prompt, as far as the request goes."""
    row = 1
    for token in request.token_ids:
        row = extended(row, token)
    answer: list[int] = []
    while len(answer) < request.sampling.max_tokens and (request.sampling.ignore_eos or EOS not in answer):
        answer.append(following(row))
        row = extended(row, answer[-1])
    return answer


@dataclass
class FakeSampled:
    tokens: list[SampledToken | None]
    fails: bool

    def collect(self) -> list[SampledToken | None]:
        if self.fails:
            raise RuntimeError("broken when collected")
        return self.tokens


@dataclass
class FakeOutput:
    sampled: FakeSampled


@dataclass
class FakeRunner:
    """A device that works in the order of the launches, on a cache of which each row depends on those before it.

    A step fails when it is launched for the third token of a request named "launch ...", and when it is collected if it
    has one named "collect ...".
    """

    num_pages: int
    runs_ahead: bool
    folder: Path = Path("nowhere")
    rows: dict[int, int] = field(default_factory=dict)
    last: list[int] = field(default_factory=list)
    launched: list[StepPlan] = field(default_factory=list)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            max_model_len=self.num_pages * PAGE_SIZE,
            max_num_seqs=4,
            kv_cache_tokens=self.num_pages * PAGE_SIZE,
            vocab_size=VOCAB,
            eos_token_id=EOS,
            device="none",
            dtype="none",
            num_parameters=0,
            load_seconds=0.0,
        )

    def vision_cache_slots(self, max_model_len: int) -> int:
        return max_model_len

    def forget(self, request_id: str) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepOutput:
        chosen: list[int] = []
        tokens: list[SampledToken | None] = []
        for chunk in plan.chunks:
            request = chunk.request
            ids = request.token_ids[chunk.start : chunk.end]
            if request.num_pending:
                assert len(ids) == 1
                ids = [self.last[request.row]]
            row = self.rows[self._slot(request, chunk.start - 1)] if chunk.start else 1
            for position, token in enumerate(ids, chunk.start):
                row = extended(row, token)
                self.rows[self._slot(request, position)] = row
            if chunk.samples:
                chosen.append(following(row))
                tokens.append(None if BROKEN in request.token_ids else SampledToken(chosen[-1], None))
        if any(request.request_id.startswith("launch") and request.num_generated == 2 for request in plan.requests):
            raise RuntimeError("broken when launched")
        self.last = chosen
        self.launched.append(plan)
        fails = any(request.request_id.startswith("collect") for request in plan.requests)
        return cast(StepOutput, FakeOutput(FakeSampled(tokens, fails)))

    def _slot(self, request: Request, position: int) -> int:
        return request.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


@pytest.fixture
def unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step fails unnoticed: running its requests one by one would give the right tokens too."""

    def refuse(self: Engine, plan: StepPlan) -> list[TokenEvent]:
        raise AssertionError(f"a step of {len(plan.requests)} requests failed")

    monkeypatch.setattr(Engine, "_run_one_by_one", refuse)


def fake_engine(*, pages: int = 64, ahead: bool = True, **settings: Any) -> Engine:
    runner = FakeRunner(pages, ahead)
    return Engine(EngineConfig(model_path="nowhere", **settings), cast(Runner, runner))


def prompt(seed: int, length: int, name: str | None = None, **sampling: Any) -> EngineRequest:
    """Requests with equal seeds have the shorter of their prompts in common."""
    draw = random.Random(seed)
    tokens = [draw.randrange(1, BROKEN) for _ in range(length)]
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})
    return EngineRequest(request_id=name or f"{seed} {length}", token_ids=tokens, sampling=params)


@dataclass(frozen=True)
class Visitor:
    """A request, and the steps before which it comes and is aborted."""

    step: int
    seed: int
    length: int
    max_tokens: int
    ignore_eos: bool
    kind: str
    priority: int
    aborted: int | None

    def request(self, number: int) -> EngineRequest:
        base = prompt(self.seed, self.length)
        tokens = [*base.token_ids, BROKEN] if self.kind == "broken" else base.token_ids
        return EngineRequest(
            request_id=f"{self.kind} {number}",
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos),
            priority=self.priority,
        )


visitors = st.lists(
    st.builds(
        Visitor,
        step=st.integers(0, 40),
        seed=st.integers(0, 2),
        length=st.integers(1, 150) | st.sampled_from([63, 64, 65, 127, 128]),
        max_tokens=st.integers(1, 90),
        ignore_eos=st.booleans(),
        kind=st.sampled_from(["good", "good", "good", "broken", "launch", "collect"]),
        priority=st.integers(0, 1),
        aborted=st.none() | st.integers(0, 80),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(visitors=visitors, pages=st.integers(4, 12), max_num_seqs=st.integers(1, 5), chunk=st.integers(20, 200))
def test_every_answer_is_right_whoever_comes_and_whatever_fails(
    visitors: list[Visitor], pages: int, max_num_seqs: int, chunk: int
) -> None:
    engine = fake_engine(pages=pages, max_num_seqs=max_num_seqs, prefill_chunk_tokens=chunk)
    requests = [visitor.request(number) for number, visitor in enumerate(visitors)]
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    step = 0
    while engine.has_work or any(visitor.step >= step for visitor in visitors):
        for visitor, request in zip(visitors, requests, strict=True):
            if visitor.step == step:
                engine.add_request(request)
            if visitor.aborted == step and (event := engine.abort(request.request_id)) is not None:
                events[request.request_id].append(event)
        for event in engine.step():
            events[event.request_id].append(event)
        assert engine.check_integrity()
        assert len(engine._in_flight) <= 1
        step += 1
        assert step < 5000
    assert engine.pool.num_free == pages
    for visitor, request in zip(visitors, requests, strict=True):
        found = events[request.request_id]
        answer, said, reason = answer_of(request), tokens_of(found), found[-1].finish_reason
        assert all(event.finish_reason is None for event in found[:-1])
        if said:
            assert found[0].cached_tokens is not None and found[0].queue_s is not None
        possible = answer[: {"broken": 0, "collect": 0, "launch": 2, "good": None}[visitor.kind]]
        if reason == "abort":
            assert visitor.aborted is not None and said == possible[: len(said)]
            continue
        assert said == possible
        ending = "stop" if answer[-1] == EOS and not visitor.ignore_eos else "length"
        assert reason == (ending if possible == answer else "error")


@pytest.mark.usefixtures("unbroken")
def test_the_next_step_is_launched_before_the_last_is_collected() -> None:
    engine = fake_engine()
    runner = cast(FakeRunner, engine.runner)
    engine.add_request(prompt(1, 5, max_tokens=3))
    seen = []
    while engine.has_work:
        said = len(tokens_of(engine.step()))
        seen.append((len(runner.launched), said))
    assert seen == [(1, 0), (2, 1), (3, 1), (3, 1)]  # three steps for three tokens, the last one known to be the last


def test_without_running_ahead_no_event_waits() -> None:
    engine = fake_engine(ahead=False)
    engine.add_request(prompt(1, 5, max_tokens=3))
    assert [len(tokens_of(engine.step())) for _ in range(3)] == [1, 1, 1]
    assert not engine.has_work


def real_engine(**settings: Any) -> Engine:
    """The real runner on the CPU, made to run ahead."""
    engine = Engine(engine_config(VARIANT, **settings))
    engine.runner.runs_ahead = True
    return engine


def mixed_requests() -> list[EngineRequest]:
    """Greedy, seeded and penalised, with bias and banned ids, some with images."""
    penalties: dict[str, Any] = dict(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    return [
        case_request(VARIANT, "text_long", max_tokens=12),
        case_request(VARIANT, "image_rgba", max_tokens=14, temperature=0.8, seed=5, top_p=0.9),
        case_request(VARIANT, "text_short", max_tokens=90, **penalties),
        case_request(VARIANT, "three_images", max_tokens=10, logprobs=2),
        case_request(VARIANT, "multi_turn", max_tokens=90, temperature=1.2, seed=6, **penalties),
        case_request(
            VARIANT, "text_short", request_id="banned", max_tokens=30, temperature=1.0, seed=7, min_tokens=20,
            ignore_eos=False, stop_token_ids=list(range(0, 1200, 3)),
        ),
        case_request(
            VARIANT, "text_short", request_id="stops", max_tokens=60, temperature=1.0, seed=8,
            stop_token_ids=list(range(0, 1200, 30)),
        ),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, list[TokenEvent]]:
    """The events of each mixed request without company, and without running ahead."""
    engine = Engine(engine_config(VARIANT))
    return {r.request_id: run_all(engine, [r])[r.request_id] for r in mixed_requests()}


def said(events: dict[str, list[TokenEvent]]) -> dict[str, tuple[list[int], str | None]]:
    return {name: (tokens_of(found), found[-1].finish_reason) for name, found in events.items()}


@pytest.mark.usefixtures("unbroken")
@pytest.mark.parametrize("sizes", [{}, {"prefill_chunk_tokens": 150}, {"max_num_seqs": 2}])
def test_tokens_are_the_same_as_without_running_ahead(
    sizes: dict[str, int], alone: dict[str, list[TokenEvent]]
) -> None:
    events = run_all(real_engine(**sizes), mixed_requests())
    assert said(events) == said(alone)
    assert [event.logprobs is not None for event in events["three_images"]] == [True] * 10


@pytest.mark.usefixtures("unbroken")
def test_recorded_answers_with_requests_that_join_and_leave(alone: dict[str, list[TokenEvent]]) -> None:
    engine = real_engine(prefill_chunk_tokens=200)
    late = {4 * i: request for i, request in enumerate(mixed_requests())}
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in late.values()}
    step = 0
    while engine.has_work or step < 30:
        if step in late:
            engine.add_request(late[step])
        if step == 18:
            aborted = engine.abort("text_short")
            assert aborted is not None
            events["text_short"].append(aborted)
        for event in engine.step():
            events[event.request_id].append(event)
        step += 1
    assert engine.check_integrity() and engine.pool.num_free == engine.pool.num_pages
    left = said(events)
    cut, _ = left.pop("text_short")
    assert 1 < len(cut) < 20 and cut == tokens_of(alone["text_short"])[: len(cut)]
    assert left == {name: found for name, found in said(alone).items() if name != "text_short"}
    assert len(engine.runner.sampler.history._free) == engine.info.max_num_seqs


@pytest.mark.usefixtures("unbroken")
def test_preemption_changes_nothing() -> None:
    params: dict[str, Any] = dict(max_tokens=150, temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2)
    requests = [case_request(VARIANT, "text_short", request_id=str(i), seed=i, **params) for i in range(3)]
    small = real_engine(kv_cache_tokens=4 * 64, max_model_len=4 * 64)
    events = run_all(small, requests)
    assert small.stats().preemptions > 0
    assert said(events) == said(run_all(Engine(engine_config(VARIANT)), requests))


@pytest.mark.parametrize("when", ["launched", "collected"])
def test_a_failure_ends_the_request_it_belongs_to_alone(
    when: str, alone: dict[str, list[TokenEvent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = real_engine(prefill_chunk_tokens=300)
    execute, collect = engine.runner.execute, Sampled.collect

    def fails(requests: list[Request]) -> bool:
        return any(request.request_id == "image_rgba" and request.num_tokens >= 437 for request in requests)

    def failing_execute(plan: StepPlan) -> StepOutput:
        output = execute(plan)
        if when == "launched" and fails(plan.requests):
            raise RuntimeError("broken on purpose")
        return output

    def failing_collect(sampled: Sampled) -> list[SampledToken | None]:
        if when == "collected" and fails(sampled.requests):
            raise RuntimeError("broken on purpose")
        return collect(sampled)

    monkeypatch.setattr(engine.runner, "execute", failing_execute)
    monkeypatch.setattr(Sampled, "collect", failing_collect)
    events = run_all(engine, mixed_requests())
    last = events.pop("image_rgba")[-1]
    assert (last.finish_reason, last.error) == ("error", "RuntimeError: broken on purpose")
    assert said(events) == {name: found for name, found in said(alone).items() if name != "image_rgba"}
    assert engine.stats().failed_requests == 1
    assert engine.runner._features.keys() == engine.pictures._kept.keys()


@pytest.mark.parametrize("when", ["launched", "collected"])
def test_a_lost_device_is_not_survived(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = real_engine()
    engine.add_request(case_request(VARIANT, "text_short"))
    assert engine.step() == [] and len(tokens_of(engine.step())) == 1

    def lost(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    if when == "launched":
        monkeypatch.setattr(engine.runner, "execute", lost)
    else:
        monkeypatch.setattr(Sampled, "collect", lost)
    with pytest.raises(torch.AcceleratorError):
        engine.step()


@pytest.mark.usefixtures("unbroken")
def test_an_abort_while_its_step_is_in_flight_gives_the_pages_back_at_once() -> None:
    engine = real_engine()
    engine.add_request(case_request(VARIANT, "text_short", request_id="a", repetition_penalty=1.1))
    assert engine.step() == []
    request = engine.scheduler.requests["a"]
    assert engine.abort("a") == TokenEvent(request_id="a", finish_reason="abort")
    assert engine.pool.num_free == engine.pool.num_pages and request.num_pending == 0
    engine.add_request(case_request(VARIANT, "text_short", request_id="a", max_tokens=5))  # the same name again
    assert engine.has_work
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert tokens_of(events) == greedy_tokens(VARIANT, "text_short")[:5]


@pytest.mark.usefixtures("unbroken")
def test_a_request_with_a_grammar_waits_for_its_tokens_and_others_are_not_disturbed(
    alone: dict[str, list[TokenEvent]],
) -> None:
    grammar = Grammar("regex", r"[12]\d{3}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])")
    guided = case_request(VARIANT, "text_short", request_id="date", max_tokens=40, ignore_eos=False, grammar=grammar)
    expected = run_all(Engine(engine_config(VARIANT)), [guided])
    events = run_all(real_engine(), [*mixed_requests(), guided])
    assert said(events) == {**said(alone), **said(expected)}
    assert events["date"][-1].finish_reason == "stop"
