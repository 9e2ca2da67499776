"""The scheduler against a device that remembers what lies where: nothing lost, mixed up, leaked or stuck."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.kv_cache import PagePool
from server.engine.prefix import ContentKeys
from server.engine.request import PENDING, QueueFull, Request, RequestImage, RequestRejected, SamplingParams, Status
from server.engine.scheduler import Scheduler, StepPlan
from server.engine.vision_cache import VisionCache

EOS = 0


def next_token(seed: int, position: int) -> int:
    """What the fake model says at a position: anything, but always the same; now and then eos."""
    return (seed * 7919 + position * position * 104729) % 23


def expected_answer(request: Request) -> list[int]:
    return answer_of(request.seed, request.num_prompt, request.sampling)


def answer_of(seed: int, num_prompt: int, sampling: SamplingParams) -> list[int]:
    answer: list[int] = []
    while len(answer) < sampling.max_tokens and (sampling.ignore_eos or not answer or answer[-1] != EOS):
        answer.append(next_token(seed, num_prompt + len(answer)))
    return answer


def contents(request: Request) -> list[int]:
    """What the cache row of each of the request's tokens depends on: its token or picture, and all before it.

    The device knows a pending token.
    """
    rows: list[int] = []
    for position, known in enumerate(request.token_ids):
        token = next_token(request.seed, position) if known == PENDING else known
        shown = [(i.key, position - i.start) for i in request.images if i.start <= position < i.end]
        rows.append(hash((rows[-1] if rows else 0, token, *shown)))
    return rows


@dataclass
class FakeDevice:
    """Cache rows and pictures as the real runner keeps them, each row with what it depends on."""

    page_size: int
    rows: dict[int, int] = field(default_factory=dict)
    pictures: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # key -> tiles encoded, slots
    tokens_computed: int = 0
    tiles_encoded: int = 0

    def run(self, plan: StepPlan) -> list[int]:
        for key in plan.dropped_pictures:
            self.pictures.pop(key, None)
        for encode in plan.encodes:
            assert encode.first == self.pictures.get(encode.picture.key, (0, 0))[0]
            assert encode.first < encode.last <= encode.picture.num_tiles and encode.picture.tiles
            self.pictures[encode.picture.key] = encode.last, encode.picture.num_slots
            self.tiles_encoded += encode.last - encode.first
        assert len({chunk.request for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            rows = contents(chunk.request)
            assert chunk.start == chunk.request.num_computed < chunk.end <= chunk.request.num_tokens
            for position in range(chunk.start, chunk.end):
                self.rows[self._slot(chunk.request, position)] = rows[position]
            for image in chunk.request.images:
                if image.start < chunk.end and image.end > chunk.start:
                    assert image.picture is not None
                    assert self.pictures[image.key][0] == image.picture.num_tiles
            self.tokens_computed += chunk.end - chunk.start
        for chunk in plan.chunks:  # after all writes: another's row over ours would show
            rows = contents(chunk.request)
            assert [self.rows[self._slot(chunk.request, i)] for i in range(chunk.end)] == rows[: chunk.end]
        assert all(chunk.end - chunk.start == 1 and chunk.samples for chunk in plan.decodes)
        return [next_token(request.seed, request.num_tokens) for request in plan.sampled]

    @property
    def slots(self) -> int:
        return sum(slots for _, slots in self.pictures.values())

    def _slot(self, request: Request, position: int) -> int:
        return request.pages[position // self.page_size] * self.page_size + position % self.page_size


def make_scheduler(
    pages: int = 8, page_size: int = 4, *, picture_slots: int = 1000, caching: bool = True, **settings: int
) -> Scheduler:
    defaults = dict(
        max_num_seqs=4, max_queued_requests=100, max_model_len=1000, prefill_chunk_tokens=16, vision_tile_budget=4
    )
    return Scheduler(
        PagePool(pages, page_size),
        VisionCache(picture_slots),
        ContentKeys(page_size, salt=b"pepper") if caching else None,
        eos_token_id=EOS,
        **{**defaults, **settings},
    )


def make_request(
    number: int,
    prompt: int,
    max_tokens: int = 4,
    images: Sequence[tuple[int, int, int]] = (),
    *,
    ignore_eos: bool = True,
    alike: int | None = None,
    picture: str = "a",
    priority: int = 0,
) -> Request:
    """images: (text tokens before it, slots, tiles beside the global one); they and `prompt` more text tokens.

    Requests have their tokens in common if `alike` is the same, and the pictures of one place if `picture` is.
    """
    family = number if alike is None else alike
    spans: list[RequestImage] = []
    length = 0
    for gap, slots, tiles in images:
        key = f"{family} {len(spans)} {picture}".encode()
        spans.append(RequestImage(length + gap, slots, tiles, 1, key, b"tiles"))
        length += gap + slots
    tokens = [1000 * family + position for position in range(length + prompt)]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(str(number), tokens, sampling, seed=number, images=spans, priority=priority)


@dataclass(frozen=True)
class InFlight:
    plan: StepPlan
    tokens: list[int]


def launch_step(scheduler: Scheduler, device: FakeDevice) -> InFlight | None:
    plan = scheduler.schedule()
    if plan is None:
        return None
    tokens = device.run(plan)
    scheduler.launch(plan)
    scheduler.check_integrity()
    return InFlight(plan, tokens)


def land(scheduler: Scheduler, step: InFlight) -> None:
    for chunk, token in zip(step.plan.sampled_chunks, step.tokens, strict=True):
        if chunk.request.status is not Status.FINISHED:
            scheduler.commit(chunk, token)
    scheduler.check_integrity()


def run_step(scheduler: Scheduler, device: FakeDevice) -> StepPlan:
    step = launch_step(scheduler, device)
    assert step is not None
    land(scheduler, step)
    return step.plan


@dataclass(frozen=True)
class Arrival:
    """A request of a family: text with pictures that all of it share, more text of its own, perhaps a next turn."""

    step: int
    family: int
    picture: str
    own: int
    max_tokens: int
    seed: int
    turns: int
    priority: int
    aborted: int | None

    def request(self, number: int, families: list[list[tuple[int, int, int]]], text: int) -> Request:
        images = families[self.family % len(families)]
        sampling = SamplingParams(max_tokens=self.max_tokens, ignore_eos=number % 2 == 0)
        base = make_request(0, text, images=images, alike=self.family % len(families), picture=self.picture)
        tokens = list(base.token_ids)
        for turn in range(1, self.turns):  # what an earlier request with the same seed and length may have said
            tokens += [*answer_of(self.seed, len(tokens), sampling), 500 + turn]
        tokens += [10000 * number + position for position in range(self.own)]
        return Request(str(number), tokens, sampling, seed=self.seed, images=base.images, priority=self.priority)


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        family=st.integers(0, 1),
        picture=st.sampled_from("ab"),
        own=st.integers(0, 12),
        max_tokens=st.integers(1, 24),
        seed=st.integers(0, 1),
        turns=st.integers(1, 3),
        priority=st.integers(0, 1),
        aborted=st.none() | st.integers(0, 40),
    ),
    min_size=1,
    max_size=10,
)
families = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(2, 12), st.integers(1, 6)), max_size=3), min_size=1, max_size=2
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    arrivals=arrivals,
    families=families,
    text=st.integers(1, 20),
    pages=st.integers(2, 40),
    max_num_seqs=st.integers(1, 6),
    chunk=st.integers(1, 40),
    tile_budget=st.integers(1, 6),
    spare_slots=st.integers(0, 40),
    caching=st.booleans(),
    ahead=st.booleans(),
)
def test_every_request_ends_right_whatever_comes(
    arrivals: list[Arrival],
    families: list[list[tuple[int, int, int]]],
    text: int,
    pages: int,
    max_num_seqs: int,
    chunk: int,
    tile_budget: int,
    spare_slots: int,
    caching: bool,
    ahead: bool,
) -> None:
    """`ahead`: each step is launched before the one before it is committed."""
    capacity = max(sum(slots for _, slots, _ in images) for images in families) + spare_slots
    scheduler = make_scheduler(
        pages,
        picture_slots=capacity,
        caching=caching,
        max_num_seqs=max_num_seqs,
        prefill_chunk_tokens=chunk,
        vision_tile_budget=tile_budget,
    )
    device = FakeDevice(scheduler.pool.page_size)
    todo = [(arrival, arrival.request(i, families, text)) for i, arrival in enumerate(arrivals)]
    accepted: list[Request] = []
    aborted: set[Request] = set()
    in_flight: InFlight | None = None
    step = 0
    while in_flight or scheduler.requests or any(arrival.step >= step for arrival, _ in todo):
        for arrival, request in todo:
            if arrival.step == step:
                if scheduler.pool.pages_for(request.max_cached_tokens) <= pages:
                    scheduler.add(request)
                    accepted.append(request)
                else:
                    with pytest.raises(RequestRejected, match=f"the KV cache has {pages}"):
                        scheduler.add(request)
            if arrival.aborted == step and scheduler.finish(request.request_id, spoiled=step % 3 == 0) is not None:
                aborted.add(request)
                assert request.pages == []
        if in_flight and scheduler.needs_outcome(in_flight.plan):
            land(scheduler, in_flight)
            in_flight = None
        computed, encoded = device.tokens_computed, device.tiles_encoded
        launched = launch_step(scheduler, device)
        if launched is not None:
            assert sum(c.end - c.start for c in launched.plan.prefills) <= chunk
            assert device.tiles_encoded - encoded <= tile_budget
            assert device.tokens_computed - computed + device.tiles_encoded - encoded > 0
            assert len(scheduler.running) <= max_num_seqs
            assert device.slots <= capacity
        else:
            assert in_flight or not scheduler.requests
        if in_flight:
            land(scheduler, in_flight)
        in_flight = launched
        if in_flight and not ahead:
            land(scheduler, in_flight)
            in_flight = None
        step += 1

    assert scheduler.pool.num_free == pages
    assert caching or scheduler.pool.num_cached == scheduler.prefix_hit_tokens == 0
    kept = device.pictures.keys() - scheduler.pictures.take_dropped()
    assert kept == scheduler.pictures._kept.keys()
    for request in accepted:
        assert request.status is Status.FINISHED
        assert all(image.tiles == b"" and image.picture is None for image in request.images)
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


@pytest.mark.parametrize("caching", [True, False])
def test_the_latest_is_preempted_and_keeps_its_tokens_and_pictures(caching: bool) -> None:
    scheduler, device = make_scheduler(pages=5, caching=caching), FakeDevice(4)
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
    assert device.tiles_encoded == 2


def test_choices_of_one_prompt_compute_it_once() -> None:
    """18 tokens fill 4 pages of 4: the first choice computes all, each other one the 2 tokens that fill no page."""
    scheduler, device = make_scheduler(pages=100, max_num_seqs=10), FakeDevice(4)
    for number in range(6):
        scheduler.add(make_request(number, prompt=6, max_tokens=3, images=[(2, 10, 3)], alike=0))
    plan = run_step(scheduler, device)
    assert [(c.start, c.end) for c in plan.prefills] == [(0, 16)]
    assert len(scheduler.waiting) == 5
    plan = run_step(scheduler, device)
    assert [(c.start, c.end) for c in plan.prefills] == [(16, 18)] * 6
    assert scheduler.prefix_hit_tokens == 5 * 16 and device.tiles_encoded == 4
    assert [request.num_cached for request in scheduler.running] == [0, *[16] * 5]


def test_who_waits_for_a_shared_prefix_lets_others_pass() -> None:
    scheduler, device = make_scheduler(pages=100, prefill_chunk_tokens=24), FakeDevice(4)
    for number, alike in ((0, 0), (1, 0), (2, 2)):
        scheduler.add(make_request(number, prompt=18, alike=alike))
    plan = run_step(scheduler, device)
    assert [(c.request.request_id, c.start, c.end) for c in plan.prefills] == [("0", 0, 18), ("2", 0, 6)]
    plan = run_step(scheduler, device)
    assert [(c.request.request_id, c.start, c.end) for c in plan.prefills] == [("2", 6, 18), ("1", 16, 18)]


def test_a_new_picture_in_two_prompts_is_encoded_once() -> None:
    """Different text before it: no page in common, but the picture."""
    scheduler, device = make_scheduler(pages=100, vision_tile_budget=2, prefill_chunk_tokens=100), FakeDevice(4)
    for number, gap in ((1, 3), (2, 5)):
        scheduler.add(make_request(number, prompt=2, images=[(gap, 10, 4)]))
    for request in scheduler.waiting:
        request.images[0].key = b"the same"
    steps = [run_step(scheduler, device) for _ in range(3)]
    assert [[(e.first, e.last) for e in plan.encodes] for plan in steps] == [[(0, 2)], [(2, 4)], [(4, 5)]]
    assert [(c.start, c.end) for c in steps[2].prefills] == [(3, 15), (5, 17)]
    assert scheduler.pictures.num_hits == 1


def test_an_answer_is_found_by_the_next_turn() -> None:
    scheduler, device = make_scheduler(pages=100), FakeDevice(4)
    scheduler.add(make_request(1, prompt=7, max_tokens=10))
    first = scheduler.requests["1"]
    while scheduler.requests:
        run_step(scheduler, device)
    second = make_request(1, prompt=0)
    second = Request("2", [*first.token_ids, 77, 78], first.sampling, seed=1)
    scheduler.add(second)
    run_step(scheduler, device)
    assert second.num_cached == 16  # of 17 tokens the last was never fed back, and none of the 16 is lost


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler, device = make_scheduler(pages=100), FakeDevice(4)
    for number in range(2):
        scheduler.add(make_request(number, prompt=12, alike=0, max_tokens=1))
        request = scheduler.requests[str(number)]
        run_step(scheduler, device)
        assert request.num_cached == 8 * number


@pytest.mark.parametrize("last, hit", [(3, 12), (4, 16)])
def test_a_hit_may_end_inside_a_picture(last: int, hit: int) -> None:
    """The picture has positions 2 to 19; the page after the hit has been evicted."""
    scheduler, device = make_scheduler(pages=100), FakeDevice(4)
    scheduler.add(make_request(0, prompt=2, images=[(2, 18, 2)], alike=0, max_tokens=1))
    run_step(scheduler, device)
    run_step(scheduler, device)
    page = scheduler.pool.find(make_request_keys(scheduler))[last]
    scheduler.pool.share([page])
    scheduler.pool.forget([page])
    scheduler.pool.free([page])
    scheduler.add(make_request(1, prompt=2, images=[(2, 18, 2)], alike=0, max_tokens=1))
    plan = run_step(scheduler, device)
    assert [(c.start, c.end) for c in plan.prefills] == [(hit, 22)]
    assert plan.encodes == []


def test_a_hit_inside_a_picture_whose_features_are_gone_waits_for_its_tiles() -> None:
    scheduler, device = make_scheduler(pages=100, picture_slots=20, vision_tile_budget=2), FakeDevice(4)
    scheduler.add(make_request(0, prompt=1, images=[(2, 9, 3)], alike=0, max_tokens=1))
    scheduler.add(make_request(5, prompt=1, images=[(0, 15, 1)], max_tokens=1))
    while scheduler.requests:
        run_step(scheduler, device)
    scheduler.add(make_request(1, prompt=1, images=[(2, 9, 3)], alike=0, max_tokens=1))
    scheduler.add(make_request(2, prompt=40))
    steps = [run_step(scheduler, device) for _ in range(2)]
    assert [[(e.first, e.last) for e in plan.encodes] for plan in steps] == [[(0, 2)], [(2, 4)]]
    chunks = [[(c.request.request_id, c.start, c.end) for c in plan.prefills] for plan in steps]
    assert chunks == [[("2", 0, 16)], [("1", 8, 12), ("2", 16, 28)]]


def test_a_preempted_request_that_has_pictures_goes_on_before_a_better_one_that_waits_for_their_room() -> None:
    """Room for one picture. Nobody runs; the first in the queue can't have its picture before the second has ended."""
    scheduler, device = make_scheduler(pages=6, picture_slots=10), FakeDevice(4)
    scheduler.add(make_request(0, prompt=4, max_tokens=16))
    scheduler.add(make_request(1, prompt=2, max_tokens=10, images=[(0, 8, 1)], priority=1))
    while not scheduler.num_preemptions:
        run_step(scheduler, device)
    scheduler.finish("0")
    scheduler.add(make_request(2, prompt=2, max_tokens=2, images=[(0, 8, 1)]))
    assert [request.request_id for request in scheduler.waiting] == ["2", "1"]
    run_step(scheduler, device)
    assert [request.request_id for request in scheduler.running] == ["1"]
    while scheduler.requests:
        run_step(scheduler, device)


