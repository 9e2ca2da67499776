"""The scheduler against a device that remembers what lies where: nothing lost, double-booked, leaked or stuck."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.kv_cache import PagePool
from server.engine.request import Request, RequestImage, RequestRejected, SamplingParams, Status
from server.engine.scheduler import Scheduler, StepPlan

EOS = 0


def next_token(request_id: str, position: int) -> int:
    """What the fake model says at a position: anything, but always the same; now and then eos."""
    return (int(request_id) * 7919 + position * position * 104729) % 23


def expected_answer(request: Request) -> list[int]:
    answer: list[int] = []
    may_stop = not request.sampling.ignore_eos
    while len(answer) < request.sampling.max_tokens and not (may_stop and answer and answer[-1] == EOS):
        answer.append(next_token(request.request_id, request.num_prompt + len(answer)))
    return answer


@dataclass
class FakeDevice:
    """Cache rows and image features as the real runner keeps them, each row with its owner, position and token."""

    page_size: int
    rows: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    features: dict[tuple[str, int], int] = field(default_factory=dict)  # (request, image start) -> tiles encoded
    tokens_computed: int = 0
    tiles_encoded: int = 0

    def run(self, plan: StepPlan) -> list[int | None]:
        for request in plan.preempted:
            self.forget(request.request_id)
        for encode in plan.encodes:
            key = (encode.request.request_id, encode.image.start)
            assert encode.first == self.features.get(key, 0)
            assert encode.first < encode.last <= encode.image.num_tiles
            self.features[key] = encode.last
            self.tiles_encoded += encode.last - encode.first
        assert len({chunk.request for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            assert chunk.start == chunk.request.num_computed < chunk.end <= chunk.request.num_tokens
            for position in range(chunk.start, chunk.end):
                row = (chunk.request.request_id, position, chunk.request.token_ids[position])
                self.rows[self._slot(chunk.request, position)] = row
            for image in chunk.request.images:
                if image.start < chunk.end and image.end > chunk.start:
                    assert self.features[chunk.request.request_id, image.start] == image.num_tiles
            self.tokens_computed += chunk.end - chunk.start
        for chunk in plan.chunks:  # after all writes: another's row over ours would show
            for position in range(chunk.end):
                row = (chunk.request.request_id, position, chunk.request.token_ids[position])
                assert self.rows[self._slot(chunk.request, position)] == row
            for image in chunk.request.images:
                if image.end <= chunk.end:
                    self.features.pop((chunk.request.request_id, image.start), None)
        assert all(chunk.end - chunk.start == 1 and chunk.samples for chunk in plan.decodes)
        return [next_token(request.request_id, request.num_tokens) for request in plan.sampled]

    def forget(self, request_id: str) -> None:
        self.features = {key: tiles for key, tiles in self.features.items() if key[0] != request_id}

    def _slot(self, request: Request, position: int) -> int:
        return request.pages[position // self.page_size] * self.page_size + position % self.page_size


def make_scheduler(pages: int = 8, page_size: int = 4, **settings: int) -> Scheduler:
    defaults = dict(max_num_seqs=4, max_model_len=1000, prefill_chunk_tokens=16, vision_tile_budget=4)
    return Scheduler(PagePool(pages, page_size), eos_token_id=EOS, **{**defaults, **settings})


def make_request(
    number: int,
    prompt: int,
    max_tokens: int = 4,
    images: Sequence[tuple[int, int, int]] = (),
    *,
    ignore_eos: bool = True,
) -> Request:
    """images: (text tokens before it, slots, tiles beside the global one); they and `prompt` more text tokens."""
    spans: list[RequestImage] = []
    length = 0
    for gap, slots, tiles in images:
        spans.append(RequestImage(length + gap, slots, tiles, 1, b""))
        length += gap + slots
    tokens = [1000 * number + position for position in range(length + prompt)]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(str(number), tokens, sampling, seed=0, images=spans)


def run_step(scheduler: Scheduler, device: FakeDevice) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, device.run(plan))
    scheduler.check_integrity()
    return plan


images = st.lists(st.tuples(st.integers(0, 5), st.integers(2, 12), st.integers(1, 6)), max_size=3)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 30),  # the step it arrives before
        st.integers(1, 40),  # text tokens
        st.integers(1, 24),  # max_tokens
        images,
        st.none() | st.integers(0, 40),  # the step it is aborted before
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    arrivals=arrivals,
    pages=st.integers(2, 40),
    max_num_seqs=st.integers(1, 6),
    chunk=st.integers(1, 40),
    tile_budget=st.integers(1, 6),
)
def test_every_request_ends_right_whatever_comes(
    arrivals: list[tuple[int, int, int, list[tuple[int, int, int]], int | None]],
    pages: int,
    max_num_seqs: int,
    chunk: int,
    tile_budget: int,
) -> None:
    scheduler = make_scheduler(
        pages, max_num_seqs=max_num_seqs, prefill_chunk_tokens=chunk, vision_tile_budget=tile_budget
    )
    device = FakeDevice(scheduler.pool.page_size)
    todo = [
        (arrival[0], make_request(i, *arrival[1:4], ignore_eos=i % 2 == 0), arrival[4])
        for i, arrival in enumerate(arrivals)
    ]
    accepted: list[Request] = []
    aborted: set[Request] = set()
    step = 0
    while scheduler.requests or any(arrives >= step for arrives, _, _ in todo):
        for arrives, request, aborts in todo:
            if arrives == step:
                fits = scheduler.pool.pages_for(request.max_cached_tokens) <= pages
                if fits:
                    scheduler.add(request)
                    accepted.append(request)
                else:
                    with pytest.raises(RequestRejected, match=f"the KV cache has {pages}"):
                        scheduler.add(request)
            if aborts == step and scheduler.finish(request.request_id) is not None:
                aborted.add(request)
                device.forget(request.request_id)
                assert request.pages == []
        if scheduler.requests:
            computed, encoded = device.tokens_computed, device.tiles_encoded
            plan = run_step(scheduler, device)
            assert sum(c.end - c.start for c in plan.prefills) <= chunk
            assert device.tiles_encoded - encoded <= tile_budget
            assert device.tokens_computed - computed + device.tiles_encoded - encoded > 0
            assert len(scheduler.running) <= max_num_seqs
            order = [*scheduler.running, *scheduler.waiting]
            assert order == [request for request in accepted if request in set(order)]
        step += 1

    assert scheduler.pool.num_free == pages
    assert device.features == {}
    for request in accepted:
        assert request.status is Status.FINISHED
        answer = request.token_ids[request.num_prompt :]
        expected = expected_answer(request)
        assert answer == (expected[: len(answer)] if request in aborted else expected)
    # Each preemption is some request's need of a page for a token it has just generated.
    assert scheduler.num_preemptions <= sum(request.num_generated for request in accepted)


def test_the_earliest_request_advances_in_every_step() -> None:
    scheduler, device = make_scheduler(pages=6), FakeDevice(4)
    for number in range(5):
        scheduler.add(make_request(number, prompt=5, max_tokens=16))
    while scheduler.requests:
        earliest = next(iter(scheduler.requests.values()))
        assert earliest in run_step(scheduler, device).requests
    assert scheduler.num_preemptions > 0


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    scheduler, device = make_scheduler(pages=100), FakeDevice(4)
    scheduler.add(make_request(1, prompt=3, max_tokens=12))
    run_step(scheduler, device)
    scheduler.add(make_request(2, prompt=64))
    for _ in range(4):
        plan = run_step(scheduler, device)
        assert [c.request.request_id for c in plan.decodes] == ["1"]
        assert [(c.request.request_id, c.end - c.start) for c in plan.prefills] == [("2", 16)]


def test_short_prompts_share_a_step() -> None:
    scheduler, device = make_scheduler(pages=100), FakeDevice(4)
    for number in range(3):
        scheduler.add(make_request(number, prompt=6))
    plan = run_step(scheduler, device)
    assert [(c.start, c.end, c.samples) for c in plan.prefills] == [(0, 6, True), (0, 6, True), (0, 4, False)]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    scheduler, device = make_scheduler(pages=8), FakeDevice(4)
    scheduler.add(make_request(1, prompt=16, max_tokens=8))
    run_step(scheduler, device)
    scheduler.add(make_request(2, prompt=20, max_tokens=1))
    scheduler.add(make_request(3, prompt=1, max_tokens=1))
    plan = run_step(scheduler, device)
    assert [request.request_id for request in plan.requests] == ["1"]


def test_a_chunk_waits_for_the_tiles_of_the_image_it_touches() -> None:
    scheduler, device = make_scheduler(pages=100, vision_tile_budget=2), FakeDevice(4)
    scheduler.add(make_request(1, prompt=2, images=[(3, 10, 4)]))  # 5 tiles at positions 3 to 12
    steps = [run_step(scheduler, device) for _ in range(3)]
    assert [[(c.start, c.end) for c in plan.prefills] for plan in steps] == [[(0, 3)], [], [(3, 15)]]
    assert [[(e.first, e.last) for e in plan.encodes] for plan in steps] == [[(0, 2)], [(2, 4)], [(4, 5)]]


def test_a_chunk_may_cut_through_an_image_which_is_encoded_once() -> None:
    scheduler, device = make_scheduler(pages=100, prefill_chunk_tokens=5), FakeDevice(4)
    scheduler.add(make_request(1, prompt=2, images=[(3, 10, 1)]))
    steps = [run_step(scheduler, device) for _ in range(3)]
    assert [[(c.start, c.end) for c in plan.prefills] for plan in steps] == [[(0, 5)], [(5, 10)], [(10, 15)]]
    assert [len(plan.encodes) for plan in steps] == [1, 0, 0]


def test_the_latest_is_preempted_keeps_its_tokens_and_is_encoded_again() -> None:
    scheduler, device = make_scheduler(pages=5), FakeDevice(4)
    scheduler.add(make_request(1, prompt=4, max_tokens=9))
    scheduler.add(make_request(2, prompt=2, max_tokens=6, images=[(0, 6, 1)]))
    late = scheduler.requests["2"]
    run_step(scheduler, device)
    while not scheduler.num_preemptions:
        run_step(scheduler, device)
    assert late.status is Status.WAITING and late.pages == [] and late.num_generated > 0
    kept = list(late.token_ids)
    while scheduler.requests:
        run_step(scheduler, device)
    assert late.token_ids[: len(kept)] == kept
    assert late.token_ids[late.num_prompt :] == expected_answer(late)
    assert device.tiles_encoded == 4


@pytest.mark.parametrize("prompt, max_tokens, fits", [(12, 21, True), (13, 21, False), (33, 1, False), (32, 1, True)])
def test_what_cannot_finish_alone_in_the_pool_is_rejected(prompt: int, max_tokens: int, fits: bool) -> None:
    """8 pages of 4 tokens; the last token generated needs no row of its own."""
    scheduler = make_scheduler()
    if fits:
        scheduler.add(make_request(1, prompt, max_tokens))
    else:
        with pytest.raises(RequestRejected, match="need 9 pages of 4 tokens, the KV cache has 8"):
            scheduler.add(make_request(1, prompt, max_tokens))
    assert len(scheduler.requests) == fits


def test_what_is_longer_than_the_context_is_rejected_with_the_numbers() -> None:
    scheduler = make_scheduler(max_model_len=20)
    scheduler.add(make_request(1, 16, 4))
    with pytest.raises(RequestRejected, match="17 prompt tokens and max_tokens 4 make 21, more than the context of 20"):
        scheduler.add(make_request(2, 17, 4))


def test_empty_prompts_and_doubled_ids_are_rejected() -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestRejected, match="no tokens"):
        scheduler.add(make_request(1, 0))
    scheduler.add(make_request(1, 3))
    with pytest.raises(RequestRejected, match="already in use"):
        scheduler.add(make_request(1, 3))


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert scheduler.finish("nobody") is None
