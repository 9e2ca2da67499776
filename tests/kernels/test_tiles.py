"""Tables of tiles: what is shipped can be read, what cannot be used is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.tiles import (
    FOLDER,
    ExpertsGeometry,
    LatentGeometry,
    StripStep,
    Table,
    TilesError,
    TileStep,
    decode_plan_for,
    default_decode_plan,
    default_plan,
    dump_table,
    load_table,
    plan_for,
    table_path,
)

TABLE = Table(
    experts={ExpertsGeometry(experts=66, hidden=2048, inner=1408, dtype="bfloat16"): default_plan(torch.bfloat16)},
    mla_decode={
        LatentGeometry(heads, rank=512, rope=64, dtype="bfloat16"): default_decode_plan(heads, torch.bfloat16)
        for heads in (16, 32)
    },
)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_serve_any_number_of_tokens(path: Path) -> None:
    table = load_table(path)
    assert table.experts
    assert table.mla_decode
    for tokens in (1, 2, 16, 300, 1 << 20):
        for plan in table.experts.values():
            assert plan.step(tokens) in plan.steps
        for decode_plan in table.mla_decode.values():
            assert decode_plan.form(tokens) in [step.form for step in decode_plan.steps]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_default_plan_serves_any_number_of_tokens(dtype: torch.dtype) -> None:
    plan = default_plan(dtype)
    assert isinstance(plan.step(1), StripStep)
    assert isinstance(plan.step(1 << 20), TileStep)


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = table_path("Some GPU 80GB/PCIe", tmp_path)
    assert path.name == "Some_GPU_80GB_PCIe.json"
    path.write_text(dump_table(TABLE, gpu="Some GPU 80GB/PCIe"))
    assert load_table(path) == TABLE


def test_the_bounds_of_a_step_include_its_own() -> None:
    plan = default_plan(torch.bfloat16)
    first, second = plan.steps[:2]
    assert first.tokens is not None
    assert plan.step(first.tokens) == first
    assert plan.step(first.tokens + 1) == second
    few, many = default_decode_plan(16, torch.bfloat16).steps
    assert few.sequences is not None
    decode_plan = default_decode_plan(16, torch.bfloat16)
    assert decode_plan.form(few.sequences) == few.form
    assert decode_plan.form(few.sequences + 1) == many.form


def test_a_cpu_has_the_default_plans() -> None:
    assert plan_for(torch.zeros(3, 8, 4)) is default_plan(torch.float32)
    assert decode_plan_for(torch.zeros(5, 16, 64), 16) is default_decode_plan(16, torch.float32)


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.pop("experts"), "experts"),
        (lambda table: table["experts"][0]["geometry"].pop("inner"), "inner"),
        (lambda table: table["experts"][0]["steps"].pop(), "end with null"),
        (lambda table: table["experts"][0]["steps"].reverse(), "end with null"),
        (lambda table: table["experts"][0]["steps"][0].update(form="tape"), "tape"),
        (lambda table: table["experts"][0]["steps"][0].update(tokens=0), "tokens"),
        (lambda table: table["experts"][0]["steps"][0].update(rows=1), "rows"),
        (lambda table: table["experts"][0]["steps"][1]["down"].update(rows=48), "Tiles.rows must be a power of two"),
        (lambda table: table["experts"][0]["steps"][1]["down"].update(stages="3"), "Tiles.stages"),
        (lambda table: table["experts"][0]["steps"][1]["down"].update(colums=16), "colums"),
        (lambda table: table["experts"][0]["steps"][1]["down"].update(ahead=1), "Tiles.ahead"),
        (lambda table: table.pop("mla_decode"), "mla_decode"),
        (lambda table: table["mla_decode"][0]["geometry"].pop("rope"), "rope"),
        (lambda table: table["mla_decode"][0]["steps"].pop(), "end with null"),
        (lambda table: table["mla_decode"][0]["steps"][0].update(sequences=True), "sequences"),
        (lambda table: table["mla_decode"][0]["steps"][0].pop("form"), "form"),
        (lambda table: table["mla_decode"][0]["steps"][0]["form"].update(tokens=48), "DecodeForm.tokens"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "GPU.json"
    table = json.loads(dump_table(TABLE))
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