def make_request_keys(scheduler: Scheduler) -> list[bytes]:
    request = make_request(0, prompt=2, images=[(2, 18, 2)], alike=0)
    scheduler._extend_keys(request)
    return request.page_keys


def test_the_same_text_under_other_pictures_is_not_shared() -> None:
    scheduler, device = make_scheduler(pages=100), FakeDevice(4)
    for number, picture in enumerate("abba"):
        scheduler.add(make_request(number, prompt=4, images=[(5, 8, 1)], alike=0, picture=picture, max_tokens=1))
        request = scheduler.requests[str(number)]
        while scheduler.requests:
            run_step(scheduler, device)
        assert request.num_cached == [0, 4, 16, 16][number]
    assert device.tiles_encoded == 4


def test_a_spoiled_request_leaves_nothing_to_find() -> None:
    scheduler, device = make_scheduler(pages=100), FakeDevice(4)
    scheduler.add(make_request(0, prompt=10, alike=0))
    run_step(scheduler, device)
    scheduler.finish("0", spoiled=True)
    assert scheduler.pool.num_cached == 0
    scheduler.add(make_request(1, prompt=10, alike=0))
    run_step(scheduler, device)
    assert scheduler.requests["1"].num_cached == 0


def test_pages_given_up_longest_ago_are_evicted_from_the_end_of_their_sequence() -> None:
    scheduler, device = make_scheduler(pages=8), FakeDevice(4)
    for number in (0, 1, 0, 2):  # 3 pages each; the third run of 0 finds 2 of its pages, the fourth evicts 1's last
        scheduler.add(make_request(number, prompt=12, max_tokens=1))
        run_step(scheduler, device)
    assert scheduler.pool.num_cached == 8
    hits = []
    for number in (0, 1, 2):
        probe = make_request(number, prompt=12)
        scheduler._extend_keys(probe)
        hits.append(len(scheduler.pool.find(probe.page_keys)))
    assert hits == [3, 2, 3]


