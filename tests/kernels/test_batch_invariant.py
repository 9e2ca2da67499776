"""The linear layer: right, and to the bit the same for a row in any batch."""

import pytest
import torch
import torch.nn.functional as F

from kernels.batch_invariant import linear, linear_triton, whole_vectors

SHAPES = [(256, 360), (704, 256), (96, 12), (256, 1024), (40, 96)]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_is_the_same_in_any_batch(inner: int, outer: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(150, inner), torch.randn(outer, inner)
    bias = torch.randn(outer) if with_bias else None
    whole = linear(x, weight, bias)
    torch.testing.assert_close(
        whole.double(),
        F.linear(x.double(), weight.double(), None if bias is None else bias.double()),
        atol=1e-3,
        rtol=1e-4,
    )
    for start, count in ((0, 1), (149, 1), (3, 2), (5, 3), (7, 5), (30, 16), (11, 33), (50, 100)):
        assert torch.equal(linear(x[start : start + count], weight, bias), whole[start : start + count])


def test_no_rows_and_more_dimensions() -> None:
    weight = torch.randn(8, 4)
    assert linear(torch.empty(0, 4), weight).shape == (0, 8)
    assert linear(torch.ones(2, 3, 4), weight).shape == (2, 3, 8)


@pytest.mark.parametrize("width", [12, 56, 64, 72])
def test_an_elementwise_function_is_the_same_in_any_batch(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(100, width)
    whole = whole_vectors(F.silu, x)
    torch.testing.assert_close(whole, F.silu(x))
    for start, count in ((0, 1), (13, 1), (1, 3), (50, 7), (4, 33)):
        assert torch.equal(whole_vectors(F.silu, x[start : start + count]), whole[start : start + count])


@pytest.mark.parametrize(("tokens", "inner", "outer"), [(1, 64, 64), (70, 96, 12), (3, 200, 130), (64, 64, 128)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_kernel_for_cuda(tokens: int, inner: int, outer: int, with_bias: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, inner, device=device), torch.randn(outer, inner, device=device)
    bias = torch.randn(outer, device=device) if with_bias else None
    out = linear_triton(x, weight, bias)
    torch.testing.assert_close(
        out,
        F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float(),
        atol=2e-5,
        rtol=2e-5,
    )
    if device == "cuda":  # the interpreter's products are numpy's, which promises nothing
        assert torch.equal(linear_triton(x[-1:], weight, bias), out[-1:])
