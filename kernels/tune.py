"""Find the fastest tiles of experts and latent attention on this GPU: `python -m kernels.tune [--model small]`.

For each number of tokens, or sequences, every candidate that suits it is timed (medians of graph replays over weights
and cache rows that rotate through more memory than the cache holds) and the best taken; of experts strips are held
against tiles. Takes some seconds a number, the first time with compilation. The table's plans for other geometries
stay.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.bench.decode import mla
from kernels.bench.measure import timed
from kernels.bench.setups import FULL, GEOMETRIES, Geometry, Setup, Tower
from kernels.lang import triton
from kernels.mla_decode import mla_decode_triton
from kernels.moe import moe_experts_triton
from kernels.moe_products import product, sort_by_expert
from kernels.tiles import (
    FOLDER,
    MOST_STRIP_PAIRS,
    DecodeForm,
    DecodePlan,
    DecodeStep,
    ExpertsGeometry,
    ExpertsPlan,
    LatentGeometry,
    Step,
    Strips,
    StripStep,
    Table,
    Tiles,
    TileStep,
    dump_table,
    load_table,
    table_path,
)

_T = TypeVar("_T")

SEQUENCES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (384, 2048)
LAYERS = 4
"""Sets of experts' weights to rotate through."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
STRIPS = tuple(Strips(*sides) for sides in ((1, 4), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8)))
GATE_UP = tuple(
    Tiles(*sides)
    for sides in (
        (16, 16, 128, 4, 4, 1, 4, False),
        (16, 32, 128, 4, 3, 1, 4, False),
        (16, 32, 128, 4, 4, 1, 3, False),
        (16, 64, 64, 4, 4, 1, 3, False),
        (16, 64, 64, 4, 4, 8, 3, False),
        (16, 64, 64, 4, 4, 8, 3, True),
        (16, 64, 128, 4, 3, 1, 2, False),
        (32, 64, 64, 4, 4, 1, 3, False),
        (32, 64, 64, 4, 4, 8, 3, False),
        (32, 64, 64, 4, 4, 8, 3, True),
        (32, 64, 128, 4, 3, 1, 2, False),
        (64, 64, 64, 4, 3, 2, 3, False),
        (64, 64, 64, 4, 3, 2, 2, True),
        (64, 128, 64, 8, 3, 2, 1, True),
        (128, 64, 64, 4, 3, 8, 2, False),
        (128, 128, 64, 8, 3, 8, 1, False),
        (128, 128, 64, 8, 3, 8, 1, True),
        (128, 128, 64, 8, 4, 8, 1, False),
        (128, 128, 64, 8, 3, 16, 1, True),
    )
)
DOWN = tuple(
    Tiles(*sides)
    for sides in (
        (16, 32, 128, 4, 4, 1, 5, False),
        (16, 64, 64, 4, 4, 1, 5, False),
        (16, 64, 128, 4, 4, 1, 3, False),
        (16, 128, 64, 4, 4, 1, 3, False),
        (16, 128, 64, 4, 4, 8, 3, False),
        (16, 128, 64, 4, 4, 8, 3, True),
        (32, 64, 128, 4, 4, 1, 2, False),
        (32, 128, 64, 4, 4, 1, 3, False),
        (32, 128, 64, 4, 4, 8, 3, False),
        (32, 128, 64, 4, 4, 8, 3, True),
        (64, 64, 64, 4, 4, 2, 3, False),
        (64, 128, 64, 4, 4, 2, 2, False),
        (64, 256, 64, 4, 4, 8, 1, False),
        (128, 128, 64, 4, 3, 8, 2, False),
        (128, 128, 64, 8, 4, 8, 1, True),
        (128, 256, 64, 8, 3, 8, 1, False),
        (128, 256, 64, 8, 3, 8, 1, True),
        (128, 256, 64, 8, 4, 8, 1, False),
    )
)
FORMS = tuple(
    DecodeForm(*sides)
    for sides in (
        (16, 16, 4, 4, 2),
        (16, 16, 4, 6, 2),
        (16, 16, 4, 8, 2),
        (32, 16, 4, 4, 2),
        (32, 16, 4, 6, 2),
        (32, 16, 8, 6, 1),
        (32, 16, 8, 8, 1),
        (64, 16, 4, 4, 2),
        (64, 16, 8, 4, 1),
        (64, 16, 8, 6, 1),
        (16, 32, 8, 6, 1),
        (32, 32, 8, 4, 1),
        (32, 32, 8, 6, 1),
        (64, 32, 8, 4, 1),
    )
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(GEOMETRIES), default="small", help="whose widths")
    geometry = GEOMETRIES[parser.parse_args().model]
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, triton {triton.__version__}")
    path = table_path(gpu)
    table = load_table(path) if path.exists() else Table()
    dtype = str(torch.bfloat16).removeprefix("torch.")

    def save() -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_table(table, gpu=gpu, torch=torch.__version__, triton=triton.__version__))
        print(f"written to {path}")

    if geometry.rank:
        latents = LatentGeometry(geometry.heads, geometry.rank, geometry.rope, dtype)
        table.mla_decode[latents] = best_decode_plan(geometry)
        save()
    experts = ExpertsGeometry(geometry.experts + geometry.shared, geometry.hidden, geometry.inner, dtype)
    table.experts[experts] = best_experts_plan(geometry)
    save()


