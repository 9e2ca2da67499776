"""The engine: one loop that receives, schedules, runs and publishes.

`Engine` is the whole of it within a process: tests and offline use call it directly. `serve` wraps it in the
loop of the engine process, which talks to `client` in typed messages over ZeroMQ. It handles arrays and
numbers only: bytes that a user sent are decoded elsewhere. Logs name requests, never what they say.
"""

from __future__ import annotations

import gc
import logging
import secrets
from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import zmq

from kernels.attention_backend import BackendError
from model.batch import PAGE_SIZE
from model.checkpoint import CheckpointError
from model.config import ConfigError
from model.image import image_layout
from model.tokenizer import Tokenizer, TokenizerError
from server.engine.kv_cache import PagePool, PagePoolError
from server.engine.prefix import ContentKeys
from server.engine.request import (
    TILE_BYTES,
    Abort,
    EngineConfig,
    EngineConfigError,
    EngineRequest,
    EngineStats,
    Events,
    FromEngine,
    LoadFailed,
    Ping,
    Pong,
    QueueFull,
    Ready,
    Rejected,
    Request,
    RequestImage,
    RequestRejected,
    Shutdown,
    Status,
    Submit,
    ToEngine,
    TokenEvent,
)
from server.engine.runner import Runner
from server.engine.sampler import Sampled, SampledToken
from server.engine.scheduler import Scheduler, StepPlan
from server.engine.structured import GrammarCompiler, Guide
from server.engine.vision_cache import VisionCache, VisionCacheError

logger = logging.getLogger(__name__)

