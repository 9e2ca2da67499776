"""How the experts' and the latent attention's kernels are cut for a GPU.

A plan is a list of steps: which form and which tile shapes for how many tokens, or sequences. It comes from
`configs/tiles/<name of the GPU>.json`, made by `python -m kernels.tune`, where that file has the geometry; elsewhere
from `default_plan` and `default_decode_plan`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
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
    ahead: bool = False
    """Whether a program fetches the first blocks of its next tile while it ends one, for some registers more."""


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
class DecodeForm:
    """How latent attention is compiled and launched; see kernels/mla_decode.py."""

    tokens: int
    """Tokens that a program looks at together; a page is a multiple of them."""
    heads: int
    """Heads of a program."""
    warps: int
    stages: int
    """Of the loop over blocks of tokens, where from 4 on every second one more is one more block on its way."""
    programs: int
    """For each multiprocessor; they share all sequences' blocks out evenly."""


@dataclass(frozen=True)
class DecodeStep:
    sequences: int | None
    """Up to this many sequences; None: any number."""
    form: DecodeForm


@dataclass(frozen=True)
class DecodePlan:
    """Steps by rising number of sequences; the last serves any number."""

    steps: tuple[DecodeStep, ...]

    def form(self, sequences: int) -> DecodeForm:
        return next(step.form for step in self.steps if step.sequences is None or sequences <= step.sequences)