def best_decode_plan(geometry: Geometry) -> DecodePlan:
    """For each number of sequences the form with the least geometric mean of its times at short and long contexts."""
    setup = Setup(geometry, geometry, Tower(), FULL, torch.bfloat16)

    def seconds(sequences: int, form: DecodeForm) -> float:
        times = []
        for context in CONTEXTS:
            work = mla(setup, (context,) * sequences, partial(mla_decode_triton, form=form))
            times.append(timed(work.calls))
            if (error := work.error()) > setup.tolerance:
                print(f"left out, as it computes {sequences} x {context} with an error of {error:.1e}: {form}")
                return math.inf
        return math.prod(times) ** (1 / len(times))

    steps = [
        DecodeStep(
            sequences, fastest(f"attention, {sequences} sequences", partial(seconds, sequences), forms_for(geometry))
        )
        for sequences in SEQUENCES
    ]
    return DecodePlan((*steps[:-1], replace(steps[-1], sequences=None)))


def forms_for(geometry: Geometry) -> list[DecodeForm]:
    """Those that have no more heads than there are, or the fewest that the matrix units take."""
    return [form for form in FORMS if form.heads <= max(16, geometry.heads)]


def best_experts_plan(geometry: Geometry) -> ExpertsPlan:
    experts = geometry.experts + geometry.shared
    layers = [
        (
            random(experts, 2 * geometry.inner, geometry.hidden, std=0.02),
            random(experts, geometry.hidden, geometry.inner, std=0.02),
        )
        for _ in range(LAYERS)
    ]
    steps = []
    for tokens in TOKENS:
        routes = [choose(tokens, experts, geometry.shared, geometry.topk) for _ in layers]
        steps.append(best_step(tokens, layers, routes))
    return ExpertsPlan((*steps[:-1], replace(steps[-1], tokens=None)))


def random(*shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16) * std


def choose(tokens: int, experts: int, shared: int, topk: int) -> tuple[Tensor, Tensor]:
    """Experts drawn evenly, then the shared ones; and weights."""
    routed = torch.rand(tokens, experts - shared).topk(topk).indices
    always = torch.arange(experts - shared, experts).expand(tokens, -1)
    return torch.cat((routed, always), dim=-1), torch.rand(tokens, topk + shared)


def best_step(tokens: int, layers: list[tuple[Tensor, Tensor]], routes: list[tuple[Tensor, Tensor]]) -> Step:
    """The fastest of tiles and strips for this many tokens."""
    (experts, _, hidden), inner = layers[0][0].shape, layers[0][1].shape[2]
    x, topk = random(tokens, hidden), routes[0][0].shape[1]
    activated = random(tokens * topk, inner)
    sorts = [sort_by_expert(ids, experts) for ids, _ in routes]
    rows = tokens * topk / experts

    def first(tiles: Tiles) -> float:
        return timed(
            [
                partial(product, x, gate_up, *sort, topk, tiles, gated=True)
                for (gate_up, _), sort in zip(layers, sorts, strict=True)
            ]
        )

    def second(tiles: Tiles) -> float:
        return timed(
            [
                partial(product, activated, down, *sort, topk, tiles, gated=False)
                for (_, down), sort in zip(layers, sorts, strict=True)
            ]
        )

    def whole(step: Step) -> float:
        plan = ExpertsPlan((step,))
        return timed(
            [
                partial(moe_experts_triton, x, *weights, *route, plan)
                for weights, route in zip(layers, routes, strict=True)
            ]
        )

    gate_up = fastest(f"{tokens} tokens, gate and up", first, (t for t in GATE_UP if suits(t, rows)))
    down = fastest(f"{tokens} tokens, down", second, (t for t in DOWN if suits(t, rows)))
    steps: list[Step] = [TileStep(tokens, gate_up, down)]
    if tokens * topk <= MOST_STRIP_PAIRS // 2:
        steps += [StripStep(tokens, strips, Strips(2, 8)) for strips in STRIPS]
        best = fastest(f"{tokens} tokens, whole", whole, steps)
        steps = [best]
        if isinstance(best, StripStep):
            steps += [StripStep(tokens, best.gate_up, strips) for strips in STRIPS]
    return fastest(f"{tokens} tokens, whole", whole, steps)


def suits(tiles: Tiles, rows: float) -> bool:
    """Whether row blocks are neither mostly empty nor many an expert, at so many rows an expert."""
    return min(64, rows / 2) <= tiles.rows <= max(16, 4 * rows)


def fastest(what: str, seconds: Callable[[_T], float], candidates: Iterable[_T]) -> _T:
    """The candidate that takes least; those that the GPU cannot hold are left out."""
    times: list[tuple[float, _T]] = []
    for candidate in candidates:
        try:
            times.append((seconds(candidate), candidate))
        except OutOfResources:
            continue
    times.sort(key=lambda pair: pair[0])
    for time, candidate in times[:3]:
        print(f"{what:28} {time * 1e6:9.1f} us  {candidate}", flush=True)
    return times[0][1]


if __name__ == "__main__":
    main()