FATAL_EXIT_CODE = 70
COMPILE_WAIT_S = 0.01  # how long an engine with nothing else to do waits for a grammar before it looks around


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that the device has been given, and whose tokens the host has not seen."""

    plan: StepPlan
    sampled: Sampled


class Engine:
    """add_request, step until has_work is false, abort at any time between two steps.

    Where the runner works aside (`runs_ahead`), one step is always in flight: each call of `step` plans and launches
    the next one before it waits for the tokens of the one before, so that the device never waits for the host.
    """

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        """Loads the model, unless a runner that has it is given. Raises what loading raises."""
        self.runner = runner if runner is not None else Runner(config)
        self.info = self.runner.info
        self.pool = PagePool(self.runner.num_pages, PAGE_SIZE)
        self.pictures = VisionCache(self.runner.vision_cache_slots(self.info.max_model_len))
        self.keys = ContentKeys(PAGE_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            self.pictures,
            self.keys if config.prefix_caching else None,
            max_num_seqs=config.max_num_seqs,
            max_queued_requests=config.max_queued_requests,
            max_model_len=self.info.max_model_len,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            vision_tile_budget=config.vision_tile_budget,
            eos_token_id=self.info.eos_token_id,
        )
        self.compiler = _make_compiler(self.runner.folder, self.info.vocab_size, self.info.eos_token_id)
        self._in_flight: deque[InFlight] = deque()  # at most one between two calls of step
        self._steps = self._step_sequences = self._prompt_tokens = self._generated_tokens = self._tiles = 0
        self._aborted_requests = self._failed_requests = self._integrity_errors = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests or self._in_flight)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestRejected, with the reason, for one that cannot be served (QueueFull: now)."""
        request.sampling.check(self.info.vocab_size)
        for token in request.token_ids:
            if not 0 <= token < self.info.vocab_size:
                raise RequestRejected(f"token id {token} is outside the vocabulary of {self.info.vocab_size}")
        seed = request.sampling.seed
        root = self.keys.root(request.cache_salt)
        record = Request(
            request.request_id,
            list(request.token_ids),
            request.sampling,
            seed=secrets.randbits(64) if seed is None else seed,
            images=self._place_images(request, root),
            priority=request.priority,
            root_key=root,
        )
        grammar = request.sampling.grammar
        if grammar is None:
            self.scheduler.add(record)
        elif self.compiler is None:
            raise RequestRejected(f"structured output needs tokenizer.json, which {self.runner.folder} does not have")
        else:
            self.scheduler.add(record)
            record.guide = Guide(self.compiler.compile(grammar))

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request in whatever state it is; its pages are free when this returns. None if it had ended already."""
        if self.scheduler.finish(request_id) is None:
            return None
        self.runner.forget(request_id)
        self._aborted_requests += 1
        return TokenEvent(request_id=request_id, finish_reason="abort")

    def step(self) -> list[TokenEvent]:
        """Launch a step, and tell what the one before it brought (or this one, where the runner does not run ahead).

        A step brings each running request one token at most. One that raises is run again request by request, so that
        only those it fails for end with finish_reason "error". Raises torch.AcceleratorError when the device itself
        is lost.
        """
        events = self._settle_grammars()
        if self._in_flight and self.scheduler.needs_outcome(self._in_flight[0].plan):
            events += self._land()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._steps += 1
            self._step_sequences += len(plan.requests)
            try:
                self._launch(plan)
            except Exception as error:
                _raise_if_device_is_lost(error)
                logger.exception("a step of %d requests failed, running them one by one", len(plan.requests))
                while self._in_flight:
                    events += self._land()  # what was launched before is not to blame
                return events + self._run_one_by_one(plan)
        stays = 1 if plan is not None and self.runner.runs_ahead else 0
        while len(self._in_flight) > stays:
            events += self._land()
        return events

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_total=self.pool.num_pages,
            pages_free=self.pool.num_free,
            pages_cached=self.pool.num_cached,
            steps=self._steps,
            step_sequences=self._step_sequences,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            tiles_encoded=self._tiles,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            vision_cache_hits=self.pictures.num_hits,
            preemptions=self.scheduler.num_preemptions,
            aborted_requests=self._aborted_requests,
            failed_requests=self._failed_requests,
            integrity_errors=self._integrity_errors,
        )

    def check_integrity(self) -> bool:
        """Whether queues, pages and pictures agree; if not, it is logged and counted."""
        try:
            self.scheduler.check_integrity()
        except (PagePoolError, VisionCacheError):
            self._integrity_errors += 1
            logger.exception("integrity check failed")
            return False
        return True

    def _place_images(self, request: EngineRequest, root: bytes) -> list[RequestImage]:
        """The engine's records of a request's images; RequestRejected if tiles or slots do not fit the prompt."""
        records: list[RequestImage] = []
        num_tokens = len(request.token_ids)
        for number, image in enumerate(request.images):
            if image.columns < 1 or image.rows < 1:
                raise RequestRejected(f"image {number} has {image.columns} columns and {image.rows} rows of tiles")
            free_from = records[-1].end if records else 0
            record = RequestImage(
                start=image.start,
                length=len(image_layout(image.columns, image.rows)),
                columns=image.columns,
                rows=image.rows,
                key=self.keys.picture(root, image.digest, image.columns, image.rows),
                tiles=image.tiles,
            )
            if not free_from <= record.start or record.end > num_tokens:
                raise RequestRejected(
                    f"image {number} takes positions {record.start} to {record.end - 1}, "
                    f"only {free_from} to {num_tokens - 1} are free for it"
                )
            num_tiles = 1 + image.columns * image.rows
            if len(image.tiles) != num_tiles * TILE_BYTES:
                raise RequestRejected(f"image {number} has {len(image.tiles)} bytes for {num_tiles} tiles")
            records.append(record)
        return records

    def _settle_grammars(self) -> list[TokenEvent]:
        """Fail the waiting requests whose grammar turned out unusable; wait for one if all wait for theirs."""
        waiting = self.scheduler.waiting
        pending = [request.guide.matcher for request in waiting if request.guide is not None and not request.ready]
        if pending and len(pending) == len(self.scheduler.requests):
            wait(pending, timeout=COMPILE_WAIT_S, return_when=FIRST_COMPLETED)
        guided = [(request, request.guide) for request in waiting if request.guide is not None and request.ready]
        return [
            self._fail(request, guide.error, unservable=True) for request, guide in guided if guide.error is not None
        ]

    def _launch(self, plan: StepPlan) -> None:
        """Give the device a step and enter it in the books; if the device does not take it, nothing is entered."""
        sampled = self.runner.execute(plan).sampled
        self.scheduler.launch(plan)
        self._in_flight.append(InFlight(plan, sampled))
        self._tiles += sum(encode.last - encode.first for encode in plan.encodes)
        self._prompt_tokens += sum(chunk.end - chunk.start for chunk in plan.prefills)

    def _land(self) -> list[TokenEvent]:
        """Wait for the earliest step in flight and enter its outcome in the books."""
        step = self._in_flight[0]
        try:
            sampled = step.sampled.collect()
        except Exception as error:
            _raise_if_device_is_lost(error)
            logger.exception("a step of %d requests failed, running them one by one", len(step.plan.requests))
            while self._in_flight:  # one after it had nothing to build on: it is planned anew
                self.scheduler.undo(self._in_flight.pop().plan)
            return self._run_one_by_one(step.plan)
        self._in_flight.popleft()
        return self._commit(step.plan, sampled)

    def _commit(self, plan: StepPlan, sampled: list[SampledToken | None]) -> list[TokenEvent]:
        """Enter the tokens of a step and turn them into events."""
        events = []
        for chunk, token in zip(plan.sampled_chunks, sampled, strict=True):
            request = chunk.request
            if request.status is Status.FINISHED:
                continue  # aborted meanwhile, or ended by the token before this one
            if token is None or not _follows_grammar(request, token):
                lost = request.guide.error if request.guide is not None else None
                message = lost or "the model's logits are not finite numbers"
                events.append(self._fail(request, message, unservable=lost is not None))
                continue
            reason = self.scheduler.commit(chunk, token.token_id)
            if reason is not None:
                self.runner.forget(request.request_id)
            self._generated_tokens += 1
            first = chunk.end == request.num_prompt
            events.append(
                TokenEvent(
                    request_id=request.request_id,
                    token_ids=[token.token_id],
                    logprobs=None if token.logprobs is None else [token.logprobs],
                    finish_reason=reason,
                    queue_s=request.queue_s if first else None,
                    cached_tokens=request.num_cached if first else None,
                )
            )
        return events

    def _run_one_by_one(self, plan: StepPlan) -> list[TokenEvent]:
        """Run a step that failed as a whole for each of its requests alone; nothing else is in flight."""
        events: list[TokenEvent] = []
        for request in plan.requests:
            if request.status is Status.FINISHED:
                continue  # with the step before
            try:
                self._launch(plan.alone(request))
                step = self._in_flight.pop()
                sampled = step.sampled.collect()
            except Exception as error:
                _raise_if_device_is_lost(error)
                logger.exception("request %s failed", request.request_id)
                events.append(self._fail(request, f"{type(error).__name__}: {error}"))
                continue
            events += self._commit(step.plan, sampled)
        return events

    def _fail(self, request: Request, message: str, *, unservable: bool = False) -> TokenEvent:
        self.scheduler.finish(request.request_id, spoiled=True)
        self.runner.forget(request.request_id)
        self._failed_requests += 1
        return TokenEvent(request_id=request.request_id, finish_reason="error", error=message, unservable=unservable)


def _make_compiler(folder: Path, vocab_size: int, eos_token_id: int) -> GrammarCompiler | None:
    """None for a checkpoint without its tokenizer, which dummy weights do without."""
    if not (folder / "tokenizer.json").is_file():
        return None
    return GrammarCompiler(lambda: Tokenizer.from_folder(folder), vocab_size, eos_token_id)


def _follows_grammar(request: Request, token: SampledToken) -> bool:
    """Step over the token with the request's guide, if it has one; False if it does not fit."""
    return request.guide is None or request.guide.advance(token.token_id)


