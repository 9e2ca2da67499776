"""The sampling mathematics against the recorded probabilities, and what the sampler promises about it."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.sample import gumbel_noise, mask_tokens, penalize, sample_tokens, truncate
from server.engine.request import Request, SamplingParams
from server.engine.sampler import MIN_LOGPROB, Sampled, Sampler
from tests.goldens_data import GOLDENS

CPU = torch.device("cpu")
EOS = 1
VOCAB = 64
CASES = json.loads((GOLDENS / "units" / "units.json").read_text())["sampling"]


def make_request(
    name: str = "r", prompt: Sequence[int] = (5, 6), generated: Sequence[int] = (), seed: int = 0, **params: Any
) -> Request:
    request = Request(name, list(prompt), SamplingParams(**{"max_tokens": 100, **params}), seed=seed)
    request.token_ids += generated
    return request


def make_sampler(rows: int = 16) -> Sampler:
    return Sampler(rows, VOCAB, EOS, CPU)


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample(sampler: Sampler, logits: Tensor, *requests: Request) -> Sampled:
    return sampler.sample(logits, sampler.prepare(list(requests)))


def choose(logits: Tensor, *requests: Request) -> list[int]:
    return [int(token) for token in sample(make_sampler(), logits, *requests).token_ids]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_probabilities_are_the_references(number: int) -> None:
    tensors, case = load_file(GOLDENS / "units" / "units.safetensors"), CASES[number]
    logits, prior = tensors["sampling/logits"], tensors["sampling/prior_ids"][0]
    in_prompt = torch.zeros(1, VOCAB, dtype=torch.bool)
    in_prompt[0, prior] = True
    off = torch.zeros(1)
    logits = penalize(
        logits, in_prompt, torch.zeros(1, VOCAB, dtype=torch.int32), off + case["repetition_penalty"], off, off
    )
    logits = truncate(logits / case["temperature"], torch.tensor([case["top_k"]]), off + case["top_p"], off.log())
    probs = logits.softmax(-1)
    torch.testing.assert_close(probs, tensors[f"sampling/probs_{number}"], atol=1e-6, rtol=1e-5)
    assert int((probs > 0).sum()) == case["kept"]


def test_greedy_takes_the_first_of_equals_whatever_the_filters_say() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [9, 7, 30]] = 4.0
    requests = [
        make_request("a", temperature=0.0),
        make_request("b", temperature=0.0, top_p=0.01, top_k=0, min_p=1.0),
        make_request("c", temperature=0.0, top_k=-1, seed=123),
    ]
    assert choose(logits, *requests) == [7, 7, 7]


def test_top_k_0_and_minus_1_are_off() -> None:
    logits = random_logits(1).expand(3, -1)
    a, b, c = (make_request(name, seed=3, top_k=k) for name, k in (("a", 0), ("b", -1), ("c", VOCAB)))
    first, second, third = choose(logits, a, b, c)
    assert first == second == third


def test_seeded_tokens_do_not_depend_on_the_batch() -> None:
    logits = random_logits(16)
    requests = [
        make_request(str(i), seed=i % 3, temperature=0.5 + i / 8, top_p=(1.0, 0.8)[i % 2], top_k=(0, 20, 5)[i % 3])
        for i in range(16)
    ]
    together = choose(logits, *requests)
    assert [choose(logits[i : i + 1], requests[i])[0] for i in range(16)] == together
    assert choose(logits.flip(0), *reversed(requests)) == together[::-1]


def test_the_noise_is_fixed_for_ever() -> None:
    """Numbers worked out with Python's own integers: another device or version has to give the same tokens."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seeds, positions = [0, 7, -3, (1 << 63) - 1], [0, 1, 4095, 12]
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor(positions), VOCAB)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        stream = mix((mix(seed & mask) + position) & mask)
        for i in range(VOCAB):
            bits = mix((stream + (i + 1) * 0x9E3779B97F4A7C15) & mask)
            uniform = ((bits >> 11) + 1) / 2**53
            assert noise[row, i].item() == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-4, abs=1e-4)


def test_draws_follow_the_distribution() -> None:
    draws = 20_000
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -math.inf]])
    seeds = torch.full((draws,), 11)
    tokens = sample_tokens(logits.expand(draws, -1), seeds, torch.arange(draws))
    seen = torch.bincount(tokens, minlength=6) / draws
    # Five standard deviations of a share near one half are 0.018.
    torch.testing.assert_close(seen, logits.softmax(-1)[0], atol=0.018, rtol=0)
    assert seen[5] == 0


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(64, VOCAB)
    by_position = sample_tokens(logits, torch.zeros(64, dtype=torch.int64), torch.arange(64))
    by_seed = sample_tokens(logits, torch.arange(64), torch.zeros(64, dtype=torch.int64))
    assert len(set(by_position.tolist())) > 30
    assert len(set(by_seed.tolist())) > 30
    assert by_position.tolist() != by_seed.tolist()


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    logits = random_logits(1)
    assert choose(logits, make_request(seed=seed)) == choose(logits, make_request(seed=seed % 2**64))


