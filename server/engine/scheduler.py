"""Who runs in the next step, and on which pages.

A step holds every decode (one token of each running request that is past its prompt), then prefill chunks in
order of rank up to `prefill_chunk_tokens`, together with the image tiles those chunks need, up to
`vision_tile_budget`. So between two tokens of a running request lies one step, of at most `max_num_seqs`
decodes and the two budgets, whatever arrives; only a preemption makes a longer gap. The rules:

- First come, first served, among requests of the same priority; a lower priority number goes first. A waiting
  request is admitted when the pages for all its known tokens are free, beside those it finds computed already,
  and when there is room for its pictures' features.
- Nobody overtakes the head of the queue, but for two cases: a request whose next pages are just being computed
  by another waits until they can be shared, and lets others pass. So of the n choices of one prompt, or of a
  burst of questions on one new picture, only the first computes what they have in common. And so does one whose
  grammar is still being compiled.
- Only decodes need further pages, one every `page_size` steps. When none is free, the last in rank is
  preempted: its pages return, it waits, and its prompt and generated tokens are later computed anew as one
  prefill, as far as its old pages have been taken by others meanwhile. So the first running request advances in
  every step, and as none is admitted that could not finish alone in the pool, every request ends.
- At least the last token is always computed: its logits choose the next one.
- A chunk may cut through an image. The tiles of a picture are encoded, over several steps if the budget asks
  for it, before the first chunk that touches it runs; the chunk is cut short until then.

A step is planned with `schedule`, entered with `launch` once the device has its work, and its tokens with `commit`
once they are known. Between the two the next step may be planned and launched already: after `launch` the books say
what will be true when the device is done, with PENDING for the tokens it chooses.

- A pending token can be decoded (the device knows it) but not named. A request known to be complete is not planned
  again; one whose pending token turns out to end it has a row too many in the next step, whose outcome is dropped.
- Pages of a request that ends, or is aborted, are free at once, though a step in flight may still write to them: the
  device works in order, so whoever gets them writes later. For the same reason pages are named at `launch`.
- Where the outcome decides about the plan (`needs_outcome`: a grammar, or pages so short that somebody would have to
  be preempted), the step is committed before the next one is planned. So nobody waits with a pending token.

Pure Python; the tensors are the runner's. `schedule` moves requests between queues and takes pages; progress is
entered by `launch` and `commit` alone, so a step that could not be launched leaves nothing half done.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from server.engine.kv_cache import PagePool, PagePoolError
from server.engine.prefix import ContentKeys
from server.engine.request import PENDING, FinishReason, Picture, QueueFull, Request, RequestRejected, Status
from server.engine.vision_cache import VisionCache

_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of one request, to be computed in this step."""

    request: Request
    start: int
    end: int
    samples: bool  # whether the last of them is the last known: its logits choose the next token


@dataclass(frozen=True, slots=True)
class EncodeTiles:
    """Tiles [first, last) of one picture, to be encoded in this step for one request and all others that show it."""

    request: Request
    picture: Picture
    first: int
    last: int