def _raise_if_device_is_lost(error: Exception) -> None:
    """A CUDA error (other than memory) leaves the process's context unusable: no later step could work."""
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        raise error


def serve(config: EngineConfig, address: str) -> int:
    """The engine process: connect to the client at `address`, load, serve until told to stop. Returns an exit code."""
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.connect(address)
    link = Link(socket)
    try:
        try:
            engine = Engine(config)
        except (CheckpointError, ConfigError, TokenizerError, BackendError, EngineConfigError) as error:
            link.send(LoadFailed(str(error)))  # the client says it: whoever chose the model or a size can mend it
            return 1
        except Exception as error:
            logger.exception("the engine could not start")
            link.send(LoadFailed(f"{type(error).__name__}: {error}"))
            return 1
        logger.info(
            "ready on %s: %.2f B parameters in %s, context %d, KV cache %d tokens",
            engine.info.device,
            engine.info.num_parameters / 1e9,
            engine.info.dtype,
            engine.info.max_model_len,
            engine.info.kv_cache_tokens,
        )
        gc.freeze()  # what is loaded stays: a full collection that walks through it all would hold a step up
        link.send(Ready(engine.info))
        try:
            _loop(engine, link)
        except Exception:
            logger.critical("the engine cannot go on", exc_info=True)
            return FATAL_EXIT_CODE
        finally:
            gc.unfreeze()  # or extension modules complain at the end of what nobody collected
        return 0
    finally:
        # A client that is gone must not keep the process: what is unsent after a second is dropped.
        context.destroy(linger=1000)


class Link:
    """The engine's end of the socket: typed messages in and out."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, *, wait: bool) -> ToEngine | None:
        """The next message. Without `wait`, None if there is none."""
        if not wait and not self._socket.poll(0):
            return None
        message: ToEngine = self._decoder.decode(self._socket.recv())
        return message


def _loop(engine: Engine, link: Link) -> None:
    checked = True
    while True:
        if not engine.has_work and not checked:
            checked = True
            engine.check_integrity()
        message = link.receive(wait=not engine.has_work)
        while message is not None:
            if isinstance(message, Shutdown):
                return
            _handle(engine, link, message)
            message = link.receive(wait=False)
        if engine.has_work:
            checked = False
            events = engine.step()
            if events:
                link.send(Events(events))


def _handle(engine: Engine, link: Link, message: Submit | Abort | Ping) -> None:
    match message:
        case Submit(request):
            try:
                engine.add_request(request)
            except RequestRejected as error:
                link.send(Rejected(request.request_id, str(error), queue_full=isinstance(error, QueueFull)))
        case Abort(request_id):
            event = engine.abort(request_id)
            if event is not None:
                link.send(Events([event]))
        case Ping(number):
            link.send(Pong(number, engine.stats()))
