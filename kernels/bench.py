"""Every kernel against a float64 reference and against its floor: `python -m kernels.bench [--json FILE]`.

Shapes are those of deepseek-vl2-small in bfloat16. A time is the median of CUDA graph replays over inputs that
rotate through more memory than the cache holds; the floor is bytes over the bandwidth that a plain copy reaches here.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.head_linear import head_linear, head_linear_reference
from kernels.latent_write import write_latents
from kernels.mla_decode import mla_decode, mla_decode_reference
from kernels.moe import moe_experts, moe_experts_reference
from kernels.norm import add_rms_norm
from kernels.router import route
from kernels.sample import choose, choose_reference
from kernels.sample_rules import BIAS, PLAIN, RULE, Rules
from kernels.tiles import plan_for

HEADS, NOPE, ROPE, RANK, VALUE = 16, 128, 64, 512, 128
VOCAB = 102_400
HIDDEN, EXPERTS, SHARED, TOPK, INNER = 2048, 64, 2, 6, 1408
PAGE_SIZE = 64
DEVICE = "cuda"


@dataclass(frozen=True)
class Row:
    """One measurement."""

    kernel: str
    shape: str
    error: float
    """Relative to the float64 reference: norm of the difference over the norm."""
    microseconds: float
    gigabytes_per_second: float
    of_floor: float
    """Floor over time: 1 is the most that the memory allows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'kernel':14} {'shape':26} {'error':>9} {'us':>9} {'GB/s':>7} {'of floor':>8}")
    rows = []
    benches = (
        bench_mla_decode,
        bench_moe,
        bench_router,
        bench_norm,
        bench_head_linear,
        bench_latent_write,
        bench_sample,
    )
    for bench in benches:
        if arguments.only not in bench.__name__:
            continue
        for name, shape, error, seconds, moved in bench():
            row = Row(name, shape, error, seconds * 1e6, moved / seconds / 1e9, moved / bandwidth / seconds)
            rows.append(row)
            print(
                f"{name:14} {shape:26} {error:9.2e} {row.microseconds:9.2f} "
                f"{row.gigabytes_per_second:7.0f} {row.of_floor:8.2f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


Measurement = tuple[str, str, float, float, int]


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=DEVICE).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed([lambda: torch.neg(source, out=target)], repeats=10)