def test_lower_priority_numbers_go_first_and_higher_ones_are_preempted_first() -> None:
    scheduler, device = make_scheduler(pages=6, max_num_seqs=2, caching=False), FakeDevice(4)
    for number, priority in ((0, 5), (1, 5), (2, -1), (3, 0)):
        scheduler.add(make_request(number, prompt=5, max_tokens=16, priority=priority))
    requests = dict(scheduler.requests)
    run_step(scheduler, device)
    assert [request.request_id for request in scheduler.running] == ["2", "3"]
    assert [request.request_id for request in scheduler.waiting] == ["0", "1"]
    while not scheduler.num_preemptions:
        run_step(scheduler, device)
    assert requests["2"].status is Status.RUNNING and requests["3"].status is Status.WAITING
    scheduler.add(make_request(4, prompt=1, max_tokens=1, priority=-2))
    assert [request.request_id for request in scheduler.waiting] == ["4", "3", "0", "1"]
    while scheduler.requests:
        run_step(scheduler, device)
    assert all(r.token_ids[r.num_prompt :] == expected_answer(r) for r in requests.values())


def test_pictures_in_use_keep_their_room_and_later_requests_wait_for_it() -> None:
    """Room for two pictures: a third request waits though pages are free, until one of the first two ends."""
    scheduler, device = make_scheduler(pages=100, picture_slots=20), FakeDevice(4)
    for number, max_tokens in ((0, 2), (1, 6), (2, 2)):
        scheduler.add(make_request(number, prompt=2, max_tokens=max_tokens, images=[(0, 10, 1)]))
    run_step(scheduler, device)
    assert [request.request_id for request in scheduler.running] == ["0", "1"]
    run_step(scheduler, device)
    assert [request.request_id for request in scheduler.waiting] == ["2"]
    while scheduler.requests:
        run_step(scheduler, device)
        assert device.slots <= 20
    assert device.tiles_encoded == 6


def test_a_full_queue_refuses_with_the_numbers() -> None:
    scheduler, device = make_scheduler(max_num_seqs=1, max_queued_requests=2), FakeDevice(4)
    for number in range(3):
        scheduler.add(make_request(number, prompt=3, max_tokens=1))
    with pytest.raises(QueueFull, match="0 requests are running and 3 waiting, at most 1 and 2"):
        scheduler.add(make_request(3, prompt=3))
    run_step(scheduler, device)
    scheduler.add(make_request(3, prompt=3))


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
