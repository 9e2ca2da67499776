"""Tables of tiles: what is shipped can be read, what cannot be used is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.tiles import (
    FOLDER,
    Geometry,
    StripStep,
    TilesError,
    TileStep,
    default_plan,
    dump_table,
    load_table,
    plan_for,
    table_path,
)

GEOMETRY = Geometry(experts=66, hidden=2048, inner=1408, dtype="bfloat16")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_serve_any_number_of_tokens(path: Path) -> None:
    plans = load_table(path)
    assert plans
    for plan in plans.values():
        for tokens in (1, 2, 16, 300, 1 << 20):
            assert plan.step(tokens) in plan.steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_default_plan_serves_any_number_of_tokens(dtype: torch.dtype) -> None:
    plan = default_plan(dtype)
    assert isinstance(plan.step(1), StripStep)
    assert isinstance(plan.step(1 << 20), TileStep)


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = table_path("Some GPU 80GB/PCIe", tmp_path)
    assert path.name == "Some_GPU_80GB_PCIe.json"
    plans = {GEOMETRY: default_plan(torch.bfloat16)}
    path.write_text(dump_table(plans, gpu="Some GPU 80GB/PCIe"))
    assert load_table(path) == plans


def test_the_bounds_of_a_step_include_its_own() -> None:
    plan = default_plan(torch.bfloat16)
    first, second = plan.steps[:2]
    assert first.tokens is not None
    assert plan.step(first.tokens) == first
    assert plan.step(first.tokens + 1) == second


def test_weights_on_a_cpu_have_the_default_plan() -> None:
    assert plan_for(torch.zeros(3, 8, 4)) is default_plan(torch.float32)


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.pop("plans"), "plans"),
        (lambda table: table["plans"][0]["geometry"].pop("inner"), "inner"),
        (lambda table: table["plans"][0]["steps"].pop(), "end with null"),
        (lambda table: table["plans"][0]["steps"].reverse(), "end with null"),
        (lambda table: table["plans"][0]["steps"][0].update(form="tape"), "tape"),
        (lambda table: table["plans"][0]["steps"][0].update(tokens=0), "tokens"),
        (lambda table: table["plans"][0]["steps"][0].update(rows=1), "rows"),
        (lambda table: table["plans"][0]["steps"][1]["down"].update(rows=48), "Tiles.rows must be a power of two"),
        (lambda table: table["plans"][0]["steps"][1]["down"].update(stages="3"), "Tiles.stages"),
        (lambda table: table["plans"][0]["steps"][1]["down"].update(colums=16), "colums"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "GPU.json"
    table = json.loads(dump_table({GEOMETRY: default_plan(torch.bfloat16)}))
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(TilesError, match=message) as error:
        load_table(path)
    assert str(path) in str(error.value)


def test_what_is_no_json_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "GPU.json"
    path.write_text("{")
    with pytest.raises(TilesError, match="GPU"):
        load_table(path)
