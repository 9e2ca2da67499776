"""Who runs in the next step, and on which pages.

A step holds every decode (one token of each running request that is past its prompt), then prefill chunks in
order of arrival up to `prefill_chunk_tokens`, together with the image tiles those chunks need, up to
`vision_tile_budget`. The rules:

- First come, first served. A waiting request is admitted when the pages for all its known tokens are free;
  nobody overtakes the head of the queue.
- Only decodes need further pages, one every `page_size` steps. When none is free, the latest arrival is
  preempted: its pages return, it waits at the head of the queue, and its prompt and generated tokens are
  later computed anew as one prefill. So the earliest running request advances in every step, and as none is
  admitted that could not finish alone in the pool, every request ends.
- A chunk may cut through an image. The tiles of an image are encoded, over several steps if the budget asks
  for it, before the first chunk that touches it runs; the chunk is cut short until then. The features live in
  the runner from there until the image's last slot is computed. The tiles stay on the host with the request
  until it ends, so that a preempted request can be encoded again.

Pure Python; the tensors are the runner's. `schedule` moves requests between queues and takes pages; progress
(`num_computed`, new tokens) is entered by `commit` alone, so a step that failed leaves nothing half done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from server.engine.kv_cache import PagePool, PagePoolError
from server.engine.request import Request, RequestImage, RequestRejected, Status


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of one request, to be computed in this step."""

    request: Request
    start: int
    end: int
    samples: bool  # whether the last of them is the last known: its logits choose the next token


@dataclass(frozen=True, slots=True)
class EncodeTiles:
    """Tiles [first, last) of one image of one request, to be encoded in this step."""

    request: Request
    image: RequestImage
    first: int
    last: int


@dataclass(slots=True)
class StepPlan:
    """One step. The rows of the batch follow `decodes`, then `prefills`."""

    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    encodes: list[EncodeTiles] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the order of their logits rows."""
        return [chunk.request for chunk in self.chunks if chunk.samples]

    @property
    def requests(self) -> list[Request]:
        """Everyone the step works for, once each."""
        return list(dict.fromkeys([c.request for c in self.chunks] + [e.request for e in self.encodes]))


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        prefill_chunk_tokens: int,
        vision_tile_budget: int,
        eos_token_id: int,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.vision_tile_budget = vision_tile_budget
        self.eos_token_id = eos_token_id
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival, all of them before anyone waiting
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request; RequestRejected if it could never finish here."""
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
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish(self, request_id: str) -> Request | None:
        """Take a request out in whatever state it is, its pages at once; None if it is not (or no longer) here."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._release(request, Status.FINISHED)
        return request

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when nobody is here."""
        if not self.requests:
            return None
        plan = StepPlan()
        self._plan_decodes(plan)
        tokens, tiles = self.prefill_chunk_tokens, self.vision_tile_budget
        for request in self.running:
            if tokens > 0 and request.num_tokens - request.num_computed > 1:
                tokens, tiles = self._plan_prefill(plan, request, tokens, tiles)
        while tokens > 0 and self._admit():
            tokens, tiles = self._plan_prefill(plan, self.running[-1], tokens, tiles)
        return plan

    def commit(self, plan: StepPlan, tokens: list[int | None]) -> None:
        """Enter what a step computed: `tokens` has one id for each of `plan.sampled`. Requests that end with it leave.

        A request whose token is None could not be sampled; the caller has to `finish` it.
        """
        for encode in plan.encodes:
            encode.image.encoded_tiles = encode.last
        for chunk in plan.chunks:
            chunk.request.num_computed = chunk.end
        for request, token in zip(plan.sampled, tokens, strict=True):
            if token is None:
                continue
            request.token_ids.append(token)
            if request.finish_reason(self.eos_token_id) is not None:
                self.finish(request.request_id)

    def check_integrity(self) -> None:
        """Raise PagePoolError unless queues, page tables and pool agree."""
        queued = [*self.running, *self.waiting]
        if len(queued) != len(self.requests) or set(queued) != set(self.requests.values()):
            raise PagePoolError(f"{len(queued)} requests in the queues, {len(self.requests)} known")
        if any(request.pages for request in self.waiting):
            raise PagePoolError("a waiting request holds pages")
        self.pool.check_integrity(page for request in self.running for page in request.pages)

    def _plan_decodes(self, plan: StepPlan) -> None:
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier one, a moment ago
            if request.num_tokens - request.num_computed == 1 and self._grow(request, plan):
                plan.decodes.append(Chunk(request, request.num_computed, request.num_tokens, samples=True))

    def _grow(self, request: Request, plan: StepPlan) -> bool:
        """Give a request the page its newest token needs; False if the request itself had to be preempted for it."""
        missing = self.pool.pages_for(request.num_tokens) - len(request.pages)
        while missing > self.pool.num_free:
            # The last in arrival order: at worst the request itself, and no one who is in the plan already.
            victim = self.running.pop()
            self._release(victim, Status.WAITING)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            plan.preempted.append(victim)
            if victim is request:
                return False
        request.pages += self.pool.allocate(missing)
        return True

    def _admit(self) -> bool:
        """Move the head of the queue to the running requests, with pages for all its known tokens, if there is room."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        pages = self.pool.pages_for(self.waiting[0].num_tokens)
        # A page kept for each running request: who takes the last ones is preempted again within a few steps.
        if pages + len(self.running) > self.pool.num_free:
            return False
        request = self.waiting.popleft()
        request.pages = self.pool.allocate(pages)
        request.status = Status.RUNNING
        self.running.append(request)
        return True

    def _plan_prefill(self, plan: StepPlan, request: Request, tokens: int, tiles: int) -> tuple[int, int]:
        """Plan the request's next chunk and the tiles it needs; returns what is left of both budgets."""
        start = request.num_computed
        end = min(request.num_tokens, start + tokens)
        for image in request.images:
            if image.end <= start or image.start >= end or image.encoded_tiles == image.num_tiles:
                continue
            last = min(image.num_tiles, image.encoded_tiles + tiles)
            if last > image.encoded_tiles:
                plan.encodes.append(EncodeTiles(request, image, image.encoded_tiles, last))
                tiles -= last - image.encoded_tiles
            if last < image.num_tiles:
                end = image.start
                break
        if end > start:
            plan.prefills.append(Chunk(request, start, end, samples=end == request.num_tokens))
        return tokens - (end - start), tiles

    def _release(self, request: Request, status: Status) -> None:
        """Return the pages; what was computed in them is to be computed again, images included."""
        self.pool.free(request.pages)
        request.pages = []
        request.num_computed = 0
        for image in request.images:
            image.encoded_tiles = 0
        request.status = status