def test_repetition_covers_the_prompt_presence_and_frequency_only_what_was_generated() -> None:
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, [5, 20, 30]] = torch.tensor([3.0, 2.0, 1.0])  # 5 is in the prompt
    assert choose(logits, make_request(temperature=0.0)) == [5]
    assert choose(logits, make_request(temperature=0.0, repetition_penalty=2.0)) == [20]
    assert choose(logits, make_request(temperature=0.0, repetition_penalty=2.0, generated=[20])) == [5]
    assert choose(logits, make_request(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)) == [5]
    assert choose(logits, make_request(temperature=0.0, presence_penalty=1.5, generated=[5])) == [20]
    assert choose(logits, make_request(temperature=0.0, presence_penalty=0.9, generated=[5] * 4)) == [5]
    assert choose(logits, make_request(temperature=0.0, frequency_penalty=0.3, generated=[5] * 4)) == [20]
    assert choose(logits, make_request(temperature=0.0, presence_penalty=-1.5, generated=[20])) == [20]


def test_negative_logits_are_multiplied_by_the_repetition_penalty() -> None:
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, [5, 20]] = torch.tensor([-1.0, -1.5])
    assert choose(logits, make_request(temperature=0.0, repetition_penalty=2.0)) == [20]


def test_counts_follow_the_tokens_and_can_be_made_anew() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.9, 2.8])
    sampler, request = make_sampler(rows=1), make_request(temperature=0.0, frequency_penalty=0.25)
    for forget in (False, True):
        tokens = []
        request.token_ids = request.token_ids[:2]
        sampler.forget(request.request_id)
        for _ in range(9):
            token = int(sample(sampler, logits, request).token_ids[0])
            request.token_ids.append(token)
            tokens.append(token)
            if forget:
                sampler.forget(request.request_id)
        assert tokens == [7, 8, 9] * 3


