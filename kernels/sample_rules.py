"""What sampling is told about each row, and where it leaves what came of it: two flat arrays, a copy each way a step.

A `RULE` is the record of one row, 20 words of 32 bits; a `Rules` holds those of a step, with the biases behind them,
in one array. An `Outcome` is one array too, so that tokens, flags and log-probabilities reach the host together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RULE = np.dtype(
    [
        ("seed", "<i8"),
        ("position", "<i8"),
        ("inverse_temperature", "<f4"),  # 0: greedy
        ("top_k", "<i4"),  # 0 or less: off
        ("top_p", "<f4"),  # 1: off
        ("log_min_p", "<f4"),  # -inf: off
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("history", "<i4"),  # row of in_prompt and counts; -1: no penalties
        ("bias_first", "<i4"),  # its biases: entries bias_first to bias_last - 1
        ("bias_last", "<i4"),
        ("guide", "<i4"),  # row of `allowed`; -1: no grammar
        ("place", "<i4"),  # row of the workspace for adjusted logits; -1: neither history nor bias nor guide
        ("num_top", "<i4"),  # how many of the best to tell, with log-probabilities; -1: none
        ("unused", "<i4", 3),  # so that what follows the records lies on 16 bytes
    ]
)
PLAIN = np.array(
    (0, 0, 0.0, 0, 1.0, -np.inf, 1.0, 0.0, 0.0, -1, 0, 0, -1, -1, -1, (0, 0, 0)), dtype=RULE
)  # greedy and nothing else
BIAS = np.dtype([("token", "<i4"), ("value", "<f4")])
WORDS = RULE.itemsize // 4

MAX_TOP = 20
"""The most of the best tokens a row can be told of."""


@dataclass(frozen=True)
class Rules:
    """The rules of R rows."""

    records: Tensor  # int32 [R, WORDS]: RULEs
    bias: Tensor  # int32 [N, 2]: BIASes, those of a row side by side and sorted by token; -inf bans
    in_prompt: Tensor  # bool [H, V]
    counts: Tensor  # int32 [H, V]: times generated; the chosen token of a row with a history is counted
    num_places: int  # rows of the workspace
    cuts: bool  # whether any row has top-k, top-p or min-p
    num_top: int  # largest of any row

    @staticmethod
    def flat(records: npt.NDArray[np.void], bias: npt.NDArray[np.void]) -> Tensor:
        """Records and biases as the one int32 array to be copied to the device: see `split`."""
        return torch.from_numpy(np.concatenate((records.view(np.int32).ravel(), bias.view(np.int32).ravel())))

    @staticmethod
    def split(flat: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """`records` and `bias` of a flat array."""
        return flat[: rows * WORDS].view(rows, WORDS), flat[rows * WORDS :].view(-1, 2)


class Outcome:
    """What came of R rows: views of one array of 32-bit words. Log-probabilities only where `logprobs`.

    tokens       int64 [R]
    finite       int32 [R]             0: the logits were not numbers, and the token means nothing
    chosen       float32 [R]           log-probability of the token
    top_ids      int32 [R, MAX_TOP]    the best tokens, as many as the row wants; the rest is undefined
    top          float32 [R, MAX_TOP]  their log-probabilities
    """

    def __init__(self, words: Tensor, rows: int, logprobs: bool) -> None:
        self.words, self.rows, self.logprobs = words, rows, logprobs
        padded = _padded(rows)
        self.tokens = words[: 2 * rows].view(torch.int64)
        self.finite = words[2 * padded : 2 * padded + rows]
        if logprobs:
            tops = words[4 * padded :].view(2, padded, MAX_TOP)
            self.chosen = words[3 * padded : 3 * padded + rows].view(torch.float32)
            self.top_ids, self.top = tops[0, :rows], tops[1, :rows].view(torch.float32)

    @classmethod
    def empty(cls, rows: int, logprobs: bool, device: torch.device) -> Outcome:
        size = _padded(rows) * (4 + 2 * MAX_TOP if logprobs else 3)
        return cls(torch.empty(size, dtype=torch.int32, device=device), rows, logprobs)

    def to_pinned(self) -> Outcome:
        """A copy in pinned host memory, there once what was queued on the current stream so far is done."""
        host = torch.empty(self.words.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(self.words, non_blocking=True)
        return Outcome(host, self.rows, self.logprobs)


def _padded(rows: int) -> int:
    """So that every part begins on 16 bytes, whatever the number of rows."""
    return -(-rows // 4) * 4
