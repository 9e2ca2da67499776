"""`vl2 bench offline`: the engine alone, in this process, on random tokens and tiles.

Neither tokenizer nor HTTP is involved, and with `--load-format dummy` no weights: any config.json can be measured.

For each case a batch of equal requests starts at once, and every request generates its full length. Measured:

* time to first token: from the start to a request's first token (the mean over the batch), prefill and vision included;
* time per token: between a request's tokens after the first (the mean over the batch);
* output tokens/s: generated tokens of the whole batch over the whole time; prompt tokens/s: over the time to the last
  first token;
* peak memory: what torch allocated on the GPU in this case (weights and KV cache included), or this process's peak
  resident memory so far on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from model.checkpoint import CheckpointError, resolve_model
from model.config import ConfigError, ModelConfig, load_config
from model.image import TILE_SIZE, image_layout, tile_grid
from model.prompt import MAX_TILED_IMAGES
from server.doctor import cpu_name
from server.engine.core import Engine
from server.engine.request import EngineRequest, ImageInput, SamplingParams
from server.logs import configure_logging
from server.service import engine_config
from server.settings import ConfigurationError, Settings, quiet

WARMUP_TOKENS = 4


@dataclass(frozen=True)
class Case:
    """A batch of equal requests: `prompt_len` text tokens and `images` pictures each, `output_len` tokens out."""

    prompt_len: int
    output_len: int
    batch_size: int
    images: int


@dataclass(frozen=True)
class Result:
    """Medians over the repeats. Times in milliseconds, memory in MiB."""

    prompt_len: int
    output_len: int
    batch_size: int
    images: int
    prompt_tokens: int  # of one request, image slots included
    first_token_ms: float
    token_ms: float | None  # None when only one token is generated
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    total_s: float
    peak_memory_mib: float


@dataclass(frozen=True)
class _Run:
    first_token_s: float
    last_first_token_s: float
    token_s: float | None
    total_s: float


def run_cases(
    settings: Settings, cases: Sequence[Case], *, image_size: tuple[int, int], repeats: int, as_json: bool
) -> None:
    """Measure the cases and print them. Raises ConfigurationError when the model or a case can't be run."""
    settings = quiet(settings)
    configure_logging(settings.log_level, settings.log_format)
    try:
        config = load_config(resolve_model(settings.model_source, weights=False))
        engine = Engine(engine_config(settings))
    except ConfigurationError:  # of the device
        raise
    except (CheckpointError, ConfigError, ValueError) as error:
        raise ConfigurationError(f"--model {settings.model_source}: {error}") from error
    inputs = _Inputs(config, image_size, settings.seed)
    for case in cases:
        needed = inputs.prompt_tokens(case) + case.output_len
        if needed > engine.info.max_model_len:
            raise ConfigurationError(f"{case} needs {needed} tokens, the context is {engine.info.max_model_len}")
    results = [_measure(engine, inputs, case, repeats) for case in cases]
    info = engine.info
    device = info.device if torch.cuda.is_available() and info.device != "cpu" else cpu_name()
    head = {
        "model": settings.model_name,
        "parameters": info.num_parameters,
        "device": device,
        "dtype": info.dtype,
        "torch": torch.__version__,
        "kv_cache_tokens": info.kv_cache_tokens,
        "load_s": round(info.load_seconds, 3),
        "image_size": list(image_size),
        "repeats": repeats,
    }
    if as_json:
        print(json.dumps({**head, "results": [asdict(result) for result in results]}, indent=1))
        return
    print(f"{head['model']}: {info.num_parameters / 1e6:.1f} M parameters, {info.dtype} on {device}")
    _print_table(results)