def test_a_token_need_not_be_known_to_the_host_to_be_counted() -> None:
    """The next step may be prepared and run while -1 stands for the token that is on its way."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.9, 2.8])
    sampler, request = make_sampler(rows=1), make_request(temperature=0.0, frequency_penalty=0.25)
    tokens = []
    for _ in range(9):
        sampled = sample(sampler, logits, request)
        request.token_ids.append(-1)
        tokens.append(sampled)
    assert [int(sampled.token_ids[0]) for sampled in tokens] == [7, 8, 9] * 3


def test_a_step_that_failed_is_run_again_with_the_same_counts() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 8]] = torch.tensor([3.0, 2.9])
    sampler, request = make_sampler(rows=1), make_request(temperature=0.0, frequency_penalty=0.25)
    assert [int(sample(sampler, logits, request).token_ids[0]) for _ in range(3)] == [7, 7, 7]
    sampler.prepare([request])
    request.token_ids.append(7)
    assert [int(sample(sampler, logits, request).token_ids[0]) for _ in range(3)] == [8, 8, 8]


def test_a_step_of_plain_greedy_rows_needs_no_rules() -> None:
    sampler, plain = make_sampler(), make_request("a", temperature=0.0, top_p=0.5, top_k=3)
    assert sampler.prepare([plain, plain]).rules is None
    special: list[dict[str, Any]] = [{"logprobs": 0}, {"min_tokens": 1}, {"logit_bias": {3: 1.0}}]
    special += [{"repetition_penalty": 1.1}, {"temperature": 1.0}]
    for params in special:
        assert sampler.prepare([plain, make_request("b", **{"temperature": 0.0, **params})]).rules is not None


def test_neighbours_keep_their_own_penalties() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [7, 8]] = torch.tensor([3.0, 2.0])
    requests = [
        make_request("a", temperature=0.0, generated=[7]),
        make_request("b", temperature=0.0, generated=[7], presence_penalty=2.0),
        make_request("c", temperature=0.0, generated=[8], repetition_penalty=9.0),
    ]
    assert choose(logits, *requests) == [7, 8, 7]


def test_logit_bias_adds_and_bans() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 7] = 3.0
    requests = [
        make_request("a", temperature=0.0, logit_bias={40: 4.0}),
        make_request("b", logit_bias={i: -100.0 for i in range(VOCAB) if i != 12}, seed=5),
    ]
    assert choose(logits, *requests) == [40, 12]


def test_min_tokens_bans_eos_and_stop_ids_until_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 9, 20]] = torch.tensor([9.0, 8.0, 7.0])
    params: dict[str, Any] = dict(temperature=0.0, min_tokens=2, stop_token_ids=[9])
    assert choose(logits, make_request(**params)) == [20]
    assert choose(logits, make_request(**params, generated=[20])) == [20]
    assert choose(logits, make_request(**params, generated=[20, 20])) == [EOS]
    assert choose(logits, make_request(**params, ignore_eos=True)) == [EOS]
    assert choose(logits, make_request(**params, logit_bias={EOS: 100.0})) == [20]


def test_min_p_leaves_what_is_near_the_best() -> None:
    logits = torch.tensor([[0.0, -0.5, -2.0, -9.0]])
    none, one = torch.tensor([0]), torch.ones(1)
    kept = truncate(logits, none, one, torch.tensor([0.5]).log()).isfinite()
    assert kept.tolist() == [[True, True, False, False]]
    assert truncate(logits, none, one, torch.tensor([1.0]).log()).isfinite().sum() == 1
    assert truncate(logits, none, one, torch.tensor([0.0]).log()).isfinite().all()


def test_equals_of_the_last_one_kept_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 3.0, 2.0]])
    off, one = torch.tensor([-math.inf]), torch.ones(1)
    without_1 = [[False, True, True, True, True]]
    assert truncate(logits, torch.tensor([2]), one, off).isfinite().tolist() == without_1
    assert truncate(logits, torch.tensor([0]), one * 0.6, off).isfinite().tolist() == without_1
    for top_p in (0.4, 1e-6, 0.0):
        assert truncate(logits, torch.tensor([0]), one * top_p, off).isfinite().nonzero().tolist() == [[0, 3]]


def test_logprobs_are_the_models_own_and_finite() -> None:
    logits = random_logits(3)
    logits[0, 50] = -math.inf
    requests = [
        make_request("a", temperature=0.0, logprobs=0, logit_bias={30: 100.0}),
        make_request("b", temperature=0.3, logprobs=4, repetition_penalty=1.5, prompt=range(30)),
        make_request("c"),
    ]
    expected = logits.log_softmax(-1)
    tokens = sample(make_sampler(), logits, *requests).collect()
    first, second, third = tokens
    assert first is not None and second is not None and third is not None
    assert first.token_id == 30 and first.logprobs is not None and first.logprobs.top == []
    assert first.logprobs.logprob == pytest.approx(expected[0, 30].item())
    assert second.logprobs is not None and third.logprobs is None
    assert second.logprobs.logprob == pytest.approx(expected[1, second.token_id].item())
    best = expected[1].topk(4)
    assert [token for token, _ in second.logprobs.top] == best.indices.tolist()
    assert [value for _, value in second.logprobs.top] == pytest.approx(best.values.tolist())


def test_minus_infinity_becomes_a_number() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3] = 0.0
    (token,) = sample(make_sampler(), logits, make_request(logprobs=3)).collect()
    assert token is not None and token.logprobs is not None
    assert [value for _, value in token.logprobs.top] == [0.0, MIN_LOGPROB, MIN_LOGPROB]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_no_token_and_harms_no_neighbour(broken: float) -> None:
    logits = random_logits(2)
    logits[0, 10] = broken
    requests = [make_request("a", logprobs=2), make_request("b", temperature=0.0)]
    assert [token and token.token_id for token in sample(make_sampler(), logits, *requests).collect()] == [
        None,
        int(logits[1].argmax()),
    ]


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(1)
    before = logits.clone()
    choose(logits, make_request(repetition_penalty=1.4, logit_bias={3: 5.0}, top_p=0.5))
    assert torch.equal(logits, before)


def test_the_noise_forbids_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest hash there is rounds to a uniform number of 1, whose noise would be -inf."""
    monkeypatch.setattr("kernels.sample._mix", lambda x: torch.full_like(x, -1))
    assert gumbel_noise(torch.tensor([3]), torch.tensor([4]), VOCAB).isfinite().all()


def test_a_mask_has_a_bit_for_each_token() -> None:
    logits = random_logits(2)[:, :40]
    allowed = torch.tensor([[1 | -(2**31), 1 << 7], [1 << 5, 0]], dtype=torch.int32)
    masked = mask_tokens(logits, allowed)
    assert masked.isfinite().nonzero().tolist() == [[0, 0], [0, 31], [0, 39], [1, 5]]
    assert torch.equal(masked[masked.isfinite()], logits[masked.isfinite()])
