"""The bench's cases, small and on the CPU: its references and shapes are right, and no failure hides another."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.bench.__main__ import Row, chosen, heading, line, measure
from kernels.bench.measure import Case, Ceilings, Work, ceilings
from kernels.bench.setups import SHORT, TINY, Geometry, Setup, Tower

LATENT = Geometry(48, 3, 32, 16, 64, 32, 40, 8, 2, 3, 24, True, 600)
SETUP = Setup(
    geometry=LATENT,
    heads=replace(TINY, heads=3, value=32, hidden=48),
    tower=Tower(width=48, heads=4, inner=56, side=5, patch=14, pixels=70),
    sizes=replace(SHORT, routed=(1, 5)),
    dtype=torch.float32,
)


def test_every_case_agrees_with_its_reference() -> None:
    rows = list(measure(chosen(SETUP, [""]), None))
    assert [row for row in rows if row.failure] == []
    kernels = {row.kernel for row in rows}
    wanted = ("mla_decode", "mha_decode", "mla prefill, torch", "mha prefill, torch", "experts", "sample", "layer_norm")
    assert kernels.issuperset(wanted) and len(kernels) == 25
    without_mla = {case.kernel for case in chosen(replace(SETUP, geometry=replace(LATENT, rank=0, rope=0)), [""])}
    assert kernels - without_mla == {"mla_decode", "absorb key", "absorb value", "write_latents", "mla prefill, torch"}


def test_a_failure_is_told_and_the_others_go_on() -> None:
    def wrong() -> Work:
        return Work([], lambda: 0.5, 0)

    def broken() -> Work:
        raise RuntimeError("no such tile\nat some place")

    def lost() -> Work:
        raise torch.AcceleratorError("gone")

    def right() -> Work:
        return Work([], lambda: 0.0, 0)

    cases = [Case("k", name, prepare, 0.1) for name, prepare in locals().items()]
    wrong_row, broken_row, lost_row, rest = measure(cases, None)
    assert wrong_row.failure == "an error of 5.0e-01, at most 1e-01 expected"
    assert broken_row.failure == "RuntimeError: no such tile"
    assert lost_row.failure == "AcceleratorError: gone"
    assert rest.failure == "not run: the device is lost"
    assert "FAILED: RuntimeError" in line(broken_row)


def test_names_choose_kernels() -> None:
    assert {case.kernel for case in chosen(SETUP, ["router", "absorb"])} == {"router", "absorb key", "absorb value"}


def test_a_floor_is_the_larger_of_two_times() -> None:
    limits = Ceilings(bandwidth=1e12, rate=5e14)
    assert limits.floor(2e9, 5e11) == (2e-3, "bytes")
    assert limits.floor(1e6, 5e11) == (1e-3, "operations")
    row = Row(
        "router", "1 token", None, 1e-3, time=4000.0, floor=2000.0, bound="bytes", of_floor=0.5, moved=2, operations=0
    )
    assert "0.50  bytes" in line(row) and len(heading(limits)) <= len(line(row))


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_cpu_has_ceilings_too() -> None:
    limits = ceilings(torch.float32)
    assert 1e8 < limits.bandwidth < 1e13 and 1e8 < limits.rate < 1e15