class _Inputs:
    """Random prompts and pictures of a model, the same for the same seed."""

    def __init__(self, config: ModelConfig, image_size: tuple[int, int], seed: int) -> None:
        self._config = config
        self._image_size = image_size
        self._random = np.random.default_rng(seed)

    def prompt_tokens(self, case: Case) -> int:
        """Length of one request's prompt."""
        columns, rows = self._grid(case)
        return case.prompt_len + case.images * len(image_layout(columns, rows))

    def request(self, case: Case, number: int, output_len: int) -> EngineRequest:
        """A request whose pictures come first, then its text."""
        columns, rows = self._grid(case)
        slots = len(image_layout(columns, rows))
        shape = (1 + columns * rows, 3, TILE_SIZE, TILE_SIZE)
        images = []
        for index in range(case.images):
            tiles = self._random.integers(0, 256, shape, np.uint8).tobytes()
            digest = hashlib.sha256(tiles).digest()
            images.append(ImageInput(start=index * slots, columns=columns, rows=rows, tiles=tiles, digest=digest))
        # The ids at image slots are never looked at: features take their place.
        length = case.images * slots + case.prompt_len
        token_ids = self._random.integers(0, self._config.language.vocab_size, length).tolist()
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        return EngineRequest(request_id=str(number), token_ids=token_ids, images=images, sampling=sampling)

    def _grid(self, case: Case) -> tuple[int, int]:
        tiled = case.images <= MAX_TILED_IMAGES
        return tile_grid(self._image_size, self._config.candidate_resolutions, tiled=tiled)


def _measure(engine: Engine, inputs: _Inputs, case: Case, repeats: int) -> Result:
    """Warm up with the same batch and a few tokens, then run the case and take medians."""
    _run(engine, inputs, case, min(WARMUP_TOKENS, case.output_len))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    runs = [_run(engine, inputs, case, case.output_len) for _ in range(repeats)]
    prompt_tokens = inputs.prompt_tokens(case)
    total = statistics.median(run.total_s for run in runs)
    steps = [run.token_s for run in runs if run.token_s is not None]
    return Result(
        **asdict(case),
        prompt_tokens=prompt_tokens,
        first_token_ms=1000 * statistics.median(run.first_token_s for run in runs),
        token_ms=1000 * statistics.median(steps) if steps else None,
        output_tokens_per_s=case.batch_size * case.output_len / total,
        prompt_tokens_per_s=case.batch_size * prompt_tokens / statistics.median(run.last_first_token_s for run in runs),
        total_s=total,
        peak_memory_mib=_peak_memory_mib(),
    )


def _run(engine: Engine, inputs: _Inputs, case: Case, output_len: int) -> _Run:
    """One batch from its start to its last token. Raises RuntimeError when the engine fails a request."""
    requests = [inputs.request(case, number, output_len) for number in range(case.batch_size)]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    began = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - began
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"the engine failed a request: {event.error}")
            first.setdefault(event.request_id, now)
            last[event.request_id] = now
    between = [(last[name] - first[name]) / (output_len - 1) for name in first] if output_len > 1 else []
    return _Run(
        first_token_s=statistics.fmean(first.values()),
        last_first_token_s=max(first.values()),
        token_s=statistics.fmean(between) if between else None,
        total_s=max(last.values()),
    )


def _peak_memory_mib() -> float:
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere


def _print_table(results: Sequence[Result]) -> None:
    titles = [
        "batch",
        "text",
        "images",
        "prompt",
        "output",
        "first ms",
        "token ms",
        "out tok/s",
        "in tok/s",
        "peak MiB",
    ]
    rows = [
        [
            str(result.batch_size),
            str(result.prompt_len),
            str(result.images),
            str(result.prompt_tokens),
            str(result.output_len),
            f"{result.first_token_ms:.1f}",
            "-" if result.token_ms is None else f"{result.token_ms:.2f}",
            f"{result.output_tokens_per_s:.1f}",
            f"{result.prompt_tokens_per_s:.1f}",
            f"{result.peak_memory_mib:.0f}",
        ]
        for result in results
    ]
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    for row in [titles, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