@dataclass(slots=True)
class StepPlan:
    """One step. The rows of the batch follow `decodes`, then `prefills`."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    encodes: list[EncodeTiles] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    dropped_pictures: list[bytes] = field(default_factory=list)  # keys; before anything is encoded

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills

    @property
    def sampled_chunks(self) -> list[Chunk]:
        """The chunks whose last row chooses a token, in the order of their logits rows."""
        return self.decodes + [chunk for chunk in self.prefills if chunk.samples]

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the same order."""
        return [chunk.request for chunk in self.sampled_chunks]

    @property
    def requests(self) -> list[Request]:
        """Everyone the step works for, once each."""
        return list(dict.fromkeys([c.request for c in self.chunks] + [e.request for e in self.encodes]))

    def alone(self, request: Request) -> StepPlan:
        """The part of the step that one of its requests needs."""
        keys = {image.key for image in request.images}
        return StepPlan(
            decodes=[chunk for chunk in self.decodes if chunk.request is request],
            prefills=[chunk for chunk in self.prefills if chunk.request is request],
            encodes=[e for e in self.encodes if e.picture.key in keys and e.last > e.picture.encoded_tiles],
        )

    def encoded_tiles(self, picture: Picture) -> int:
        """How many tiles of a picture are encoded once the step is done."""
        planned = [encode.last for encode in self.encodes if encode.picture is picture]
        return planned[-1] if planned else picture.encoded_tiles


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        pictures: VisionCache,
        keys: ContentKeys | None,
        *,
        max_num_seqs: int,
        max_queued_requests: int,
        max_model_len: int,
        prefill_chunk_tokens: int,
        vision_tile_budget: int,
        eos_token_id: int,
    ) -> None:
        """`pictures` has room for any one request that fits into the context. Without `keys`, no page is shared."""
        self.pool = pool
        self.pictures = pictures
        self.keys = keys
        self.max_num_seqs = max_num_seqs
        self.max_queued_requests = max_queued_requests
        self.max_model_len = max_model_len
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.vision_tile_budget = vision_tile_budget
        self.eos_token_id = eos_token_id
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # both in order of rank
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self._num_arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a request; RequestRejected if it could never finish here, QueueFull if it may come again later."""
        if request.request_id in self.requests:
            raise RequestRejected(f"request id {request.request_id} is already in use")
        prompt, answer = request.num_prompt, request.sampling.max_tokens
        if prompt < 1:
            raise RequestRejected("the prompt has no tokens")
        if prompt + answer > self.max_model_len:
            raise RequestRejected(
                f"{prompt} prompt tokens and max_tokens {answer} make {prompt + answer}, "
                f"more than the context of {self.max_model_len}"
            )
        pages = self.pool.pages_for(request.max_cached_tokens)
        if pages > self.pool.num_pages:
            raise RequestRejected(
                f"{prompt} prompt tokens and max_tokens {answer} need {pages} pages of {self.pool.page_size} tokens, "
                f"the KV cache has {self.pool.num_pages}"
            )
        if len(self.requests) >= self.max_num_seqs + self.max_queued_requests:
            raise QueueFull(
                f"{len(self.running)} requests are running and {len(self.waiting)} waiting, "
                f"at most {self.max_num_seqs} and {self.max_queued_requests}"
            )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._extend_keys(request)
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_RANK)

    def finish(self, request_id: str, *, spoiled: bool = False) -> Request | None:
        """Take a request out in whatever state it is, its pages at once; None if it is not (or no longer) here.

        `spoiled`: what was computed for it is not to be shared.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        if spoiled:
            self.pool.forget(request.pages)
        self._release(request, Status.FINISHED)
        self.pictures.release(request.images)
        del request.token_ids[request.num_known :]
        request.num_pending = 0
        return request

    def needs_outcome(self, plan: StepPlan) -> bool:
        """Whether the step after this one, which is in flight, cannot be planned before its tokens are known."""
        if any(request.guide is not None for request in plan.sampled):
            return True
        if self.pool.num_free >= len(self.running):
            return False
        return self.pool.num_free < sum(self._missing_pages(r) for r in self.running if r.decodes and not r.is_complete)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to do."""
        plan = StepPlan()
        self._plan_decodes(plan)
        tokens, tiles = self.prefill_chunk_tokens, self.vision_tile_budget
        if len(plan.decodes) < len(self.running):
            for request in self.running:
                if tokens > 0 and not request.decodes:
                    tokens, tiles = self._plan_prefill(plan, request, tokens, tiles)
        if self.waiting:
            coming = {key for request in self.running for key in self._coming_keys(request)}
            while tokens > 0 and (admitted := self._admit(coming)) is not None:
                coming.update(self._coming_keys(admitted))
                tokens, tiles = self._plan_prefill(plan, admitted, tokens, tiles)
        if not (plan.decodes or plan.prefills or plan.encodes or plan.preempted):
            return None
        plan.dropped_pictures = self.pictures.take_dropped()
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Enter what is certain of a step once the device has its work: all but the ids of the tokens it chooses."""
        for encode in plan.encodes:
            encode.picture.encoded_tiles = encode.last
            if encode.picture.is_whole:
                encode.picture.tiles = b""
        for chunk in plan.decodes:
            chunk.request.num_computed = chunk.end
        for chunk in plan.prefills:
            chunk.request.num_computed = chunk.end
            self._name_pages(chunk.request)
        for row, request in enumerate(plan.sampled):
            request.token_ids.append(PENDING)
            request.num_pending += 1
            request.row = row

    def undo(self, plan: StepPlan) -> None:
        """Take `launch` back, but for the names of pages and for tiles: what they stand for is written all the same.

        Steps launched after it come first. None of its requests has been preempted since (see `needs_outcome`).
        """
        for chunk in plan.chunks:
            request = chunk.request
            if request.status is Status.FINISHED:
                continue
            request.num_computed = chunk.start
            if chunk.samples:
                request.token_ids.pop()
                request.num_pending -= 1

    def commit(self, chunk: Chunk, token: int) -> FinishReason | None:
        """Enter the token that a launched chunk of a request that is still here chose; the request leaves if it ends.

        Steps are committed in the order of their launch. A request without a token is for the caller to `finish`.
        """
        request = chunk.request
        request.token_ids[chunk.end] = token
        request.num_pending -= 1
        self._name_pages(request)
        reason = request.finish_reason(self.eos_token_id)
        if reason is not None:
            self.finish(request.request_id)
        return reason

    def check_integrity(self) -> None:
        """Raise PagePoolError or VisionCacheError unless queues, page tables, pool and vision cache agree."""
        queued = [*self.running, *self.waiting]
        if len(queued) != len(self.requests) or set(queued) != set(self.requests.values()):
            raise PagePoolError(f"{len(queued)} requests in the queues, {len(self.requests)} known")
        if sorted(self.running, key=_RANK) != self.running or sorted(self.waiting, key=_RANK) != self.waiting:
            raise PagePoolError("a queue is out of order")
        if any(request.pages or request.num_pending for request in self.waiting):
            raise PagePoolError("a waiting request holds pages, or a token of it is pending")
        self.pool.check_integrity(page for request in self.running for page in request.pages)
        self.pictures.check_integrity(image for request in queued for image in request.images)

    def _plan_decodes(self, plan: StepPlan) -> None:
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue  # preempted for one before it, a moment ago
            if request.decodes and not request.is_complete and self._grow(request, plan):
                plan.decodes.append(Chunk(request, request.num_computed, request.num_tokens, samples=True))

    def _grow(self, request: Request, plan: StepPlan) -> bool:
        """Give a request the page its newest token needs; False if the request itself had to be preempted for it."""
        missing = self._missing_pages(request)
        if missing == 0:
            return True
        while missing > self.pool.num_free:
            # The last in rank: at worst the request itself, and no one who is in the plan already.
            victim = self.running.pop()
            self._release(victim, Status.WAITING)
            insort(self.waiting, victim, key=_RANK)
            self.num_preemptions += 1
            plan.preempted.append(victim)
            if victim is request:
                return False
        request.pages += self.pool.allocate(missing)
        return True

    def _missing_pages(self, request: Request) -> int:
        return max(0, self.pool.pages_for(len(request.token_ids)) - len(request.pages))

    def _admit(self, coming: set[bytes]) -> Request | None:
        """Move the first waiting request to the running ones, with pages for all its known tokens, if there is room.

        `coming` names the pages that running requests are about to compute.
        """
        if len(self.running) >= self.max_num_seqs:
            return None
        for request in self.waiting:
            if not request.ready or not coming.isdisjoint(request.page_keys):
                continue
            shared = self.pool.find(request.page_keys[: (request.num_tokens - 1) // self.pool.page_size])
            missing = self.pool.pages_for(request.num_tokens) - len(shared)
            # A page kept for each running request: who takes the last ones is preempted again within a few steps.
            if missing + len(self.running) > self.pool.num_free_without(shared):
                return None
            if self._hold_pictures(request):
                self._start(request, shared, missing)
                return request
            if self.running:
                return None
            # Nobody is left to give pictures up but preempted requests, further down in the queue: they go on first.
        return None

    def _start(self, request: Request, shared: list[int], missing: int) -> None:
        self.pool.share(shared)
        request.pages = shared + self.pool.allocate(missing)
        request.num_computed = len(shared) * self.pool.page_size
        request.num_named = len(shared)
        self.prefix_hit_tokens += request.num_computed
        if request.num_cached is None:
            request.num_cached = request.num_computed
            request.admitted_s = time.monotonic()
        request.status = Status.RUNNING
        self.waiting.remove(request)
        insort(self.running, request, key=_RANK)

    def _hold_pictures(self, request: Request) -> bool:
        """Whether there is room for the request's pictures; a preempted one still has them."""
        return request.num_cached is not None or self.pictures.hold(request.images)

    def _extend_keys(self, request: Request) -> None:
        if self.keys is not None:
            self.keys.extend(request)

    def _coming_keys(self, request: Request) -> list[bytes]:
        """Names of the pages that a request has yet to compute, but for one that its answer is still filling."""
        return request.page_keys[request.num_named :]

    def _name_pages(self, request: Request) -> None:
        """Make the pages known that are filled, now or once the device is done.

        To be called when a prefill is launched or a token committed: then no token of these pages is pending.
        """
        filled = request.num_computed // self.pool.page_size
        if self.keys is None or filled <= request.num_named:
            return
        self.keys.extend(request)
        for index in range(request.num_named, filled):
            self.pool.name(request.pages[index], request.page_keys[index])
        request.num_named = filled

    def _plan_prefill(self, plan: StepPlan, request: Request, tokens: int, tiles: int) -> tuple[int, int]:
        """Plan the request's next chunk and the tiles it needs; returns what is left of both budgets."""
        start = request.num_computed
        end = min(request.num_tokens, start + tokens)
        for image in request.images:
            picture = image.picture
            if picture is None or image.end <= start or image.start >= end:
                continue
            first = plan.encoded_tiles(picture)
            last = min(picture.num_tiles, first + tiles)
            if last > first:
                plan.encodes.append(EncodeTiles(request, picture, first, last))
                tiles -= last - first
            if last < picture.num_tiles:
                end = max(start, image.start)
                break
        if end > start:
            plan.prefills.append(Chunk(request, start, end, samples=end == request.num_tokens))
        return tokens - (end - start), tiles

    def _release(self, request: Request, status: Status) -> None:
        """Return the pages; what was computed in them is to be computed again, unless it is still found."""
        self.pool.free(request.pages)
        request.pages = []
        request.num_computed = 0
        request.num_named = 0
        request.status = status
