"""What the engine refuses before it starts, and when a request ends."""

import math
from typing import Any

import msgspec
import pytest

from server.engine.request import (
    EngineConfig,
    EngineRequest,
    Request,
    RequestRejected,
    SamplingParams,
    Submit,
    ToEngine,
)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"temperature": -1.0}, "temperature must not be negative, got -1.0"),
        ({"temperature": math.nan}, "finite"),
        ({"presence_penalty": math.inf}, "finite"),
        ({"top_k": -2}, "top_k must be at least -1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 2.0}, r"top_p must lie in \(0, 1\]"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"logprobs": 21}, r"logprobs must lie in 0\.\.20, got 21"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"min_tokens": 9}, r"min_tokens must lie in 0\.\.max_tokens \(8\), got 9"),
        ({"logit_bias": {100: 1.0}}, r"logit_bias has token id 100, outside 0\.\.99"),
        ({"logit_bias": {5: math.nan}}, "logit_bias values must be finite"),
        ({"stop_token_ids": [-1]}, "stop_token_ids has token id -1"),
    ],
)
def test_bad_sampling_parameters_are_rejected_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        SamplingParams(**{"max_tokens": 8, **params}).check(vocab_size=100)


def test_good_sampling_parameters_pass() -> None:
    SamplingParams(
        max_tokens=1, temperature=0.0, top_k=-1, top_p=1.0, logit_bias={99: -100.0}, stop_token_ids=[0], logprobs=20
    ).check(vocab_size=100)


@pytest.mark.parametrize(
    "tokens, params, reason",
    [
        ([7], {}, None),
        ([7, 1], {}, "stop"),
        ([7, 1], {"ignore_eos": True}, None),
        ([7, 9], {"stop_token_ids": [9]}, "stop"),
        ([7, 8, 9], {}, "length"),
        ([7, 8, 1], {}, "stop"),
    ],
)
def test_why_a_request_ends(tokens: list[int], params: dict[str, Any], reason: str | None) -> None:
    request = Request("r", [1, 1], SamplingParams(max_tokens=3, **params), seed=0)
    request.token_ids += tokens
    assert request.finish_reason(eos_token_id=1) == reason


@pytest.mark.parametrize(
    "field, value",
    [("max_num_seqs", 0), ("prefill_chunk_tokens", 0), ("vision_tile_budget", -1), ("kv_cache_tokens", 0),
     ("max_model_len", 1), ("gpu_memory_utilization", 1.5)],
)  # fmt: skip
def test_a_config_that_could_serve_nothing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(model_path="somewhere", **{field: value})


def test_messages_survive_the_wire() -> None:
    request = EngineRequest(
        request_id="r", token_ids=[1, 2], sampling=SamplingParams(max_tokens=3, logit_bias={4: 1.5}, seed=2**63)
    )
    data = msgspec.msgpack.encode(Submit(request))
    assert msgspec.msgpack.decode(data, type=ToEngine) == Submit(request)
