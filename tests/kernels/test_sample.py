"""The sampling kernels against their torch reference: interpreted on a CPU, compiled where there is a GPU."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sample import choose_reference, gumbel_noise
from kernels.sample_rules import BIAS, PLAIN, RULE, Outcome, Rules
from kernels.sample_triton import choose_triton

pytest.importorskip("triton", reason="Triton is not installed on this platform")
# What lies behind the end of a list of candidates is computed with, and then left out.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (multiply|exp):RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 2500  # two chunks, of which the second is not full
SEED_STEP = 0x12345678ABCDEF
OFF: dict[str, Any] = {}
EVERYTHING: dict[str, Any] = {
    "inverse_temperature": 1.4, "top_k": 300, "top_p": 0.9, "log_min_p": math.log(0.001), "repetition": 1.3,
    "presence": 0.4, "frequency": 0.2, "num_top": 5, "guide": 1,
    "bias": {3: 4.0, 2047: 2.0, 2048: -math.inf, 2499: 1.5},
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def make_rules(rows: list[dict[str, Any]], vocab_size: int) -> tuple[Rules, Tensor]:
    """Rules of rows given as fields of a RULE, with `bias` a dictionary and `guide` 1 for a random grammar."""
    records = np.full(len(rows), PLAIN, dtype=RULE)
    entries: list[tuple[int, float]] = []
    places = guides = 0
    for row, fields in enumerate(rows):
        record = records[row]
        record["seed"], record["position"] = row % 1000 * SEED_STEP - 5, row + 7
        for name, value in fields.items():
            if name not in ("bias", "guide"):
                record[name] = value
        if fields.keys() & {"repetition", "presence", "frequency"}:
            record["history"] = len(rows) - 1 - row
        record["bias_first"] = len(entries)
        entries += sorted(fields.get("bias", {}).items())
        record["bias_last"] = len(entries)
        if "guide" in fields:
            record["guide"], guides = guides, guides + 1
        if record["history"] >= 0 or "guide" in fields or fields.get("bias"):
            record["place"], places = places, places + 1
    flat = Rules.flat(records, np.array(entries, dtype=BIAS)).to(DEVICE)
    rules = Rules(
        *Rules.split(flat, len(rows)),
        in_prompt=torch.rand(len(rows), vocab_size) < 0.1,
        counts=(torch.rand(len(rows), vocab_size) * 1.2).int() * 2,
        num_places=places,
        cuts=any(fields.keys() & {"top_k", "top_p", "log_min_p"} for fields in rows),
        num_top=int(records["num_top"].max()),
    )
    return rules, torch.randint(-(2**31), 2**31 - 1, (max(guides, 1), -(-vocab_size // 32)), dtype=torch.int32)


def compare(logits: Tensor, rows: list[dict[str, Any]]) -> tuple[Outcome, Outcome]:
    """Both forms on the same rows: tokens, flags, counts and log-probabilities have to be the same."""
    before = logits.clone()
    rules, allowed = make_rules(rows, logits.shape[1])
    counts = rules.counts.clone()
    expected = choose_reference(logits, rules, allowed)
    expected_counts = rules.counts.clone()
    rules.counts.copy_(counts)
    out = choose_triton(logits, rules, allowed)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    assert torch.equal(out.finite, expected.finite)
    good = out.finite.bool()
    assert torch.equal(out.tokens[good], expected.tokens[good])
    assert ((out.tokens >= 0) & (out.tokens < logits.shape[1])).all()
    broken = torch.from_numpy(rules.records.cpu().numpy().view(RULE)["history"][:, 0].copy()).to(DEVICE)[~good]
    same = torch.ones(len(rows), dtype=torch.bool)
    same[broken[broken >= 0]] = False
    assert torch.equal(rules.counts[same], expected_counts[same])
    for row, fields in enumerate(rows):
        wanted = fields.get("num_top", -1)
        if wanted >= 0 and good[row]:
            torch.testing.assert_close(out.chosen[row], expected.chosen[row], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(out.top[row, :wanted], expected.top[row, :wanted], atol=1e-5, rtol=1e-5)
            assert torch.equal(out.top_ids[row, :wanted], expected.top_ids[row, :wanted])
    return out, expected


def test_greedy_alone_takes_the_lowest_of_equals() -> None:
    logits = torch.randn(5, VOCAB)
    logits[0, [2400, 1000, 30]] = 9.0
    logits[1] = 0.0
    logits[1, ::3] = -0.0
    logits[2, 700], logits[3] = math.nan, -math.inf
    logits[4, 2499] = 8.0
    out, expected = choose_triton(logits, None, None), choose_reference(logits, None, None)
    assert torch.equal(out.finite, expected.finite)
    assert out.finite.tolist() == [1, 1, 0, 0, 1]
    assert out.tokens[[0, 1, 4]].tolist() == expected.tokens[[0, 1, 4]].tolist() == [30, 0, 2499]
    assert choose_triton(logits[:0], None, None).tokens.tolist() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"inverse_temperature": 2.0},
        {"inverse_temperature": 1.0, "num_top": 0},
        {"num_top": 20},
        {"inverse_temperature": 0.7, "top_k": 1},
        {"inverse_temperature": 1.0, "top_k": 40},
        {"inverse_temperature": 1.0, "top_k": VOCAB - 1},
        {"inverse_temperature": 1.0, "top_k": 2**31 - 1},
        {"inverse_temperature": 1.0, "top_p": 0.5},
        {"inverse_temperature": 1.0, "top_p": 1e-30},
        {"inverse_temperature": 1.0, "top_p": 0.0},
        {"inverse_temperature": 1.0, "log_min_p": math.log(0.2)},
        {"inverse_temperature": 1.0, "log_min_p": 0.0},
        {"inverse_temperature": 1.0, "top_k": 20, "top_p": 0.4},
        {"repetition": 1.5},
        {"presence": 1.0, "inverse_temperature": 1.0},
        {"frequency": -0.5},
        {"bias": {2047: 20.0, 5: 3.0}},
        {"guide": 1, "inverse_temperature": 1.0},
        EVERYTHING,
    ],
    ids=lambda fields: " ".join(f"{name} {value}" for name, value in fields.items()) if len(fields) < 6 else "all",
)
def test_each_option_alone(fields: dict[str, Any]) -> None:
    compare(torch.randn(4, VOCAB) * 2, [fields] * 4)


def test_rows_that_want_different_things() -> None:
    rows = [OFF, EVERYTHING, {"inverse_temperature": 1.0}, {"inverse_temperature": 0.5, "top_p": 0.3}]
    rows += [{"guide": 1}, OFF, {"num_top": 3}, {"repetition": 2.0, "top_k": 7, "inverse_temperature": 3.0}]
    rows += [{"inverse_temperature": 1.0, "top_k": k} for k in (1, 2, 5, 2000)]
    compare(torch.randn(len(rows), VOCAB), rows)


@pytest.mark.parametrize("kept", [{"top_k": 3}, {"top_p": 0.2}, {"log_min_p": -1.0}, {"top_k": 9, "top_p": 0.5}])
def test_equals_stay_together(kept: dict[str, Any]) -> None:
    """Logits of few different values, as 16-bit ones are: the last token kept has hundreds of equals."""
    logits = torch.randn(6, VOCAB).mul(2).round().div(2)
    compare(logits, [{"inverse_temperature": 1.0, **kept}] * 6)


def test_forbidden_tokens_and_broken_rows() -> None:
    logits = torch.randn(6, VOCAB)
    logits[0, 1:] = -math.inf
    logits[1, :2000] = -math.inf
    logits[2, 17] = math.nan
    logits[3, 2300] = math.inf
    logits[4] = -math.inf
    drawn = {"inverse_temperature": 1.0, "top_k": 50, "top_p": 0.9}
    out, _ = compare(logits, [drawn, drawn, drawn | {"presence": 1.0}, drawn, drawn, {**drawn, "num_top": 2}])
    assert out.finite.tolist() == [1, 1, 0, 0, 0, 1]
    assert out.tokens[0] == 0
    only = {i: -math.inf for i in range(300) if i != 222}
    out, _ = compare(torch.randn(2, 300), [{"bias": only, **drawn}, {"bias": only}])
    assert out.tokens.tolist() == [222, 222]


def test_top_logprobs_may_be_minus_infinity() -> None:
    logits = torch.full((1, 6), -math.inf)
    logits[0, 3] = 0.0
    rules, _ = make_rules([{"num_top": 6}], 6)
    out = choose_triton(logits, rules, None)
    assert out.top_ids[0, :6].tolist() == [3, 0, 1, 2, 4, 5]
    assert out.top[0, :6].tolist() == [0.0] + [-math.inf] * 5


def test_a_whole_vocabulary_that_no_list_holds() -> None:
    """Flat rows, of which more is kept than fits the list of candidates, and peaked ones."""
    logits = torch.randn(4, 102_400)
    logits[1] *= 6
    drawn = {"inverse_temperature": 1.0}
    compare(logits, [drawn | {"top_k": 30_000}, drawn | {"top_p": 0.95}, drawn | {"top_k": 50}, drawn | {"top_p": 0.5}])


def test_noise_is_the_references() -> None:
    """Where all logits are equal the noise alone decides: hundreds of draws, each with the same token."""
    rows = [{"inverse_temperature": 1.0}] * 300
    logits = torch.zeros(300, 97)
    out, _ = compare(logits, rows)
    assert len(out.tokens.unique()) > 60
    seeds = torch.arange(300) * SEED_STEP - 5
    assert torch.equal(out.tokens, gumbel_noise(seeds, torch.arange(300) + 7, 97).argmax(-1))


def test_unfit_logits_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        choose_triton(torch.zeros(4, 8).t(), None, None)