def timed(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median seconds of one call; the calls (the same work on different memory) are captured in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def error_of(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def random(*shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * std


def bench_mla_decode() -> Iterator[Measurement]:
    for batch, length in ((1, 384), (1, 4096), (8, 384), (32, 384), (64, 2048), (128, 384), (256, 384), (256, 2048)):
        pages = -(-length // PAGE_SIZE)
        copies = max(1, min(8, (1 << 30) // (batch * length * 1152)))
        caches = [random(batch * pages, PAGE_SIZE, RANK + ROPE) for _ in range(copies)]
        table = torch.randperm(batch * pages, device=DEVICE).view(batch, pages).to(torch.int32)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        latent, rope, scale = random(batch, HEADS, RANK), random(batch, HEADS, ROPE), 192**-0.5
        calls = [partial(mla_decode, latent, rope, cache, table, lengths, scale=scale) for cache in caches]
        few = slice(0, 4)
        expected = mla_decode_reference(
            latent[few].double(), rope[few].double(), caches[0].double(), table[few], lengths[few], scale=scale
        )
        error = error_of(calls[0]()[few], expected)
        seconds = timed(calls)
        yield "mla_decode", f"batch {batch} x {length}", error, seconds, batch * length * (RANK + ROPE) * 2
        del caches, calls


def bench_moe() -> Iterator[Measurement]:
    layers = [
        (random(EXPERTS + SHARED, 2 * INNER, HIDDEN, std=0.02), random(EXPERTS + SHARED, HIDDEN, INNER, std=0.02))
        for _ in range(3)
    ]
    plan = plan_for(layers[0][0])
    shared = torch.arange(EXPERTS, EXPERTS + SHARED, device=DEVICE)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192):
        x = random(tokens, HIDDEN)
        ids = torch.rand(tokens, EXPERTS, device=DEVICE).topk(TOPK).indices
        ids = torch.cat((ids, shared.expand(tokens, -1)), dim=-1)
        weights = torch.rand(tokens, TOPK + SHARED, device=DEVICE)
        few = slice(0, 8)
        expected = moe_experts_reference(
            x[few].double(), layers[0][0].double(), layers[0][1].double(), ids[few], weights[few].double()
        )
        calls = [partial(moe_experts, x, *layer, ids, weights, plan) for layer in layers]
        error = error_of(calls[0]()[few], expected)
        seconds = timed(calls)
        touched = len(ids.unique())
        moved = touched * 3 * HIDDEN * INNER * 2
        flops = tokens * (TOPK + SHARED) * 6 * HIDDEN * INNER
        yield "moe", f"{tokens} tokens {flops / seconds / 1e12:.0f} TFLOP/s", error, seconds, moved


def bench_router() -> Iterator[Measurement]:
    weight = torch.randn(EXPERTS, HIDDEN, device=DEVICE)
    for tokens in (1, 8, 32, 256, 8192):
        x = random(tokens, HIDDEN)

        run = partial(
            route,
            x,
            weight,
            None,
            topk=TOPK,
            method="greedy",
            scoring="softmax",
            normalize=False,
            scaling_factor=1.0,
            num_groups=1,
            topk_groups=1,
        )
        expected = (x.double() @ weight.double().t()).softmax(-1).topk(TOPK).values
        error = error_of(run()[1].sort(-1, descending=True).values, expected)
        yield "router", f"{tokens} tokens", error, timed([run] * 8), weight.nbytes + x.nbytes


def bench_norm() -> Iterator[Measurement]:
    weight = random(HIDDEN)
    for tokens in (1, 256, 16384):
        x, residual = random(tokens, HIDDEN), random(tokens, HIDDEN)
        total = (x + residual).double()
        expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        error = error_of(add_rms_norm(x, residual, weight, 1e-6)[0], expected)
        seconds = timed([partial(add_rms_norm, x, residual, weight, 1e-6)] * 8)
        yield "add_rms_norm", f"{tokens} tokens", error, seconds, 4 * x.nbytes


def bench_head_linear() -> Iterator[Measurement]:
    weights = [random(HEADS, NOPE + VALUE, RANK, std=0.05) for _ in range(16)]
    for tokens in (1, 32, 256):
        x = random(tokens, HEADS, NOPE)
        error = error_of(
            head_linear(x, weights[0][:, :NOPE]), head_linear_reference(x.double(), weights[0][:, :NOPE].double())
        )
        seconds = timed([partial(head_linear, x, weight[:, :NOPE]) for weight in weights])
        yield "absorb key", f"{tokens} tokens", error, seconds, HEADS * NOPE * RANK * 2
        y = random(tokens, HEADS, RANK)
        seconds = timed([partial(head_linear, y, weight[:, NOPE:].transpose(1, 2)) for weight in weights])
        error = error_of(
            head_linear(y, weights[0][:, NOPE:].transpose(1, 2)),
            head_linear_reference(y.double(), weights[0][:, NOPE:].transpose(1, 2).double()),
        )
        yield "absorb value", f"{tokens} tokens", error, seconds, HEADS * VALUE * RANK * 2


def bench_latent_write() -> Iterator[Measurement]:
    width = HEADS * (NOPE + ROPE) + RANK + ROPE
    for tokens in (1, 256, 8192):
        projected = random(tokens, width)
        query = projected[:, : HEADS * (NOPE + ROPE)].unflatten(-1, (HEADS, NOPE + ROPE))
        latent, weight = projected[:, HEADS * (NOPE + ROPE) :], random(RANK)
        angles = torch.rand(tokens, ROPE // 2, device=DEVICE)
        cache = torch.zeros(tokens // PAGE_SIZE + 1, PAGE_SIZE, RANK + ROPE, device=DEVICE, dtype=torch.bfloat16)
        slots = torch.arange(tokens, device=DEVICE)
        rotary = (angles.cos(), angles.sin())
        run = partial(write_latents, query, latent, weight, rotary, cache, slots, rope=ROPE, eps=1e-6)
        wide = latent[:, :RANK].double()
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        run()
        error = error_of(cache.view(-1, RANK + ROPE)[:tokens, :RANK], expected)
        moved = tokens * ((RANK + ROPE) * 4 + HEADS * ROPE * 4)
        yield "write_latents", f"{tokens} tokens", error, timed([run] * 8), moved


def bench_sample() -> Iterator[Measurement]:
    """The error is the share of rows whose token is not the reference's; the floor reads the logits once."""
    kinds: dict[str, dict[str, float]] = {
        "greedy": {},
        "temperature": {},
        "top-p 0.9": {"top_p": 0.9},
        "top-k 50": {"top_k": 50},
    }
    for name, fields in kinds.items():
        for rows in (1, 64, 256):
            buffers = [torch.randn(rows, VOCAB, device=DEVICE) * 3 for _ in range(max(2, min(16, 1024 // rows)))]
            rules = None
            if name != "greedy":
                records = np.full(rows, PLAIN, dtype=RULE)
                records["position"], records["inverse_temperature"] = range(rows), 1.0
                for field, value in fields.items():
                    records[field] = value
                flat = Rules.flat(records, np.zeros(0, BIAS)).to(DEVICE)
                none = torch.zeros(0, VOCAB, dtype=torch.int32, device=DEVICE)
                rules = Rules(*Rules.split(flat, rows), none.bool(), none, num_places=0, cuts=bool(fields), num_top=-1)
            expected = choose_reference(buffers[0], rules, None).tokens
            error = float((choose(buffers[0], rules, None).tokens != expected).double().mean())
            seconds = timed([partial(choose, logits, rules, None) for logits in buffers])
            yield "sample", f"{name} {rows} rows", error, seconds, buffers[0].nbytes


if __name__ == "__main__":
    main()