@dataclass(frozen=True)
class ExpertsGeometry:
    """What a plan of experts was made for: `experts` counts the shared ones too."""

    experts: int
    hidden: int
    inner: int
    dtype: str

    @staticmethod
    def of(gate_up: Tensor) -> "ExpertsGeometry":
        """Of weights [experts, 2 * inner, hidden]."""
        experts, doubled, hidden = gate_up.shape
        return ExpertsGeometry(experts, hidden, doubled // 2, str(gate_up.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class LatentGeometry:
    """What a plan of latent attention was made for."""

    heads: int
    rank: int
    rope: int
    dtype: str


@dataclass(frozen=True)
class Table:
    """A GPU's plans."""

    experts: dict[ExpertsGeometry, ExpertsPlan] = field(default_factory=dict)
    mla_decode: dict[LatentGeometry, DecodePlan] = field(default_factory=dict)


def plan_for(gate_up: Tensor) -> ExpertsPlan:
    """The plan for experts with these weights [experts, 2 * inner, hidden] on their device.

    Raises TilesError when the GPU's table cannot be used.
    """
    return table_of(gate_up.device).experts.get(ExpertsGeometry.of(gate_up)) or default_plan(gate_up.dtype)


def decode_plan_for(query_latent: Tensor, rope: int) -> DecodePlan:
    """The plan for latent attention of queries [B, heads, rank] with a rotated part of `rope`, on their device.

    Raises TilesError when the GPU's table cannot be used.
    """
    (_, heads, rank), dtype = query_latent.shape, query_latent.dtype
    geometry = LatentGeometry(heads, rank, rope, str(dtype).removeprefix("torch."))
    return table_of(query_latent.device).mla_decode.get(geometry) or default_decode_plan(heads, dtype)


@cache
def table_of(device: torch.device) -> Table:
    """What is known of a device; an empty table where that is nothing. Raises TilesError."""
    path = table_path(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return load_table(path) if path is not None and path.exists() else Table()


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
def default_decode_plan(heads: int, dtype: torch.dtype) -> DecodePlan:
    """A plan for any GPU: small blocks, so many programs, for few sequences; then what keeps most on its way."""
    if dtype.itemsize > 2:
        return DecodePlan((DecodeStep(None, DecodeForm(16, 16, 4, 1, 2)),))
    if heads > 16:
        return DecodePlan((DecodeStep(None, DecodeForm(32, 32, 8, 6, 1)),))
    return DecodePlan((DecodeStep(8, DecodeForm(16, 16, 4, 6, 2)), DecodeStep(None, DecodeForm(32, 16, 4, 6, 2))))


_POWERS_OF_TWO = {
    Tiles: ("rows", "columns", "depth", "warps"),
    Strips: ("columns", "warps"),
    DecodeForm: ("tokens", "heads", "warps"),
}


def load_table(path: Path) -> Table:
    """A GPU's plans. Raises TilesError, which names the file and what is wrong in it."""
    try:
        table = json.loads(path.read_text())
        return Table(
            {_numbers(ExpertsGeometry, entry["geometry"]): _plan(entry["steps"]) for entry in table["experts"]},
            {
                _numbers(LatentGeometry, entry["geometry"]): _decode_plan(entry["steps"])
                for entry in table["mla_decode"]
            },
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TilesError(f"{path} is no table of tiles: {error!r}") from error


def dump_table(table: Table, **about: str) -> str:
    """The text of a table; `about` (the GPU, versions) stands at its head."""
    experts = [
        {"geometry": vars(geometry), "steps": [_step_entry(step) for step in plan.steps]}
        for geometry, plan in table.experts.items()
    ]
    mla_decode = [
        {
            "geometry": vars(geometry),
            "steps": [{"sequences": step.sequences, "form": vars(step.form)} for step in plan.steps],
        }
        for geometry, plan in table.mla_decode.items()
    ]
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
    parts += [f' "experts": [\n{_lines(experts)}]', f' "mla_decode": [\n{_lines(mla_decode)}]']
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(entries: Sequence[dict[str, Any]]) -> str:
    """A line for each step."""
    return ",\n".join(
        '  {"geometry": ' + json.dumps(entry["geometry"]) + ', "steps": [\n   '
        + ",\n   ".join(json.dumps(step) for step in entry["steps"]) + "]}"
        for entry in entries
    )  # fmt: skip


def _step_entry(step: Step) -> dict[str, Any]:
    form = "tiles" if isinstance(step, TileStep) else "strips"
    return {"tokens": step.tokens, "form": form, "gate_up": vars(step.gate_up), "down": vars(step.down)}


def _plan(entries: list[dict[str, Any]]) -> ExpertsPlan:
    steps = tuple(map(_step, entries))
    _check_bounds([step.tokens for step in steps])
    return ExpertsPlan(steps)


def _decode_plan(entries: list[dict[str, Any]]) -> DecodePlan:
    steps = []
    for entry in entries:
        if set(entry) != {"sequences", "form"}:
            raise ValueError(f'a step of mla_decode has "sequences" and "form", got {entry}')
        _check_bound("sequences", entry["sequences"])
        steps.append(DecodeStep(entry["sequences"], _numbers(DecodeForm, entry["form"])))
    _check_bounds([step.sequences for step in steps])
    return DecodePlan(tuple(steps))


def _check_bounds(bounds: list[int | None]) -> None:
    finite = [bound for bound in bounds[:-1] if bound is not None]
    if not bounds or bounds[-1] is not None or len(finite) < len(bounds) - 1 or finite != sorted(set(finite)):
        raise ValueError(f"the steps' numbers must rise and end with null: {bounds}")


def _check_bound(name: str, bound: Any) -> None:
    if bound is not None and (type(bound) is not int or bound < 1):
        raise ValueError(f"{name} must be a positive number or null, got {bound!r}")


def _step(entry: dict[str, Any]) -> Step:
    entry = dict(entry)
    form, tokens = entry.pop("form"), entry.pop("tokens")
    _check_bound("tokens", tokens)
    if form not in ("tiles", "strips") or set(entry) != {"gate_up", "down"}:
        raise ValueError(
            f'a step has "tokens", "form" ("tiles" or "strips"), "gate_up" and "down", got {entry}, {form!r}'
        )
    if form == "strips":
        return StripStep(tokens, _numbers(Strips, entry["gate_up"]), _numbers(Strips, entry["down"]))
    return TileStep(tokens, _numbers(Tiles, entry["gate_up"]), _numbers(Tiles, entry["down"]))


def _numbers(kind: type[_T], entry: dict[str, Any]) -> _T:
    """A dataclass of positive whole numbers (but `dtype` and `ahead`), sides of blocks and warps powers of two."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    if set(entry) != names:
        raise ValueError(f"{kind.__name__} has the fields {sorted(names)}, got {sorted(entry)}")
    for name, value in entry.items():
        if name == "ahead" and type(value) is not bool:
            raise ValueError(f"{kind.__name__}.ahead must be true or false, got {value!r}")
        if name not in ("ahead", "dtype") and (type(value) is not int or value < 1):
            raise ValueError(f"{kind.__name__}.{name} must be a positive number, got {value!r}")
        if name in _POWERS_OF_TWO.get(kind, ()) and value & (value - 1):
            raise ValueError(f"{kind.__name__}.{name} must be a power of two, got {value}")
    return kind(**entry)
