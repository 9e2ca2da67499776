"""The check of programmatic dependent launch finds what it is for; test_compile.py holds every kernel to it."""

import pytest

from tests.kernels.dependent_launch import check, waits_first

HEAD = """
    ld.param.b64 %rd4, [_k_param_0];
    griddepcontrol.launch_dependents ;
    ld.param.b64 %rd5, [_k_param_1];
    ld.param.b32 %r9, [_k_param_2];
    mov.u32 %r15, %tid.x;
    mul.wide.u32 %rd9, %r15, 2;
"""
WEIGHT = """
    add.s64 %rd1, %rd5, %rd9;
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
"""
WAIT = "griddepcontrol.wait ;"
ARGUMENTS = ["x", "weight", "width"]


def test_weights_may_be_read_before_the_wait() -> None:
    check(HEAD + WEIGHT + WAIT + "add.s64 %rd2, %rd4, %rd9; ld.global.b32 %r5, [%rd2];", ARGUMENTS)
    assert not waits_first(HEAD + WAIT) and waits_first(WAIT + HEAD)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("", "never waits"),
        ("add.s64 %rd2, %rd4, %rd9; ld.global.b32 %r5, [%rd2];" + WAIT, "reads x before"),
        (WEIGHT + "mul.wide.u32 %rd6, %r1, 2; add.s64 %rd7, %rd4, %rd6; ld.global.b16 %rs1, [%rd7];" + WAIT, "reads x"),
        ("st.global.b32 [%rd5], %r1;" + WAIT, "st.global stands before"),
        ("@%p1 bra $L__BB0_2;" + WAIT, "bra stands before"),
        ("ld.global.b32 %r5, [%rd77];" + WAIT, "cannot tell"),
    ],
)
def test_anything_else_may_not(body: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check(HEAD + body, ARGUMENTS)
