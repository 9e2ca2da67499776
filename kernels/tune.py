"""Find the experts' fastest tiles on this GPU and write its table: `python -m kernels.tune [--experts 66 ...]`.

For each token count every candidate that suits it is timed (medians of graph replays over weights that rotate through
more memory than the cache holds), the best of each product taken, and strips held against tiles. Takes some seconds a
token count, the first time with compilation. A table's plans for other geometries stay.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.bench.measure import timed
from kernels.lang import triton
from kernels.moe import moe_experts_triton
from kernels.moe_products import product, sort_by_expert
from kernels.tiles import (
    FOLDER,
    MOST_STRIP_PAIRS,
    ExpertsPlan,
    Geometry,
    Step,
    Strips,
    StripStep,
    Tiles,
    TileStep,
    dump_table,
    load_table,
    table_path,
)

_T = TypeVar("_T")

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
STRIPS = tuple(Strips(*sides) for sides in ((1, 4), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8)))
GATE_UP = tuple(
    Tiles(*sides)
    for sides in (
        (16, 16, 128, 4, 4, 1, 4),
        (16, 32, 128, 4, 3, 1, 4),
        (16, 32, 128, 4, 4, 1, 3),
        (16, 64, 64, 4, 4, 1, 3),
        (16, 64, 128, 4, 3, 1, 2),
        (32, 64, 64, 4, 4, 1, 3),
        (32, 64, 128, 4, 3, 1, 2),
        (64, 64, 64, 4, 4, 2, 3),
        (64, 128, 64, 8, 3, 2, 1),
        (64, 128, 64, 4, 3, 8, 2),
        (128, 64, 64, 8, 4, 8, 2),
        (128, 128, 64, 8, 3, 8, 1),
        (128, 128, 64, 8, 4, 8, 1),
        (128, 128, 64, 8, 4, 16, 1),
    )
)
DOWN = tuple(
    Tiles(*sides)
    for sides in (
        (16, 32, 128, 4, 4, 1, 5),
        (16, 64, 64, 4, 4, 1, 5),
        (16, 64, 128, 4, 4, 1, 3),
        (16, 128, 64, 4, 4, 1, 3),
        (32, 64, 128, 4, 4, 1, 2),
        (32, 128, 64, 4, 4, 1, 3),
        (64, 64, 64, 4, 4, 2, 3),
        (64, 128, 64, 4, 4, 2, 2),
        (64, 256, 64, 4, 4, 8, 1),
        (128, 128, 64, 8, 4, 8, 2),
        (128, 256, 64, 8, 3, 8, 1),
        (128, 256, 64, 8, 4, 8, 1),
    )
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=66, help="the shared ones too")
    parser.add_argument("--shared", type=int, default=2)
    parser.add_argument("--topk", type=int, default=6, help="routed experts a token")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=4, help="sets of weights to rotate through")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    gpu = torch.cuda.get_device_name()
    layers = [
        (
            random(arguments.experts, 2 * arguments.inner, arguments.hidden, std=0.02),
            random(arguments.experts, arguments.hidden, arguments.inner, std=0.02),
        )
        for _ in range(arguments.layers)
    ]
    print(f"{gpu}, torch {torch.__version__}, triton {triton.__version__}")
    steps = []
    for tokens in TOKENS:
        routes = [choose(tokens, arguments.experts, arguments.shared, arguments.topk) for _ in layers]
        steps.append(best_step(tokens, layers, routes))
    steps[-1] = replace(steps[-1], tokens=None)

    path = table_path(gpu)
    plans = load_table(path) if path.exists() else {}
    plans[Geometry.of(layers[0][0])] = ExpertsPlan(tuple(steps))
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_table(plans, gpu=gpu, torch=torch.__version__, triton=triton.__version__))
    print(f"written to {path}")


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

    def first(tiles: Tiles) -> list[Callable[[], object]]:
        return [
            partial(product, x, gate_up, *sort, topk, tiles, gated=True)
            for (gate_up, _), sort in zip(layers, sorts, strict=True)
        ]

    def second(tiles: Tiles) -> list[Callable[[], object]]:
        return [
            partial(product, activated, down, *sort, topk, tiles, gated=False)
            for (_, down), sort in zip(layers, sorts, strict=True)
        ]

    def whole(step: Step) -> list[Callable[[], object]]:
        plan = ExpertsPlan((step,))
        return [
            partial(moe_experts_triton, x, *weights, *route, plan)
            for weights, route in zip(layers, routes, strict=True)
        ]

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


def fastest(what: str, calls: Callable[[_T], list[Callable[[], object]]], candidates: Iterable[_T]) -> _T:
    """The candidate whose calls take least; those that the GPU cannot hold are left out."""
    times: list[tuple[float, _T]] = []
    for candidate in candidates:
        try:
            times.append((timed(calls(candidate)), candidate))
        except OutOfResources:
            continue
    times.sort(key=lambda pair: pair[0])
    for seconds, candidate in times[:3]:
        print(f"{what:28} {seconds * 1e6:9.1f} us  {candidate}", flush=True)
    return times[0][1]


if __name__ == "__main__":
    main()
