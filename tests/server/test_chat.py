"""Chat completions over HTTP with the real OpenAI client, whole and streamed, on the demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from model.tokenizer import EOS, USER, Tokenizer
from server.answers import AnswerMessage
from server.protocol import AssistantMessage
from server.settings import DEFAULT_MODEL
from tests.conftest import API_KEY, MODEL, chat_body, colour

# Many tokens made likely, whatever the model thinks: answers at a high temperature are sure to differ.
MANY = {str(token): 100 for token in range(300, 364)}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is this?"}]


@pytest.fixture(scope="module")
def api(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEFAULT_MODEL)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_can_be_sent_back_as_it_came(api: openai.OpenAI, stream: bool) -> None:
    picture: Any = {"type": "image_url", "image_url": {"url": colour()}}
    question: Any = {"role": "user", "content": [picture, {"type": "text", "text": "The red thing?"}]}
    where = {"grounding": {"locate": "the red square"}}
    asked: Any = {"model": MODEL, "messages": [question], "temperature": 0, "max_tokens": 24, "extra_body": where}
    if stream:
        with api.chat.completions.stream(**asked) as events:
            events.until_done()
            # Not the final completion, which the client refuses of an answer that ran into max_tokens.
            message = events.current_completion_snapshot.choices[0].message
    else:
        message = api.chat.completions.create(**asked).choices[0].message
    returned: Any = message.model_dump()
    assert "grounding" in returned
    messages = [question, returned, *MESSAGES]
    assert api.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).choices
    assert set(AnswerMessage.model_fields) <= set(AssistantMessage.model_fields)


def ask(client: httpx.Client, text: str, *images: str, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json=chat_body(text, *images, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(client: httpx.Client, body: dict[str, Any]) -> list[str]:
    """The payloads of a stream, as they are on the wire."""
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    assert raw.endswith("\n\n")
    blocks = raw.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_first_request_of_the_openai_client(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=8)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert not any(control in choice.message.content for control in (EOS[:2], USER[:2]))
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_stream_equals_the_whole_answer(api: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    whole = api.chat.completions.create(**options)
    chunks = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_async_client_and_requests_side_by_side(server_url: str) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0) as api:

            async def one(stop: str) -> str:
                stream = await api.chat.completions.create(
                    model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12, stop=stop, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

            full = await one("\x00")
            first = full[2]
            return [full, *await asyncio.gather(one(first), one("zzz"), one(first), one("\x00"))]

    full, cut, uncut, cut_again, alone = asyncio.run(run())
    assert cut == cut_again == full[: full.index(full[2])]
    assert uncut == alone == full


def test_wire_form_of_a_stream(client: httpx.Client) -> None:
    *payloads, done = events(client, chat_body("What is this?"))
    assert done == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1) and reasons[-1] in ("stop", "length")
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_wire_form_of_usage(client: httpx.Client) -> None:
    body = chat_body("What is this?", stream_options={"include_usage": True})
    chunks = [json.loads(payload) for payload in events(client, body)[:-1]]
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert ask(client, "What is this?")["usage"] == chunks[-1]["usage"]
    assert set(chunks[-1]["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}


def test_greedy_is_deterministic_and_ignores_the_other_knobs(client: httpx.Client) -> None:
    plain = ask(client, "What is this?")["choices"]
    assert ask(client, "What is this?", seed=5)["choices"] == plain
    assert ask(client, "What is this?", top_p=0.01, top_k=0)["choices"] == plain
    assert ask(client, "What is this?", top_k=-1, min_p=0.5)["choices"] == plain


def test_seed_decides_the_answer_alone_and_in_company(client: httpx.Client, server_url: str) -> None:
    fields: dict[str, Any] = {"temperature": 2, "max_tokens": 16, "logit_bias": MANY}
    alone = ask(client, "Tell me.", seed=7, **fields)["choices"][0]["message"]["content"]

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=server_url, headers=dict(client.headers), timeout=120) as others:

            async def one(seed: int) -> str:
                body = chat_body("Tell me.", seed=seed, **fields)
                response = await others.post("/v1/chat/completions", json=body)
                return str(response.json()["choices"][0]["message"]["content"])

            return list(await asyncio.gather(*[one(seed) for seed in (7, 1, 2, 3, 7)]))

    answers = asyncio.run(together())
    assert answers[0] == answers[4] == alone
    assert len(set(answers)) > 1


def test_several_choices(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 2, "seed": 11, "max_tokens": 8, "logit_bias": MANY}
    answer = ask(client, "Tell me.", **fields)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) > 1
    assert answer["usage"]["prompt_tokens"] == ask(client, "Tell me.")["usage"]["prompt_tokens"]
    # Choice i is what the seed + i gives alone.
    assert ask(client, "Tell me.", **{**fields, "n": 1, "seed": 13})["choices"][0]["message"]["content"] == texts[2]

    chunks = [json.loads(payload) for payload in events(client, chat_body("Tell me.", **fields))[:-1]]
    assert [text_of(chunks, index) for index in range(3)] == texts
    for index in range(3):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] is not None for choice in own] == [False] * (len(own) - 1) + [True]


def test_several_choices_of_a_picture_count_its_prompt_once(client: httpx.Client) -> None:
    one = ask(client, "Describe this image.", colour())
    three = ask(client, "Describe this image.", colour(), n=3)
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert [choice["message"] for choice in three["choices"]] == [one["choices"][0]["message"]] * 3


def test_max_completion_tokens_wins(client: httpx.Client) -> None:
    answer = ask(client, "Tell me.", max_tokens=9, max_completion_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_min_tokens_and_ignore_eos(client: httpx.Client, tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    bias = {str(eos): 100}
    at_once = ask(client, "Tell me.", logit_bias=bias, return_token_ids=True)
    assert at_once["choices"][0]["message"]["content"] == ""
    assert at_once["choices"][0]["token_ids"] == [eos]
    assert at_once["choices"][0]["finish_reason"] == "stop"
    later = ask(client, "Tell me.", logit_bias=bias, min_tokens=4)
    assert later["usage"]["completion_tokens"] == 5
    never = ask(client, "Tell me.", logit_bias=bias, ignore_eos=True, skip_special_tokens=False)
    assert never["choices"][0]["finish_reason"] == "length"
    assert never["choices"][0]["message"]["content"] == ""  # the end of a sentence never shows


def test_stop_strings(client: httpx.Client) -> None:
    full = ask(client, "What is this?")["choices"][0]["message"]["content"]
    at_start = ask(client, "What is this?", stop=[full[:3]])["choices"][0]
    assert (at_start["message"]["content"], at_start["finish_reason"]) == ("", "stop")
    middle = full[3:6]
    for stop in (middle, ["zzzz", middle]):
        answer = ask(client, "What is this?", stop=stop)
        assert answer["choices"][0]["message"]["content"] == full[: full.index(middle)]
        assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = [json.loads(payload) for payload in events(client, chat_body("What is this?", stop=middle))[:-1]]
    assert text_of(chunks) == full[: full.index(middle)]


def test_stop_token_ids(client: httpx.Client, tokenizer: Tokenizer) -> None:
    full = ask(client, "What is this?", return_token_ids=True)["choices"][0]
    stop = full["token_ids"][2]
    answer = ask(client, "What is this?", stop_token_ids=[stop], return_token_ids=True)["choices"][0]
    assert answer["token_ids"] == full["token_ids"][: full["token_ids"].index(stop) + 1]
    assert answer["message"]["content"] == tokenizer.decode(answer["token_ids"][:-1], skip_special_tokens=True)
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("top", [0, 5, 20])
def test_logprobs(client: httpx.Client, top: int) -> None:
    answer = ask(client, "What is this?", logprobs=True, top_logprobs=top)["choices"][0]
    content = answer["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == answer["message"]["content"]
    for entry in content:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == top
        if top:  # greedy: the token sampled is the best
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    body = chat_body("What is this?", logprobs=True, top_logprobs=top)
    chunks = [json.loads(payload) for payload in events(client, body)[:-1]]
    streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for logprobs in streamed if logprobs is not None for entry in logprobs["content"]]
    assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in content]


def test_no_logprobs_unless_asked(client: httpx.Client) -> None:
    answer = ask(client, "What is this?")
    assert answer["choices"][0]["logprobs"] is None
    assert "prompt_token_ids" not in answer and "token_ids" not in answer["choices"][0]


def test_bytes_that_are_no_text(client: httpx.Client, tokenizer: Tokenizer) -> None:
    """A model that emits lone bytes gets replacement characters, and the server goes on."""
    lone = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xf0"]
    fields: dict[str, Any] = {"logit_bias": {str(lone[0]): 100}, "max_tokens": 3, "logprobs": True}
    answer = ask(client, "Tell me.", **fields)["choices"][0]
    assert answer["message"]["content"] == "�" * 3
    assert [entry["bytes"] for entry in answer["logprobs"]["content"]] == [[0xF0]] * 3
    chunks = [json.loads(payload) for payload in events(client, chat_body("Tell me.", **fields))[:-1]]
    assert text_of(chunks) == "�" * 3


def test_token_ids_of_a_stream(client: httpx.Client) -> None:
    whole = ask(client, "What is this?", return_token_ids=True)
    body = chat_body("What is this?", return_token_ids=True)
    chunks = [json.loads(payload) for payload in events(client, body)[:-1]]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]


def test_special_tokens_show_only_when_they_are_wanted(client: httpx.Client, tokenizer: Tokenizer) -> None:
    """The model is made to emit a marker."""
    marker = "<|det|>"
    bias = {str(tokenizer.grounding_token_ids[marker]): 100}
    for skip, content in ((None, ""), (True, ""), (False, marker)):
        for images in ([], [colour()]):
            body = chat_body("Tell me.", *images, logit_bias=bias, max_tokens=1, skip_special_tokens=skip)
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == content


def test_images_may_come_in_any_turn_and_a_last_answer_is_continued(client: httpx.Client) -> None:
    picture = {"type": "image_url", "image_url": {"url": colour()}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": [picture, {"type": "text", "text": "What is this?"}]},
    ]
    body = {"model": MODEL, "messages": turns, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    first = client.post("/v1/chat/completions", json=body).json()
    assert first["usage"]["prompt_tokens"] > 421
    begun = first["choices"][0]["message"]["content"]
    body = {**body, "messages": [*turns, {"role": "assistant", "content": begun}], "max_tokens": 1}
    continued = client.post("/v1/chat/completions", json=body).json()
    assert continued["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    assert not continued["choices"][0]["message"]["content"].startswith(begun)


def test_detail_and_string_forms_of_an_image(client: httpx.Client) -> None:
    url = colour()
    text = {"type": "text", "text": "x"}
    counts = set()
    for image in (url, {"url": url}, {"url": url, "detail": "low"}):
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": image}, text]}]}
        response = client.post("/tokenize", json=body)
        assert response.status_code == 200
        counts.add(response.json()["count"])
    assert len(counts) == 1
