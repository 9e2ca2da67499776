"""`vl2 bench offline`: the engine alone, in this process, beside the floors of its model on this device.

Neither tokenizer nor HTTP is involved, and with `--load-format dummy` no weights: any config.json can be measured.
`server/bench_engine.py` says what each time is, `server/floors.py` what the floors count: its bytes over the bandwidth,
its operations over the rate of products, both measured here first (kernels/bench/measure.py), the larger of the two.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from kernels.bench.measure import Ceilings, ceilings
from model.checkpoint import CheckpointError, resolve_model
from model.config import ConfigError, load_config
from server import VERSION
from server.bench_engine import BenchError, EngineBench
from server.doctor import PACKAGES, cpu_name
from server.engine.core import Engine
from server.floors import Cost, decode_step, prefill, vision
from server.logs import configure_logging
from server.service import engine_config
from server.settings import ConfigurationError, Settings, quiet, resolve_device

WORK = ("decode", "prefill", "picture", "vision", "waiting")
PROMPT_LENGTH = 2048


@dataclass(frozen=True)
class Plan:
    """What is measured. None: what suits the device."""

    work: tuple[str, ...]
    batch_sizes: tuple[int, ...] | None = None
    """Of decode steps, and of waiting."""
    prompt_len: int = 256
    """Before decoding."""
    output_len: int = 256
    picture_size: tuple[int, int] = (1024, 768)
    repeats: int = 3

    def sizes(self, on_gpu: bool) -> Sizes:
        if on_gpu:
            return Sizes(self.batch_sizes or (1, 8, 32, 128, 256), self.batch_sizes or (1, 64), 32, (1, 7, 28))
        return Sizes(self.batch_sizes or (1, 4), self.batch_sizes or (1,), 2, (1,))


@dataclass(frozen=True)
class Sizes:
    batches: tuple[int, ...]
    waiting: tuple[int, ...]
    prompts: int
    tiles: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str
    failure: str | None = None
    ms: float | None = None
    floor_ms: float | None = None
    bound: str | None = None
    """What the floor counts: bytes or operations."""
    of_floor: float | None = None
    """Floor over time."""
    rate: float | None = None
    unit: str | None = None
    """Of the rate: tok/s or tiles/s; of waiting its share in %."""
    p90_ms: float | None = None


def run(settings: Settings, plan: Plan, *, json_file: Path | None) -> bool:
    """Measure and print the table; whether no row failed.

    Raises ConfigurationError when the model or the plan can't be run.
    """
    settings = quiet(settings)
    configure_logging(settings.log_level, settings.log_format)
    on_gpu = resolve_device(settings.device) == "cuda"
    sizes = plan.sizes(on_gpu)
    if "max_num_seqs" not in settings.model_fields_set:
        most = max(*sizes.batches, sizes.prompts, *sizes.waiting)
        settings = settings.model_copy(update={"max_num_seqs": max(most, settings.max_num_seqs)})
    try:
        config = load_config(resolve_model(settings.model_source, weights=False))
        engine = Engine(engine_config(settings))
    except ConfigurationError:  # of the device
        raise
    except (CheckpointError, ConfigError, ValueError) as error:
        raise ConfigurationError(f"--model {settings.model_source}: {error}") from error
    ready_s = time.time() - psutil.Process().create_time()
    _check(plan, sizes, engine)
    with torch.device(engine.runner.device):
        limits = ceilings(engine.runner.dtype)
    if on_gpu:
        torch.cuda.empty_cache()
    head = _head(settings, engine, limits)
    about = ("device", "dtype", "torch", "triton", "commit", "attention", "prefill_chunk_tokens")
    print(f"{settings.model_name}: {engine.info.num_parameters / 1e9:.2f} B parameters; ", end="")
    print(", ".join(f"{name} {head[name]}" for name in about))
    print(f"copy {limits.bandwidth / 1e12:.2f} TB/s, product {limits.rate / 1e12:.1f} TFLOP/s")
    rows = [Row("start to ready", ms=1000 * ready_s)]
    print(HEADING, _line(rows[0]), sep="\n", flush=True)
    bench = EngineBench(engine, config, seed=settings.seed, repeats=plan.repeats)
    gc.collect()
    gc.freeze()  # as the engine's own process does
    try:
        for row in _rows(bench, plan, sizes, limits):
            rows.append(row)
            print(_line(row), flush=True)
    finally:
        gc.unfreeze()
    if json_file is not None:
        report = {**head, "peak_memory_mib": _peak_memory_mib(), "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    return all(row.failure is None for row in rows)


def _check(plan: Plan, sizes: Sizes, engine: Engine) -> None:
    """Raises ConfigurationError, naming the option."""
    needed = plan.prompt_len + plan.output_len
    if needed > engine.info.max_model_len:
        raise ConfigurationError(
            f"--prompt-len {plan.prompt_len} and --output-len {plan.output_len} need {needed} tokens, "
            f"the context is {engine.info.max_model_len}"
        )
    if max(sizes.batches) > engine.info.max_num_seqs:
        raise ConfigurationError(f"--batch-size: more than --max-num-seqs {engine.info.max_num_seqs}")


def _rows(bench: EngineBench, plan: Plan, sizes: Sizes, limits: Ceilings) -> Iterator[Row]:
    config, itemsize = bench.config, bench.engine.runner.dtype.itemsize
    length = min(PROMPT_LENGTH, bench.engine.info.max_model_len - 1)

    def floor(cost: Cost) -> dict[str, Any]:
        seconds, bound = limits.floor(cost.moved, cost.operations)
        return {"floor_ms": 1000 * seconds, "bound": bound}

    def decode(batch: int) -> Row:
        gaps = bench.decode_step(batch, plan.prompt_len, plan.output_len)
        seconds = statistics.median(gaps)
        p90 = sorted(gaps)[len(gaps) * 9 // 10]
        context = plan.prompt_len + plan.output_len / 2
        cost = decode_step(config, itemsize, batch=batch, context=context)
        return _row(_decode_name(batch), seconds, batch, "tok/s", **floor(cost), p90_ms=1000 * p90)

    def first_tokens(prompts: int) -> Row:
        seconds = bench.first_tokens(prompts, length)
        cost = prefill(config, itemsize, prompts=prompts, length=length)
        return _row(_prompts_name(prompts, length), seconds, prompts * length, "tok/s", **floor(cost))

    def picture() -> Row:
        tokens, tiles = bench.picture_tokens(plan.picture_size), bench.picture_tiles(plan.picture_size)
        cost = [vision(config, itemsize, tiles=tiles), prefill(config, itemsize, prompts=1, length=tokens)]
        seconds = bench.picture(plan.picture_size)
        floors = [limits.floor(part.moved, part.operations) for part in cost]
        return _row(
            f"{picture_name}, {tiles} tiles, {tokens} tokens",
            seconds,
            tokens,
            "tok/s",
            floor_ms=1000 * sum(part for part, _ in floors),
            bound=floors[1][1],
        )

    def tower(tiles: int) -> Row:
        cost = vision(config, itemsize, tiles=tiles)
        return _row(_tower_name(tiles), bench.tower(tiles), tiles, "tiles/s", **floor(cost))

    def waiting(batch: int) -> Row:
        share, seconds = bench.waiting(batch, plan.prompt_len)
        return Row(_waiting_name(batch), ms=1000 * seconds, rate=100 * share, unit="% of it waiting")

    picture_name = "picture {}x{}".format(*plan.picture_size)
    measurements: list[tuple[str, str, Callable[[], Row]]] = [
        *(("decode", _decode_name(batch), lambda batch=batch: decode(batch)) for batch in sizes.batches),
        *(("prefill", _prompts_name(n, length), lambda n=n: first_tokens(n)) for n in (1, sizes.prompts)),
        ("picture", picture_name, picture),
        *(("vision", _tower_name(tiles), lambda tiles=tiles: tower(tiles)) for tiles in sizes.tiles),
        *(("waiting", _waiting_name(batch), lambda batch=batch: waiting(batch)) for batch in sizes.waiting),
    ]
    for kind, name, measure in measurements:
        if kind not in plan.work:
            continue
        try:
            yield measure()
        except (BenchError, RuntimeError, ValueError) as error:
            yield Row(name, failure=f"{type(error).__name__}: {error}".splitlines()[0])


def _row(name: str, seconds: float, count: int, unit: str, *, floor_ms: float, **rest: Any) -> Row:
    ms = 1000 * seconds
    return Row(name, ms=ms, floor_ms=floor_ms, of_floor=floor_ms / ms, rate=count / seconds, unit=unit, **rest)


def _decode_name(batch: int) -> str:
    return f"decode, batch {batch}"


def _prompts_name(prompts: int, length: int) -> str:
    return f"{prompts} x {length} to first token"


def _tower_name(tiles: int) -> str:
    return f"vision tower, {tiles} tiles"


def _waiting_name(batch: int) -> str:
    return f"GPU waits, batch {batch}"


HEADING = f"{'work':44} {'ms':>9} {'floor':>9} {'of floor':>8} {'p90':>8}"


def _line(row: Row) -> str:
    def cell(value: float | None, width: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"

    if row.failure is not None:
        return f"{row.work:44} FAILED: {row.failure}"
    text = f"{row.work:44} {cell(row.ms, 9)} {cell(row.floor_ms, 9)} {cell(row.of_floor, 8)} {cell(row.p90_ms, 8)}"
    if row.rate is not None:
        text += f"  {row.rate:,.1f} {row.unit}"
    return text if row.bound is None else f"{text}, floor by {row.bound}"


def _head(settings: Settings, engine: Engine, limits: Ceilings) -> dict[str, Any]:
    """Device, versions and settings: what a figure means nothing without."""
    info = engine.info
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "model": settings.model_name,
        "parameters": info.num_parameters,
        "device": info.device if engine.runner.device.type == "cuda" else cpu_name(),
        "dtype": info.dtype,
        "vl2": VERSION,
        "commit": commit(Path(__file__).parents[1]),
        "python": platform.python_version(),
        **versions,
        "cuda": torch.version.cuda,
        "attention": engine.runner.model.attention_backend.value,
        "prefill_chunk_tokens": settings.prefill_chunk_tokens,
        "max_num_seqs": info.max_num_seqs,
        "kv_cache_tokens": info.kv_cache_tokens,
        "load_s": round(info.load_seconds, 3),
        **asdict(limits),
    }


def commit(folder: Path) -> str | None:
    """The commit that a checkout is at, with a `+` where something is changed; None where there is no git."""
    if not (folder / ".git").exists():
        return None
    try:
        name, changes = (
            subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.strip() + ("+" if changes.strip() else "")


def _peak_memory_mib() -> float:
    """What torch allocated on the GPU at most, or this process's peak resident memory on a CPU."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere
