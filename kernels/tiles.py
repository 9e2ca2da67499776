"""How the experts' kernels are cut for a GPU: which form, and which tile shapes, for how many tokens.

A plan is a list of steps by token count, chosen once for a model on a device and handed to the kernel. It comes from
`configs/tiles/<name of the GPU>.json`, made by `python -m kernels.tune`, where that file has the experts' geometry;
elsewhere from `default_plan`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "configs" / "tiles"
MOST_STRIP_PAIRS = 256
"""Most (token, choice) pairs that the strips serve: each program reads all their experts."""

_T = TypeVar("_T")


class TilesError(ValueError):
    """A table of tiles that cannot be used; the message names the file and the field."""


@dataclass(frozen=True)
class Tiles:
    """Tile shape of a product by matrix units; see kernels/moe_products.py."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int
    """Row blocks that are computed side by side, so that they read a weight tile while the cache has it."""
    programs: int
    """Programs for each multiprocessor; they share the tiles out evenly."""


@dataclass(frozen=True)
class Strips:
    """Rows of a weight matrix that a program holds in registers; see kernels/moe_strips.py."""

    columns: int
    warps: int


@dataclass(frozen=True)
class TileStep:
    tokens: int | None
    """Up to this many tokens; None: any number."""
    gate_up: Tiles
    down: Tiles


@dataclass(frozen=True)
class StripStep:
    tokens: int | None
    gate_up: Strips
    down: Strips


Step = TileStep | StripStep


@dataclass(frozen=True)
class ExpertsPlan:
    """Steps by rising token count; the last serves any number."""

    steps: tuple[Step, ...]

    def step(self, tokens: int) -> Step:
        return next(step for step in self.steps if step.tokens is None or tokens <= step.tokens)


@dataclass(frozen=True)
class Geometry:
    """What a plan was made for: `experts` counts the shared ones too."""

    experts: int
    hidden: int
    inner: int
    dtype: str

    @staticmethod
    def of(gate_up: Tensor) -> "Geometry":
        """Of weights [experts, 2 * inner, hidden]."""
        experts, doubled, hidden = gate_up.shape
        return Geometry(experts, hidden, doubled // 2, str(gate_up.dtype).removeprefix("torch."))


def plan_for(gate_up: Tensor) -> ExpertsPlan:
    """The plan for experts with these weights [experts, 2 * inner, hidden] on their device.

    Raises TilesError when the GPU's table cannot be used.
    """
    geometry = Geometry.of(gate_up)
    if gate_up.is_cuda:
        path = table_path(torch.cuda.get_device_name(gate_up.device))
        if path.exists():
            return _load(path).get(geometry) or default_plan(gate_up.dtype)
    return default_plan(gate_up.dtype)


def table_path(gpu: str, folder: Path = FOLDER) -> Path:
    return folder / f"{gpu.replace(' ', '_').replace('/', '_')}.json"


@cache
def default_plan(dtype: torch.dtype) -> ExpertsPlan:
    """A plan for any GPU: few rows while an expert sees few, then the largest tiles that registers hold."""
    strips = StripStep(4, Strips(4, 4), Strips(2, 4))
    few = (
        TileStep(32, Tiles(16, 32, 128, 4, 3, 1, 3), Tiles(16, 32, 128, 4, 4, 1, 4)),
        TileStep(128, Tiles(16, 64, 64, 4, 4, 1, 3), Tiles(16, 128, 64, 4, 4, 1, 3)),
    )
    if dtype.itemsize > 2:
        wide = Tiles(32, 64, 32, 4, 2, 1, 2)
        return ExpertsPlan((strips, TileStep(None, wide, wide)))
    many = (
        TileStep(512, Tiles(32, 64, 64, 4, 4, 1, 2), Tiles(32, 128, 64, 4, 4, 1, 2)),
        TileStep(1024, Tiles(64, 128, 64, 8, 3, 4, 1), Tiles(64, 128, 64, 4, 4, 4, 2)),
        TileStep(None, Tiles(128, 128, 64, 8, 3, 8, 1), Tiles(128, 256, 64, 8, 3, 8, 1)),
    )
    return ExpertsPlan((strips, *few, *many))


def invariant_plan(dtype: torch.dtype) -> ExpertsPlan:
    """One form and one tile shape for any number of tokens, so that a token comes out alike in any batch."""
    if dtype.itemsize > 2:
        return ExpertsPlan((default_plan(dtype).steps[-1],))
    return ExpertsPlan((TileStep(None, Tiles(64, 128, 64, 8, 3, 4, 1), Tiles(64, 128, 64, 4, 4, 4, 2)),))


@cache
def _load(path: Path) -> dict[Geometry, ExpertsPlan]:
    return load_table(path)


def load_table(path: Path) -> dict[Geometry, ExpertsPlan]:
    """The plans of a table. Raises TilesError, which names the file and what is wrong in it."""
    try:
        entries = json.loads(path.read_text())["plans"]
        return {_numbers(Geometry, entry["geometry"]): _plan(entry["steps"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TilesError(f"{path} is no table of tiles: {error!r}") from error


def dump_table(plans: Mapping[Geometry, ExpertsPlan], **about: str) -> str:
    """The text of a table; `about` (the GPU, versions) stands at its head."""
    entries = [
        {"geometry": vars(geometry), "steps": [_step_entry(step) for step in plan.steps]}
        for geometry, plan in plans.items()
    ]
    lines = ",\n".join(
        '  {"geometry": ' + json.dumps(entry["geometry"]) + ', "steps": [\n   '
        + ",\n   ".join(json.dumps(step) for step in entry["steps"]) + "]}"
        for entry in entries
    )  # fmt: skip
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
    return "{\n" + head + ' "plans": [\n' + lines + "]\n}\n"


def _step_entry(step: Step) -> dict[str, Any]:
    form = "tiles" if isinstance(step, TileStep) else "strips"
    return {"tokens": step.tokens, "form": form, "gate_up": vars(step.gate_up), "down": vars(step.down)}


def _plan(entries: list[dict[str, Any]]) -> ExpertsPlan:
    steps = tuple(map(_step, entries))
    bounds = [step.tokens for step in steps]
    finite = [bound for bound in bounds[:-1] if bound is not None]
    if not bounds or bounds[-1] is not None or len(finite) < len(bounds) - 1 or finite != sorted(set(finite)):
        raise ValueError(f"token counts must rise and end with null: {bounds}")
    return ExpertsPlan(steps)


def _step(entry: dict[str, Any]) -> Step:
    entry = dict(entry)
    form, tokens = entry.pop("form"), entry.pop("tokens")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"tokens must be a positive number or null, got {tokens!r}")
    if form not in ("tiles", "strips") or set(entry) != {"gate_up", "down"}:
        raise ValueError(
            f'a step has "tokens", "form" ("tiles" or "strips"), "gate_up" and "down", got {entry}, {form!r}'
        )
    if form == "strips":
        return StripStep(tokens, _numbers(Strips, entry["gate_up"]), _numbers(Strips, entry["down"]))
    return TileStep(tokens, _numbers(Tiles, entry["gate_up"]), _numbers(Tiles, entry["down"]))


def _numbers(kind: type[_T], entry: dict[str, Any]) -> _T:
    """A dataclass of positive whole numbers (`dtype` aside); tile sides and warps are powers of two."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if set(entry) != names:
        raise ValueError(f"{kind.__name__} has the fields {sorted(names)}, got {sorted(entry)}")
    for name, value in entry.items():
        if name != "dtype" and (type(value) is not int or value < 1):
            raise ValueError(f"{kind.__name__}.{name} must be a positive number, got {value!r}")
        if name in ("rows", "columns", "depth", "warps") and value & (value - 1):
            raise ValueError(f"{kind.__name__}.{name} must be a power of two, got {value}")
    return kind(**entry)
