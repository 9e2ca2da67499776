"""Weights on their way into the L2 cache while the kernels before leave the memory idle.

A decode step of few sequences waits for latencies, not for the memory, until it comes to the experts; then it waits
for the memory alone. What is known to be read there (the shared experts, the output projection) is asked for when the
layer begins, by a kernel beside the others, on a stream of its own: in a CUDA graph a branch of its own. It reads
nothing itself and changes nothing but when bytes move.
Cost: as many bytes as the weights have, once, which the kernels after it then find in the cache.

Bulk prefetches (`cp.async.bulk.prefetch.L2`, PTX ISA 8.0) are there on Hopper and newer; elsewhere nothing is done.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.expect import FLOATS, expect
from kernels.lang import has_triton, is_hopper, tl, triton

_PIECE = 4096
"""Bytes of one bulk prefetch."""
_PIECES = 32
"""Of a program, one for each of a warp's threads."""
_ALIGNMENT = 16


class Prefetcher:
    """Prefetches beside the current stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, weights: Iterable[Tensor]) -> None:
        """Once all that the current stream has to do so far is done; what it is given next runs at the same time."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for weight in weights:
                prefetch(weight)

    def join(self) -> None:
        """The current stream waits for what was started: a graph's branches have to end before its capture does."""
        torch.cuda.current_stream().wait_stream(self._stream)


def prefetcher_for(device: torch.device) -> Prefetcher | None:
    """None for a device that cannot prefetch."""
    if device.type == "cuda" and has_triton() and is_hopper(device):
        return Prefetcher(device)
    return None


def prefetch(weight: Tensor) -> None:
    """Ask for a contiguous array, but for bytes at its ends that are no whole 16. Raises ValueError for others."""
    expect("weight", weight, weight.shape, *FLOATS)
    skipped = -weight.data_ptr() % _ALIGNMENT
    nbytes = (weight.nbytes - skipped) // _ALIGNMENT * _ALIGNMENT
    programs = triton.cdiv(weight.nbytes, _PIECE * _PIECES)
    _prefetch[(programs,)](weight, skipped, nbytes, PIECE=_PIECE, PIECES=_PIECES, num_warps=1)


@triton.jit
def _prefetch(weight, skipped, nbytes, PIECE: tl.constexpr, PIECES: tl.constexpr):
    start = (tl.program_id(0).to(tl.int64) * PIECES + tl.arange(0, PIECES)) * PIECE
    size = tl.maximum(tl.minimum(nbytes - start, PIECE), 0).to(tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.gt.s32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [weight.to(tl.int64) + skipped + start, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
