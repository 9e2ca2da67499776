"""What requests may say: each field is honoured, ignored by design, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponsesParams
from pydantic import ValidationError

from server.errors import APIError, validation_error
from server.protocol import ChatRequest, CompletionRequest, RequestModel, TokenizeRequest
from server.responses import ResponsesRequest

HI = [{"role": "user", "content": "hi"}]


def refusal(model: type[RequestModel], body: str | dict[str, Any]) -> APIError:
    """The 400 that a body gets."""
    raw = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(raw)
    return validation_error(caught.value)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"model": "m", "messages": HI, **fields}))


BAD_CHAT = [
    ("temperature", -1),
    ("temperature", 2.5),
    ("temperature", "1"),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 2),
    ("top_p", 0),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-5": 1}),
    ("logit_bias", {"01": 1}),
    ("logit_bias", {"\u0665": 1}),  # an Arabic digit
    ("logit_bias", {"5\n": 1}),
    ("logit_bias", {"5": 101}),
    ("n", 0),
    ("n", 17),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("seed", 1.5),
    ("seed", 2**63),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", ""),
    ("stop", [1]),
    ("stop_token_ids", ["a"]),
    ("stream", "true"),
    ("logprobs", 1_000_000),
    ("top_logprobs", 21),
    ("top_logprobs", 3),  # without logprobs
    ("stream_options", {"include_usage": True}),  # without stream
    ("response_format", {"type": "xml"}),
    ("structured_outputs", {"regex": "a", "grammar": "b"}),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "auto"),
    ("parallel_tool_calls", True),
    ("functions", [{}]),
    ("store", True),
    ("service_tier", "flex"),
    ("modalities", ["text", "audio"]),
    ("reasoning_effort", "low"),
    ("messages", []),
    ("messages", "x"),
    ("messages", [1]),
    ("messages", [{"role": "robot", "content": "x"}]),
    ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]),
    ("messages", [{"role": "system", "content": [{"type": "image_url", "image_url": "x"}]}]),
    ("messages", [{"role": "assistant", "content": "", "tool_calls": [{}]}]),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_CHAT, ids=str)
def test_bad_field_is_named(field: str, value: Any) -> None:
    error = refusal(ChatRequest, {"model": "m", "messages": HI, field: value})
    assert error.status == 400
    assert error.param is not None and error.param.split(".")[0].split("[")[0] == field
    assert field in error.message


def test_messages_name_the_exact_place() -> None:
    messages = [*HI, {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}]
    error = refusal(ChatRequest, {"model": "m", "messages": messages})
    assert (error.param, error.code) == ("messages[1].content[1].text", "missing_parameter")
    error = refusal(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x", "colour": 1}]})
    assert (error.param, error.code) == ("messages[0].colour", "unknown_parameter")
    error = refusal(ChatRequest, {"model": "m", "messages": [{"role": "robot", "content": "x"}]})
    assert "robot" in error.message and "developer" in error.message


def test_fields_that_contradict_each_other() -> None:
    error = refusal(ChatRequest, {"model": "m", "messages": HI, "min_tokens": 5, "max_tokens": 3})
    assert error.param == "min_tokens" and "5" in error.message and "3" in error.message
    error = refusal(CompletionRequest, {"model": "m", "prompt": "x", "echo": True, "logprobs": 1})
    assert error.param == "echo"


@pytest.mark.parametrize("body", ["{", "", "[" * 10_000, "\ufeff{}", '{"a": ', "nul"])
def test_what_is_not_json(body: str) -> None:
    assert refusal(ChatRequest, body).code == "invalid_json"


@pytest.mark.parametrize("body", ["[]", "1", '"x"', "null"])
def test_json_that_is_no_object(body: str) -> None:
    assert refusal(ChatRequest, body).code == "invalid_value"


def test_error_messages_do_not_repeat_long_input() -> None:
    error = refusal(ChatRequest, {"model": "m", "messages": [{"role": "x" * 100_000, "content": ""}]})
    assert len(error.message) < 1100


@pytest.mark.parametrize(
    "fields",
    [
        {f"f{number}": 1 for number in range(100_000)},
        {"logit_bias": {f"f{number}": "x" for number in range(100_000)}},
        {"stop_token_ids": ["x"] * 100_000},
        {"stop": [1] * 100_000},
        {"messages": [1] * 100_000},
        {"messages": [{"role": "user", "content": [1] * 100_000}]},
    ],
    ids=["unknown", "logit_bias", "stop_token_ids", "stop", "messages", "content"],
)
def test_many_faults_are_one_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(json.dumps({"model": "m", "messages": HI, **fields}))
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [1] * 100_000},
        {"input": [{"role": "user", "content": [1] * 100_000}]},
        {"include": [1] * 100_000},
        {f"f{number}": 1 for number in range(100_000)},
    ],
    ids=["input", "content", "include", "unknown"],
)
def test_many_faults_of_a_response_are_one_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate_json(json.dumps({"model": "m", "input": "x", **fields}))
    assert caught.value.error_count() == 1


def test_null_means_not_given() -> None:
    fields = [name for name in ChatRequest.model_fields if name not in ("model", "messages")]
    assert chat(**dict.fromkeys(fields)) == chat()


def test_ignored_and_harmless_fields() -> None:
    body = chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        tools=[],
        tool_choice="none",
        modalities=["text"],
        response_format={"type": "text"},
    )
    assert body.answer_limit is None


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=9, max_completion_tokens=3).answer_limit == 3
    assert chat(max_tokens=9).answer_limit == 9


def test_forms_of_content() -> None:
    text = {"type": "text", "text": "a"}
    as_object = {"type": "image_url", "image_url": {"url": "u", "detail": "high"}}
    as_string = {"type": "image_url", "image_url": "u"}
    [message] = chat(messages=[{"role": "user", "content": [text, as_object, as_string], "name": "n"}]).messages
    assert [part.type for part in message.content] == ["text", "image_url", "image_url"]
    assert chat(messages=[{"role": "user", "content": "a"}]).messages[0].content == message.content[:1]
    assert chat(messages=[{"role": "user", "content": []}]).messages[0].content == []
    assert chat(messages=[{"role": "developer", "content": "a"}]).messages[0].role == "developer"


def test_an_answer_of_the_api_can_be_sent_back() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "grounding": [{"label": "x", "boxes": [[0, 0, 1, 1]], "boxes_pixels": [[0, 0, 1, 1]], "image_index": 0}],
    }
    assert chat(messages=[*HI, answer, *HI]).messages[1].role == "assistant"
    assert chat(messages=[*HI, {"role": "assistant", "content": None}, *HI]).messages[1].content == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
    ids=str,
)
def test_forms_of_a_prompt(prompt: Any, expected: Any) -> None:
    body = CompletionRequest.model_validate_json(json.dumps({"model": "m", "prompt": prompt}))
    assert body.prompt == expected


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [1, "a"], ["a", 1], 5, [True], {"a": 1}, ["a"] * 65], ids=str)
def test_bad_prompts(prompt: Any) -> None:
    assert refusal(CompletionRequest, {"model": "m", "prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(("field", "value"), [("suffix", "x"), ("best_of", 2), ("logprobs", 21), ("logprobs", True)])
def test_bad_completion_fields(field: str, value: Any) -> None:
    assert refusal(CompletionRequest, {"model": "m", "prompt": "x", field: value}).param == field


def test_tokenize_takes_messages_or_a_prompt() -> None:
    assert TokenizeRequest.model_validate_json('{"prompt": "x"}').prompt == "x"
    assert TokenizeRequest.model_validate_json(json.dumps({"messages": HI, "max_tokens": 3})).messages is not None
    assert refusal(TokenizeRequest, {}).param == "messages"
    assert refusal(TokenizeRequest, {"messages": HI, "prompt": "x"}).param == "messages"


@pytest.mark.parametrize(
    ("params", "model", "least"),
    [
        (ChatParams, ChatRequest, {"model": "m", "messages": HI}),
        (CompletionParams, CompletionRequest, {"model": "m", "prompt": "x"}),
        (ResponsesParams, ResponsesRequest, {"model": "m", "input": "x"}),
    ],
    ids=["chat", "completions", "responses"],
)
def test_no_parameter_of_the_openai_client_is_ignored_in_silence(
    params: type, model: type[RequestModel], least: dict[str, Any]
) -> None:
    """Nonsense in any of them is a 400 that names it, but where any object will do."""
    for field in set(params.__annotations__) - {"metadata"}:
        error = refusal(model, {**least, field: {"no": "sense"}})
        assert error.param is not None and error.param.split(".")[0].split("[")[0] == field
