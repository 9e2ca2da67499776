"""`python -m kernels.bench [--model small] [--only NAMES] [--once] [--json FILE]`; see the package's head.

A row that fails (an exception, an error beyond its tolerance) is told as a failure, the others go on, and the exit
status is 1. `--once` runs every kernel once on little data without a clock, for tools that look on:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m kernels.bench --once
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch

from kernels.bench import decode, layers, prompts, sampling, tower
from kernels.bench.measure import Case, Ceilings, ceilings, timed
from kernels.bench.setups import FULL, GEOMETRIES, SHORT, TINY, Setup, Tower
from kernels.lang import has_triton, triton


@dataclass(frozen=True)
class Row:
    """One measurement. Times in microseconds; None where it failed before, or no clock ran."""

    kernel: str
    shape: str
    failure: str | None
    error: float | None = None
    """Relative to the float64 reference."""
    time: float | None = None
    floor: float | None = None
    bound: str | None = None
    """What the floor counts: bytes or operations."""
    of_floor: float | None = None
    """Floor over time: 1 is the most that the hardware allows."""
    moved: int | None = None
    operations: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description="Every kernel against a float64 reference and against its floor.")
    parser.add_argument("--model", choices=GEOMETRIES, default="small", help="whose widths; multi-head ones are tiny's")
    parser.add_argument("--only", default="", help="names of kernels, or parts of them, by commas")
    parser.add_argument("--once", action="store_true", help="each kernel once, on little data, without a clock")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels.bench needs a GPU")
    torch.set_default_device("cuda")
    setup = Setup(GEOMETRIES[arguments.model], TINY, Tower(), SHORT if arguments.once else FULL, torch.bfloat16)
    limits = None if arguments.once else ceilings(torch.bfloat16)
    versions = {"torch": torch.__version__, "triton": triton.__version__ if has_triton() else None}
    head = {"device": torch.cuda.get_device_name(), **versions, "model": arguments.model}
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    if limits is not None:
        print(f"copy {limits.bandwidth / 1e12:.2f} TB/s, product {limits.rate / 1e12:.0f} TFLOP/s")
    rows: list[Row] = []
    for row in measure(chosen(setup, arguments.only.split(",")), limits):
        if not rows:
            print(heading(limits), flush=True)
        rows.append(row)
        print(line(row), flush=True)
    if arguments.json:
        report = {**head, **(asdict(limits) if limits else {}), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    failures = sum(row.failure is not None for row in rows)
    print(f"{len(rows)} rows, {failures} failed")
    sys.exit(1 if failures or not rows else 0)


def chosen(setup: Setup, names: Iterable[str]) -> Iterator[Case]:
    """The cases whose kernel has any of these in its name."""
    parts = (decode, prompts, layers, tower, sampling)
    for case in chain.from_iterable(part.cases(setup) for part in parts):
        if any(name.strip() in case.kernel for name in names):
            yield case


def measure(cases: Iterable[Case], limits: Ceilings | None) -> Iterator[Row]:
    """A row for each case, by the clock only with limits. Once the device is lost the rest is told as not run."""
    lost = False
    for case in cases:
        if lost:
            yield Row(case.kernel, case.shape, "not run: the device is lost")
            continue
        try:
            yield _measure(case, limits)
        except Exception as error:
            lost = isinstance(error, torch.AcceleratorError)
            yield Row(case.kernel, case.shape, f"{type(error).__name__}: {error}".splitlines()[0][:160])
        if not lost and torch.cuda.is_available():
            torch.cuda.empty_cache()


@torch.inference_mode()
def _measure(case: Case, limits: Ceilings | None) -> Row:
    torch.manual_seed(0)
    work = case.prepare()
    error = work.error()
    failure = None if error <= case.tolerance else f"an error of {error:.1e}, at most {case.tolerance:.0e} expected"
    if limits is None:
        return Row(case.kernel, case.shape, failure, error)
    seconds = timed(work.calls)
    floor, bound = limits.floor(work.moved, work.operations)
    return Row(
        case.kernel,
        case.shape,
        failure,
        error,
        seconds * 1e6,
        floor * 1e6,
        bound,
        floor / seconds,
        work.moved,
        work.operations,
    )


def heading(limits: Ceilings | None) -> str:
    times = "" if limits is None else f" {'us':>9} {'floor us':>9} {'of floor':>8}  bound"
    return f"{'kernel':28} {'shape':32} {'error':>8}" + times


def line(row: Row) -> str:
    text = f"{row.kernel:28} {row.shape:32} " + (f"{row.error:8.1e}" if row.error is not None else f"{'-':>8}")
    if row.time is not None and row.floor is not None and row.of_floor is not None:
        assert row.moved is not None and row.operations is not None
        seconds = row.time / 1e6
        reached = f"{row.moved / seconds / 1e9:.0f} GB/s"
        if row.bound == "operations":
            reached = f"{row.operations / seconds / 1e12:.0f} TFLOP/s"
        text += f" {row.time:9.2f} {row.floor:9.2f} {row.of_floor:8.2f}  {row.bound}, {reached}"
    return text if row.failure is None else f"{text}  FAILED: {row.failure}"


if __name__ == "__main__":
    main()
