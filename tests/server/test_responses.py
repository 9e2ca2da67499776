"""The Responses API with the real OpenAI client, on the demo model and on an engine that answers to order."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import ResponseOutputMessage, ResponseOutputText, ResponseTextDeltaEvent
from openai.types.responses.response import Response
from pydantic import BaseModel, Field

from model.tokenizer import Tokenizer
from server.engine.request import EngineDeadError, EngineRequest, TokenEvent
from server.settings import DEFAULT_MODEL
from tests.conftest import API_KEY, MODEL, chat_body, colour
from tests.server.scripted import application, event, post, says
from tests.server.test_grounded_answers import BOXES, MARKED, READABLE

PATH = "/v1/responses"
QUESTION = "What is this?"


@pytest.fixture(scope="module")
def api(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0) as api:
        yield api


def user(*images: str, text: str = QUESTION) -> list[Any]:
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in images]
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}]


def part_of(response: Response) -> ResponseOutputText:
    [message] = response.output
    assert isinstance(message, ResponseOutputMessage)
    [part] = message.content
    assert isinstance(part, ResponseOutputText)
    return part


def test_an_answer_is_that_of_a_chat(api: openai.OpenAI, client: httpx.Client) -> None:
    answer = api.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=8)
    chat = client.post("/v1/chat/completions", json=chat_body(QUESTION)).json()
    [choice] = chat["choices"]
    assert answer.output_text == choice["message"]["content"] != ""
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.status == ("completed" if choice["finish_reason"] == "stop" else "incomplete")
    assert (answer.error, answer.tools, answer.previous_response_id) == (None, [], None)


def test_pictures_and_instructions_are_part_of_the_prompt(api: openai.OpenAI, client: httpx.Client) -> None:
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 4}
    answer = api.responses.create(input=user(colour(384, 3456)), instructions="Be brief.", **options)
    body = chat_body(QUESTION, colour(384, 3456), max_tokens=4)
    body["messages"].insert(0, {"role": "system", "content": "Be brief."})
    chat = client.post("/v1/chat/completions", json=body).json()
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"] > 421
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert answer.instructions == "Be brief."
    developer = {"role": "developer", "content": "Use English."}
    both = api.responses.create(input=[developer, *user()], instructions="Be brief.", **options)  # type: ignore[list-item]
    body = chat_body(QUESTION, max_tokens=4)
    body["messages"].insert(0, {"role": "system", "content": "Be brief.\n\nUse English."})
    expected = client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    assert both.usage is not None and both.usage.input_tokens == expected


def test_a_conversation_goes_on_with_what_the_api_returned(api: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 4}
    first = api.responses.create(input=user(colour()), **options)
    history: Any = [*user(colour()), *[item.model_dump() for item in first.output], *user(text="And now?")]
    second = api.responses.create(input=history, **options)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.output_text


def test_a_stream_is_the_whole_answer_in_pieces(api: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": user(colour()), "temperature": 0, "max_output_tokens": 12}
    whole = api.responses.create(**options)
    events = list(api.responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent))
    assert text == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None and whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    # The client's own accumulator wants an answer that comes to its end.
    ends = {"logit_bias": {str(Tokenizer.from_folder(DEFAULT_MODEL).eos_token_id): 100}, "min_tokens": 4}
    whole = api.responses.create(**options, extra_body=ends)
    with api.responses.stream(**options, extra_body=ends) as stream:
        assert stream.get_final_response().output_text == whole.output_text != ""
    assert whole.status == "completed"


def test_wire_form_of_a_response_stream(client: httpx.Client) -> None:
    body = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 2, "stream": True}
    raw = client.post(PATH, json=body).text
    for block in raw.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in raw


def test_an_answer_cut_by_its_limit_is_incomplete(api: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": QUESTION, "max_output_tokens": 2, "extra_body": {"ignore_eos": True}}
    answer = api.responses.create(**options)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 2
    *_, last = api.responses.create(**options, stream=True)
    assert last.type == "response.incomplete"


def test_log_probabilities_of_a_response(api: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 4}
    scored: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    part = part_of(api.responses.create(**options, **scored))
    assert part.logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text
    assert all(len(entry.top_logprobs) == 3 for entry in part.logprobs)
    events = list(api.responses.create(**options, **scored, stream=True))
    streamed = [e.token for event in events if isinstance(event, ResponseTextDeltaEvent) for e in event.logprobs]
    assert streamed == [entry.token for entry in part.logprobs]
    assert part_of(api.responses.create(**options)).logprobs == []


def test_boxes_of_a_response() -> None:
    app, _ = application(says(MARKED))
    body = {"model": MODEL, "input": user(colour(100, 200)), "grounding": {"locate": "the red circle"}}
    answer = post(app, PATH, body).json()
    assert answer["output"][0]["content"][0]["text"] == READABLE
    assert answer["output"][0]["grounding"] == [BOXES]
    assert answer["status"] == "completed"
    assert '"grounding":[{"label":"red circle"' in post(app, PATH, {**body, "stream": True}).text


class Colour(BaseModel):
    colour: Literal["red", "blue"]
    count: int = Field(ge=0, le=9)


def test_a_response_keeps_to_a_schema(api: openai.OpenAI) -> None:
    answer = api.responses.parse(model=MODEL, input=user(colour()), text_format=Colour, max_output_tokens=64)
    assert isinstance(answer.output_parsed, Colour)
    assert answer.status == "completed"
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert api.responses.create(model=MODEL, input=QUESTION, extra_body=choice).output_text in ("yes", "no")


def test_a_response_has_one_form(client: httpx.Client) -> None:
    body = {"model": MODEL, "input": user(colour()), "text": {"format": {"type": "json_object"}}}
    for field, value in (("structured_outputs", {"regex": "x"}), ("grounding", {"describe": True})):
        assert client.post(PATH, json={**body, field: value}).json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("tools", [{"type": "function", "name": "f"}], "unsupported_parameter"),
        ("tool_choice", "required", "unsupported_parameter"),
        ("previous_response_id", "resp_1", "unsupported_parameter"),
        ("conversation", "conv_1", "unsupported_parameter"),
        ("background", True, "unsupported_parameter"),
        ("store", True, "unsupported_parameter"),
        ("truncation", "auto", "unsupported_parameter"),
        ("reasoning", {"effort": "low"}, "unsupported_parameter"),
        ("prompt", {"id": "p"}, "unsupported_parameter"),
        ("text", {"format": {"type": "nonsense"}}, "invalid_value"),
        ("top_logprobs", 2, "invalid_value"),
        ("top_logprobs", 21, "invalid_value"),
        ("include", ["file_search_call.results"], "invalid_value"),
        ("max_output_tokens", 0, "invalid_value"),
        ("max_output_tokens", 100_000, "context_length_exceeded"),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}, "invalid_schema"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "missing_parameter"),
        ("min_tokens", 9000, "context_length_exceeded"),
        ("input", [], "invalid_value"),
        ("input", 5, "invalid_value"),
        ("input", [{"type": "function_call_output", "call_id": "1", "output": "x"}], "invalid_value"),
        ("input", [{"role": "user", "content": [{"type": "input_audio"}]}], "invalid_value"),
        ("input", [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "missing_parameter"),
        ("input", [{"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}], "invalid_value"),
        ("input", user("data:image/png;base64,AAAA"), "invalid_image"),
        ("input", user(*[colour(8, 8)] * 17), "too_many_images"),
        ("input", "x y " * 5000, "context_length_exceeded"),
        ("messages", [], "unknown_parameter"),
        ("no_such_field", 1, "unknown_parameter"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_response_cannot_have_is_refused_by_name(
    client: httpx.Client, field: str, value: Any, code: str
) -> None:
    response = client.post(PATH, json={"model": MODEL, "input": QUESTION, field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert error["param"].split(".")[0].split("[")[0] == field


def test_the_place_of_a_bad_picture_is_named(client: httpx.Client) -> None:
    for instructions in (None, "Be brief."):
        body = {"model": MODEL, "instructions": instructions, "input": user("data:image/png;base64,AAAA")}
        assert client.post(PATH, json=body).json()["error"]["param"] == "input[0].content[0].image_url"
    item = {"role": "user", "content": [{"type": "input_image", "image_url": 5}]}
    error = client.post(PATH, json={"model": MODEL, "input": [item]}).json()["error"]
    assert error["param"] == "input[0].content[0].image_url"


def test_harmless_fields_of_a_response(api: openai.OpenAI) -> None:
    answer = api.responses.create(
        model=MODEL,
        input=QUESTION,
        max_output_tokens=1,
        store=False,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        truncation="disabled",
        metadata={"a": "b"},
        text={"format": {"type": "text"}},
        user="u",
        background=False,
    )
    assert answer.metadata == {"a": "b"} and answer.user == "u"


def test_a_response_that_fails_in_its_middle_says_so() -> None:
    async def dies(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        yield event(request, 65)
        raise EngineDeadError("gone")

    app, _ = application(dies)
    body = {"model": MODEL, "input": QUESTION}
    assert post(app, PATH, body).status_code == 503
    response = post(app, PATH, {**body, "stream": True})
    assert response.status_code == 200
    last = json.loads(response.text.removesuffix("\n\n").rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "The engine is not running."}
