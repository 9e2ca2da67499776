"""Structured output over HTTP, with the real OpenAI client and by hand, on the demo model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator
from enum import Enum
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from model.tokenizer import Tokenizer
from server.engine.request import EngineRequest, Grammar, TokenEvent
from server.engine.structured import MAX_BYTES
from server.settings import DEFAULT_MODEL
from tests.conftest import API_KEY, MODEL, chat_body, colour
from tests.server.scripted import application, payloads, post, says

SCHEMA = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "dreieck größer"]},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 2, "maxItems": 2},
        "box": {
            "type": "object",
            "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 999}, "filled": {"type": "boolean"}},
            "required": ["left", "filled"],
            "additionalProperties": False,
        },
    },
    "required": ["shape", "words", "box"],
    "additionalProperties": False,
}


class Hue(Enum):
    red = "red"
    blue = "blue"


class Thing(BaseModel):
    name: str = Field(max_length=8)
    hue: Hue
    count: int = Field(ge=0, le=20)


class Scene(BaseModel):
    things: list[Thing] = Field(min_length=1, max_length=2)
    empty: bool | None


@pytest.fixture(scope="module")
def api(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0) as api:
        yield api


def schema_format(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def body(**fields: Any) -> dict[str, Any]:
    return chat_body("What is this?", **{"max_tokens": 300, "temperature": 1, "seed": 7, **fields})


def answers(client: httpx.Client, sent: dict[str, Any], path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
    response = client.post(path, json=sent)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def refusal(client: httpx.Client, sent: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    response = client.post(path, json=sent)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("strict", [True, False])
def test_every_choice_satisfies_the_schema(client: httpx.Client, strict: bool | None) -> None:
    choices = answers(client, body(n=4, response_format=schema_format(SCHEMA, strict=strict)))
    texts = [choice["message"]["content"] for choice in choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


def test_streams_carry_the_same_text(client: httpx.Client) -> None:
    sent = body(n=3, response_format=schema_format(SCHEMA))
    whole = [choice["message"]["content"] for choice in answers(client, sent)]
    streamed = ["", "", ""]
    with client.stream("POST", "/v1/chat/completions", json={**sent, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    for chunk in map(json.loads, lines[:-1]):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == whole


def test_parallel_requests_keep_to_their_own(server_url: str) -> None:
    async def run() -> None:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        async with httpx.AsyncClient(base_url=server_url, headers=headers, timeout=120) as client:
            forms: list[dict[str, Any]] = [
                {"structured_outputs": {"regex": f"<{i}>[a-f]{{{i}}}"}} if i % 2 else {} for i in range(1, 9)
            ]
            sent = [body(seed=i, max_tokens=24, **form) for i, form in enumerate(forms)]
            together = await asyncio.gather(*(client.post("/v1/chat/completions", json=one) for one in sent))
            texts = [response.json()["choices"][0]["message"]["content"] for response in together]
            alone = [await client.post("/v1/chat/completions", json=one) for one in sent[:2]]
            assert texts[:2] == [response.json()["choices"][0]["message"]["content"] for response in alone]
            assert all(re.fullmatch(f"<{i}>[a-f]{{{i}}}", texts[i - 1]) for i in range(1, 9, 2))

    asyncio.run(run())


def test_the_openai_clients_parse(api: openai.OpenAI) -> None:
    for seed in range(2):
        completion = api.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "What is this?"}],
            response_format=Scene,
            max_tokens=300,
            seed=seed,
        )
        parsed = completion.choices[0].message.parsed
        assert isinstance(parsed, Scene) and 1 <= len(parsed.things) <= 2


def test_json_object_is_an_object_or_a_beginning_of_one(client: httpx.Client) -> None:
    for choice in answers(client, body(n=8, max_tokens=60, response_format={"type": "json_object"})):
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
    [cut] = answers(client, body(max_tokens=2, response_format=schema_format(SCHEMA)))
    assert cut["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"regex": r"\d{4}-[a-z]{2}"}, r"\d{4}-[a-z]{2}"),
        ({"choice": ['a "red" circle', "blue\nsquare", "grün", "\\"]}, '(a "red" circle|blue\nsquare|grün|\\\\)'),
        ({"grammar": 'start: "x" INT | "y" start\nINT: /[0-9]{1,3}/'}, r"y*x\d{1,3}"),
        ({"json": {"const": ["<|ref|>", 1]}}, r'\[\s*"<\|ref\|>"\s*,\s*1\s*\]'),
    ],
)
def test_other_forms(client: httpx.Client, wish: dict[str, Any], pattern: str) -> None:
    sent = {"model": MODEL, "prompt": "This is", "max_tokens": 200, "n": 4, "seed": 1, "structured_outputs": wish}
    for choice in answers(client, sent, "/v1/completions"):
        assert re.fullmatch(pattern, choice["text"]), choice["text"]
        assert choice["finish_reason"] == "stop"
    [chat] = answers(client, body(structured_outputs=wish))
    assert re.fullmatch(pattern, chat["message"]["content"])


def test_stop_strings_cut_the_text_as_ever(client: httpx.Client) -> None:
    [choice] = answers(client, body(structured_outputs={"regex": "ab(cd){3}"}, stop="cdc"))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")


@pytest.mark.parametrize(
    ("fields", "param", "code", "reason"),
    [
        ({"response_format": schema_format({"type": "strin"})}, "response_format.json_schema.schema", None, "strin"),
        ({"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema", None, '"not"'),
        ({"structured_outputs": {"json": {"if": {}}}}, "structured_outputs.json", None, '"if"'),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "invalid_grammar", "look-around"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "invalid_grammar", ""),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value", "at least 1"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value", "one of json, regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "invalid_value", "one of json"),
        ({"structured_outputs": {"ebnf": "a"}}, "structured_outputs.ebnf", "unknown_parameter", "ebnf"),
        ({"guided_regex": "a"}, "guided_regex", "unknown_parameter", "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_parameter", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing_parameter",
            "",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "invalid_value",
            "pattern",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_value",
            "either",
        ),
    ],
)
def test_what_cannot_be_done_is_named(
    client: httpx.Client, fields: dict[str, Any], param: str, code: str | None, reason: str
) -> None:
    error = refusal(client, body(**fields))
    assert (error["param"], error["code"]) == (param, code or "invalid_schema")
    assert reason in error["message"]


def test_sizes_are_limited_and_nobody_is_harmed(client: httpx.Client) -> None:
    huge = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9000)}}
    error = refusal(client, body(response_format=schema_format(huge)))
    assert error["code"] == "invalid_schema" and f"at most {MAX_BYTES['json_schema']} are" in error["message"]
    error = refusal(client, body(structured_outputs={"regex": "a" * 10_000}))
    assert error["code"] == "invalid_grammar" and f"at most {MAX_BYTES['regex']} are" in error["message"]
    links = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1500)}
    deep = {"$defs": {**links, "a1500": {}}, "$ref": "#/$defs/a0"}
    [cut] = answers(client, body(structured_outputs={"json": deep}, max_tokens=2))
    assert cut["finish_reason"] in ("stop", "length")
    # Grows too large while it is followed: a fault of the request, and of nobody else's.
    error = refusal(client, body(structured_outputs={"regex": r"(\p{L}{1,200}){1,200}"}))
    assert error["code"] == "request_rejected" and "cannot be followed" in error["message"]
    [fine] = answers(client, body(structured_outputs={"choice": ["yes"]}))
    assert fine["message"]["content"] == "yes"


def test_the_grammar_reaches_the_engine_once_for_each_choice() -> None:
    seen: list[Grammar | None] = []
    speak = says('{"a": "<|ref|>x<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>"}')

    async def script(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        seen.append(request.sampling.grammar)
        async for item in speak(request):
            yield item

    app, _ = application(script)
    schema = {"required": ["b", "a"], "const": None, "title": "größe"}
    sent = chat_body("x", colour(), n=2, response_format=schema_format(schema))
    assert post(app, "/v1/chat/completions", sent).status_code == 200
    assert seen == [Grammar("json_schema", '{"required":["b","a"],"const":null,"title":"größe"}')] * 2
    post(app, "/v1/chat/completions", chat_body("x", response_format={"type": "text"}))
    post(app, "/v1/chat/completions", chat_body("x", response_format={"type": "json_object"}))
    assert seen[2:] == [None, Grammar("json_schema", '{"type":"object"}')]
    with_boxes = chat_body("x", colour(), grounding={"describe": True}, structured_outputs={"regex": "a"})
    assert post(app, "/v1/chat/completions", with_boxes).json()["error"]["param"] == "grounding"


def test_json_that_looks_like_boxes_stays_json() -> None:
    text = "<|ref|>x<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>"
    app, _ = application(spelt(text))
    sent = chat_body("x", colour(), structured_outputs={"json": {"type": "string"}}, stream=True)
    chunks = payloads(post(app, "/v1/chat/completions", sent))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


def spelt(text: str) -> Any:
    """An engine that answers with this text, letter by letter."""

    async def script(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        tokenizer = Tokenizer.from_folder(DEFAULT_MODEL)
        for token in tokenizer.encode_characters(text):
            yield TokenEvent(request_id=request.request_id, token_ids=[token])
        yield TokenEvent(request_id=request.request_id, token_ids=[tokenizer.eos_token_id], finish_reason="stop")

    return script
