"""Triton where it is installed; elsewhere (macOS, Windows) stand-ins, so that files with kernels can be imported.

Programmatic dependent launch (Hopper and newer) starts a kernel while the one before it still runs, so that its launch
and its first loads cost no time. A kernel takes part with a compile-time argument `PDL`, launched as
`kernel[grid](..., **pdl(x))`, and two instructions:

    if PDL: tl.extra.cuda.gdc_launch_dependents()      at its start: the next kernel may be launched
    <loads of weights, which no kernel writes>
    if PDL: tl.extra.cuda.gdc_wait()                   the kernel before is complete, and its writes are seen
    <all other loads, and every store>

Every program must wait, even one with nothing to do: the next kernel waits for this one alone, and trusts that it has
waited for those before. Then nothing is read too early, nor written while an earlier kernel still reads it. Kernels
that know nothing of this (cuBLAS, torch) start after the one before them is complete, as ever.
"""

from functools import cache
from typing import Any

import torch
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

__all__ = ["has_triton", "is_hopper", "pdl", "tl", "triton", "use_triton"]


def has_triton() -> bool:
    """Whether Triton is installed."""
    return not isinstance(triton, _Absent)


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on this tensor takes its Triton kernel rather than the torch reference."""
    return tensor.is_cuda and has_triton()


def pdl(tensor: Tensor) -> dict[str, bool]:
    """Launch arguments of a kernel that takes part in programmatic dependent launch, on this tensor's device."""
    if tensor.is_cuda and is_hopper(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether this CUDA device is NVIDIA's Hopper or newer."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
