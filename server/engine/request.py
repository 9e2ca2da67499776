"""What the engine is asked, what it answers, and the states a request goes through.

The msgspec Structs are the only things that cross the process boundary; `Request` is the engine's own
record of one of them. Nothing here imports torch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from server.engine.structured import Guide

TILE_SHAPE = (3, 384, 384)
TILE_BYTES = math.prod(TILE_SHAPE)
MAX_LOGPROBS = 20
# Below this a temperature is 0: dividing logits by it would overflow float32 rather than sample.
GREEDY_TEMPERATURE = 1e-5
# Stands in `Request.token_ids` for a token that the device has been told to choose and the host does not know yet.
PENDING = -1

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineError(RuntimeError):
    """The engine could not start; the message is the engine process's own."""


class EngineDeadError(RuntimeError):
    """The engine process ended while requests were waiting for it, or before they came."""


class EngineStopped(EngineDeadError):
    """The engine was told to stop, and its requests end with it."""


class EngineConfigError(ValueError):
    """The engine cannot be built with this configuration on this machine; the message is for whoever wrote it."""


class RequestRejected(ValueError):
    """A request that can never run, with the numbers that say why. Nothing was computed for it."""


class QueueFull(RequestRejected):
    """A request that found the queue full: the same one may be served later."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to build an engine. Sizes are in tokens unless the name says otherwise."""

    model_path: str
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    load_format: Literal["auto", "dummy"] = "auto"
    attention_backend: Literal["auto", "flash-attn", "triton", "torch"] = "auto"  # of prefill
    max_model_len: int | None = None  # None: the checkpoint's own limit
    max_num_seqs: int = 64
    kv_cache_tokens: int | None = None  # None: from free memory on CUDA, a fixed default on CPU
    gpu_memory_utilization: float = 0.85
    prefill_chunk_tokens: int = 2048  # prompt tokens computed in one step, over all requests
    vision_tile_budget: int = 16  # image tiles encoded in one step, over all requests
    prefix_caching: bool = True  # share the pages of equal prefixes between requests
    deterministic: bool = False  # a token's numbers do not depend on the batch, on CUDA too
    vision_cache_bytes: int = 1 << 30  # features of pictures on the device: of unfinished requests, and kept for others
    max_queued_requests: int = 256  # beside max_num_seqs that run
    seed: int = 0  # for dummy weights; requests without a seed draw theirs from the system
    log_level: str = "INFO"
    log_format: Literal["text", "json"] = "text"
    ping_interval_s: float = 1.0
    heartbeat_timeout_s: float = 30.0  # silence after which a living process counts as hung
    stop_timeout_s: float = 10.0  # patience with a shutdown before the process is killed
    max_crashes: int = 3  # deaths in a row, without anything served between them, after which it stays dead
    stable_after_s: float = 60.0  # a process that has lived for so long breaks the row
    max_unread_events: int = 1024  # of one request, before it is aborted for its slow reader

    def __post_init__(self) -> None:
        at_least_one = (
            "max_num_seqs",
            "prefill_chunk_tokens",
            "vision_tile_budget",
            "max_crashes",
            "max_unread_events",
        )
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("vision_cache_bytes", "max_queued_requests"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("max_model_len", "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise ValueError(f"{name} must be at least 2 (one prompt token, one generated), got {value}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization}")


class Grammar(msgspec.Struct, frozen=True):
    """What an answer has to look like: JSON that satisfies a schema, or text that a regex or a Lark grammar matches."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. temperature 0 is greedy; top_k 0 and -1, top_p 1, min_p 0 mean off."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: the sampled token's and the n best
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def check(self, vocab_size: int) -> None:
        """Raise RequestRejected on a value the sampler can't take. The API checks too, but the engine must live."""
        numbers = (self.temperature, self.top_p, self.min_p, self.repetition_penalty)
        if not all(map(math.isfinite, (*numbers, self.presence_penalty, self.frequency_penalty))):
            raise RequestRejected("sampling parameters must be finite numbers")
        rules = [
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (
                0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens must lie in 0..max_tokens ({self.max_tokens}), got {self.min_tokens}",
            ),
            (self.temperature >= 0.0, f"temperature must not be negative, got {self.temperature}"),
            (self.top_k >= -1, f"top_k must be at least -1, got {self.top_k}"),
            (0.0 < self.top_p <= 1.0, f"top_p must lie in (0, 1], got {self.top_p}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must lie in [0, 1], got {self.min_p}"),
            (self.repetition_penalty > 0.0, f"repetition_penalty must be positive, got {self.repetition_penalty}"),
            (
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs must lie in 0..{MAX_LOGPROBS}, got {self.logprobs}",
            ),
            (all(map(math.isfinite, self.logit_bias.values())), "logit_bias values must be finite numbers"),
        ]
        for holds, message in rules:
            if not holds:
                raise RequestRejected(message)
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestRejected(f"{name} has token id {token}, outside 0..{vocab_size - 1}")


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt: the position of its first slot and its tiles, global view first."""

    start: int
    columns: int
    rows: int
    tiles: bytes  # uint8 [1 + columns * rows, 3, 384, 384]
    digest: bytes


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    token_ids: list[int]
    images: list[ImageInput] = []
    sampling: SamplingParams
    priority: int = 0  # lower runs earlier; among equals, first come, first served
    cache_salt: str = ""  # only requests with the same salt reuse what was computed for each other


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms under the model's own distribution (before penalties, bias and temperature), all finite."""

    logprob: float
    top: list[tuple[int, float]]


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What one step brought one request. The event with a finish_reason is the request's last."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"
    queue_s: float | None = None  # with the first token: seconds that the request waited for its first step
    unservable: bool = False  # with "error": by what the request asks for, not by a fault of the engine
    cached_tokens: int | None = None  # with the first token: how many of the prompt's were found computed


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was built. max_model_len already takes the size of the KV cache into account."""

    max_model_len: int
    max_num_seqs: int
    kv_cache_tokens: int
    vocab_size: int
    eos_token_id: int
    device: str
    dtype: str
    num_parameters: int
    load_seconds: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges (now) and counters (since the start)."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int  # held by no request
    pages_cached: int  # of those, the ones whose content can be found again
    steps: int
    step_sequences: int  # sequences of all steps together: divided by the steps, the mean batch size
    prompt_tokens: int  # computed in prefill, recomputation after preemption included
    generated_tokens: int
    tiles_encoded: int
    prefix_hit_tokens: int  # found in cached pages at an admission, instead of computed
    vision_cache_hits: int  # images whose picture was on the device already, or on its way
    preemptions: int
    aborted_requests: int
    failed_requests: int
    integrity_errors: int


# Messages to the engine.
class Submit(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


# Messages from the engine.
class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """All events of one step."""

    events: list[TokenEvent]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    message: str
    queue_full: bool = False


class Pong(msgspec.Struct, frozen=True, tag=True):
    number: int
    stats: EngineStats


ToEngine = Submit | Abort | Ping | Shutdown
FromEngine = Ready | LoadFailed | Events | Rejected | Pong


class Status(Enum):
    """WAITING -> RUNNING -> FINISHED; a preempted request goes back to WAITING with its generated tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Picture:
    """One picture on the device, or on its way there, shared by all requests that show it."""

    key: bytes
    columns: int
    rows: int
    num_slots: int
    tiles: bytes  # uint8 [num_tiles, 3, 384, 384]; gone once all are encoded
    encoded_tiles: int = 0
    holders: int = 0

    @property
    def num_tiles(self) -> int:
        return 1 + self.columns * self.rows

    @property
    def is_whole(self) -> bool:
        return self.encoded_tiles == self.num_tiles


@dataclass(eq=False, slots=True)
class RequestImage:
    """Where one picture stands in the prompt. Its tiles go over to the picture when the request is admitted."""

    start: int
    length: int  # slots
    columns: int
    rows: int
    key: bytes  # names the picture among those of all requests that may share it
    tiles: bytes
    picture: Picture | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(eq=False, slots=True)
class Request:
    """One request inside the engine.

    `token_ids` is the prompt and, after it, what was generated. The first `num_computed` of them have their
    rows in `pages`; the rest is still to be computed. The last token alone, once it is a generated one, is a
    decode row; everything else is prefill, whether it comes from the prompt or is computed anew after a preemption.
    The last `num_pending` tokens are of steps in flight: PENDING stands for each, and the lengths are right already.
    `page_keys` names the contents of the pages that its tokens fill, as far as anyone wanted to know.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    seed: int
    images: list[RequestImage] = field(default_factory=list)
    priority: int = 0
    root_key: bytes = b""
    page_keys: list[bytes] = field(default_factory=list)
    arrival: int = 0  # number in the order of arrival
    arrived_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None  # when it first left the queue
    num_cached: int | None = None  # tokens found computed when it was first admitted
    guide: Guide | None = None  # with a grammar: where in it the answer is
    status: Status = Status.WAITING
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_named: int = 0  # pages, from the first, whose content others can find
    num_pending: int = 0
    row: int = -1  # of the step that chooses or chose its last token, among all that the step chooses
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.token_ids) - self.num_pending

    @property
    def rank(self) -> tuple[int, int]:
        """Who comes first: lower priority, then earlier arrival."""
        return self.priority, self.arrival

    @property
    def decodes(self) -> bool:
        """Whether the only token left to compute is a generated one."""
        return self.num_computed == len(self.token_ids) - 1 >= self.num_prompt

    @property
    def is_complete(self) -> bool:
        """Whether it has all the tokens it may have; the last may still be pending."""
        return self.num_generated >= self.sampling.max_tokens

    @property
    def queue_s(self) -> float | None:
        """Seconds from its arrival to the plan of its first step, or None while it has none."""
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s

    @property
    def ready(self) -> bool:
        """Whether it may run: its grammar, if it has one, is compiled."""
        return self.guide is None or self.guide.ready

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def max_cached_tokens(self) -> int:
        """Rows of cache the request can come to need: the last token generated is never fed back."""
        return self.num_prompt + self.sampling.max_tokens - 1

    def finish_reason(self, eos_token_id: int) -> Literal["stop", "length"] | None:
        """Why generation ends with the last token that is known, or None if it goes on."""
        if self.guide is not None and self.guide.ended:
            return "stop"
        last = self.token_ids[self.num_known - 1]
        if (last == eos_token_id and not self.sampling.ignore_eos) or last in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_known - self.num_prompt >= self.sampling.max_tokens else None
