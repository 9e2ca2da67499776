"""Flash decoding's division of labour: the cached tokens of a batch of any lengths, dealt evenly to programs.

Every sequence's tokens form blocks of TOKENS; the blocks of all sequences, laid end to end, are dealt in runs of equal
length. A program's run may end one sequence and begin another; its part of one sequence is a piece, for which it keeps
the running maximum m (of scores in base 2), sum l and accumulator. The piece of program p in sequence s has number
p + s: from one piece to the next p or s grows, so that no two are alike and there are fewer than programs + batch.
A sequence that lies within one run is written out by its program; the others are combined by a second kernel:

    out = sum_i 2^(m_i - m) acc_i / sum_i 2^(m_i - m) l_i,   m = max_i m_i

The lengths are read on the device, so that a captured graph serves any lengths; programs without blocks end at once.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.lang import pdl, tl, triton

LOG2_E = 1.4426950408889634
"""exp(x) = 2^(LOG2_E x)"""
LENGTHS = 128
"""Sequences whose lengths a program looks at together."""
PIECES = 8
"""Pieces that are combined at a time."""
_CPU_PROGRAMS = 5
"""Programs where Triton is interpreted: few, so that most get some work and many sequences are cut."""


@dataclass(frozen=True)
class Pieces:
    """What the programs leave for the second kernel, all float32."""

    accumulators: Tensor
    """[programs + batch, heads, width]"""
    maxima: Tensor
    """[programs + batch, heads]"""
    sums: Tensor
    """[programs + batch, heads]"""


def empty_pieces(pieces: int, heads: int, width: int, device: torch.device) -> Pieces:
    return Pieces(
        torch.empty(pieces, heads, width, dtype=torch.float32, device=device),
        torch.empty(pieces, heads, dtype=torch.float32, device=device),
        torch.empty(pieces, heads, dtype=torch.float32, device=device),
    )


def num_programs(device: torch.device, blocks: int, resident: float) -> int:
    """Programs for at most `blocks` blocks in all, of which a multiprocessor holds `resident` at a time."""
    return max(1, min(blocks, int(resident * _multiprocessors(device))))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_PROGRAMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def combine_pieces(pieces: Pieces, context_lens: Tensor, out: Tensor, *, programs: int, tokens: int) -> None:
    """Fill the rows of `out` [B, heads, width] of sequences in several pieces, and with zeros those of none.

    tokens: in a block, as the first kernel had them.
    """
    batch, heads, width = out.shape
    # Few sequences have many pieces each: then narrow parts, so that many programs share the work.
    part = min(width, 128) if batch <= 16 else width
    _combine[(batch, heads, triton.cdiv(width, part))](
        pieces.accumulators,
        pieces.maxima,
        pieces.sums,
        context_lens,
        out,
        programs,
        batch,
        heads,
        width,
        TOKENS=tokens,
        PIECES=PIECES,
        PART=triton.next_power_of_2(part),
        LENS=LENGTHS,
        num_warps=4,
        **pdl(out),
    )


@triton.jit
def find_run(program, programs, context_lens, batch, TOKENS: tl.constexpr, LENS: tl.constexpr, WHOLE: tl.constexpr):
    """(first, last, sequence, before): the run of blocks of a program, its first sequence, the blocks before that.

    WHOLE: there is a program for each sequence, which takes all of it, so that no other sequence matters.
    """
    first = program * 0
    before = first
    if WHOLE:
        sequence = program
        last = tl.cdiv(tl.load(context_lens + program).to(tl.int32), TOKENS)
    else:
        index = tl.arange(0, LENS)
        total = first
        for start in range(0, batch, LENS):
            lengths = tl.load(context_lens + start + index, mask=start + index < batch, other=0).to(tl.int32)
            total += tl.sum((lengths + (TOKENS - 1)) // TOKENS, 0)
        share = tl.maximum(tl.cdiv(total, programs), 1)
        first = program * share
        last = tl.minimum(first + share, total)
        seen = total * 0
        sequence = total * 0
        for start in range(0, batch, LENS):
            lengths = tl.load(context_lens + start + index, mask=start + index < batch, other=0).to(tl.int32)
            blocks = (lengths + (TOKENS - 1)) // TOKENS
            passed = (seen + tl.cumsum(blocks, 0) <= first) & (start + index < batch)
            sequence += tl.sum(passed.to(tl.int32), 0)
            before += tl.sum(tl.where(passed, blocks, 0), 0)
            seen += tl.sum(blocks, 0)
    return first, last, sequence, before


@triton.jit
def _combine(
    accumulators,
    maxima,
    sums,
    context_lens,
    out,
    programs,
    batch,
    heads,
    width,
    TOKENS: tl.constexpr,
    PIECES: tl.constexpr,
    PART: tl.constexpr,
    LENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head, or part of its channels, of one sequence."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    channel = tl.program_id(2) * PART + tl.arange(0, PART)
    index = tl.arange(0, LENS)
    total = tl.sum(tl.zeros((LENS,), tl.int32), 0)
    before = total * 0
    for start in range(0, batch, LENS):
        lengths = tl.load(context_lens + start + index, mask=start + index < batch, other=0).to(tl.int32)
        blocks = (lengths + (TOKENS - 1)) // TOKENS
        total += tl.sum(blocks, 0)
        before += tl.sum(tl.where(start + index < sequence, blocks, 0), 0)
    share = tl.maximum(tl.cdiv(total, programs), 1)
    mine = tl.cdiv(tl.load(context_lens + sequence).to(tl.int32), TOKENS)
    target = out + (sequence * heads + head).to(tl.int64) * width + channel
    if mine == 0:
        tl.store(target, tl.zeros((PART,), out.dtype.element_ty), mask=channel < width)
    first_program = before // share
    last_program = (before + mine - 1) // share
    if (mine > 0) & (last_program > first_program):
        maximum = float("-inf")
        denominator = 0.0
        result = tl.zeros((PART,), tl.float32)
        for program in range(first_program, last_program + 1, PIECES):
            each = program + tl.arange(0, PIECES)
            present = each <= last_program
            cell = (each + sequence).to(tl.int64) * heads + head
            m = tl.load(maxima + cell, mask=present, other=float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(m, 0))
            weights = tl.exp2(m - new_maximum)
            shrink = tl.exp2(maximum - new_maximum)
            denominator = denominator * shrink + tl.sum(weights * tl.load(sums + cell, mask=present, other=0.0), 0)
            parts = tl.load(
                accumulators + cell[:, None] * width + channel[None, :],
                mask=present[:, None] & (channel < width)[None, :],
                other=0.0,
            )
            result = result * shrink + tl.sum(parts * weights[:, None], 0)
            maximum = new_maximum
        tl.store(target, (result / denominator).to(out.dtype.element_ty), mask=channel < width)
