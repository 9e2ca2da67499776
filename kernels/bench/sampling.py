"""Cases of sampling. The error is the share of rows whose token is not the reference's."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from kernels.bench.measure import Case, Work, copies
from kernels.bench.setups import Setup
from kernels.sample import choose, choose_reference
from kernels.sample_rules import BIAS, PLAIN, RULE, Rules

KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"inverse_temperature": 1.0},
    "top-p 0.9": {"inverse_temperature": 1.0, "top_p": 0.9},
    "top-k 50": {"inverse_temperature": 1.0, "top_k": 50},
    "min-p 0.05": {"inverse_temperature": 1.0, "log_min_p": float(np.log(0.05))},
    "penalties": {"repetition": 1.2, "presence": 0.5, "frequency": 0.5},
    "5 log-probabilities": {"num_top": 5},
}
_MOST_WRONG = 0.02
"""Float32 sums in another order move a border now and then."""


def cases(setup: Setup) -> Iterator[Case]:
    for kind in KINDS:
        for rows in setup.sizes.sampled:
            yield Case("sample", f"{kind}, {rows} rows", partial(sample, setup, kind, rows), _MOST_WRONG)


def sample(setup: Setup, kind: str, rows: int) -> Work:
    vocab = setup.geometry.vocab
    buffers = [torch.randn(rows, vocab) * 3 for _ in range(copies(4 * rows * vocab))]
    rules = None if kind == "greedy" else rules_of(KINDS[kind], rows, vocab)
    calls = [partial(choose, logits, rules, None) for logits in buffers]

    def error() -> float:
        # Each counts the tokens of rows with a history, so each has its own count.
        chosen, expected = (
            function(buffers[0], None if kind == "greedy" else rules_of(KINDS[kind], rows, vocab), None)
            for function in (choose, choose_reference)
        )
        return float((chosen.tokens != expected.tokens).double().mean())

    return Work(calls, error, buffers[0].nbytes)


def rules_of(fields: dict[str, float], rows: int, vocab: int) -> Rules:
    """The same rules for every row, seeds apart."""
    records = np.full(rows, PLAIN, dtype=RULE)
    records["seed"], records["position"] = range(rows), range(rows)
    for field, value in fields.items():
        records[field] = value
    penalised = "repetition" in fields
    if penalised:
        records["history"] = records["place"] = range(rows)
    flat = Rules.flat(records, np.zeros(0, BIAS)).to(torch.empty(0).device)
    histories = rows if penalised else 0
    generator = torch.Generator(flat.device).manual_seed(1)
    counts = torch.randint(0, 2, (histories, vocab), dtype=torch.int32, generator=generator)
    cuts = bool({"top_p", "top_k", "log_min_p"} & set(fields))
    return Rules(
        *Rules.split(flat, rows), counts.bool(), counts, histories, cuts=cuts, num_top=int(fields.get("num_top", -1))
    )
