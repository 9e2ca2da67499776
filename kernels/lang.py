"""Triton where it is installed; elsewhere (macOS, Windows) stand-ins, so that files with kernels can be imported."""

from typing import Any

from torch import Tensor


class _Absent:
    """Anything of a Triton that is not there: a decorator that changes nothing, or a name never used."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, function: Any) -> Any:
        return function


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()

__all__ = ["tl", "triton", "use_triton"]


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on this tensor takes its Triton kernel rather than the torch reference."""
    return tensor.is_cuda and not isinstance(triton, _Absent)
