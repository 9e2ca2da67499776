"""LangChain's OpenAI adapter drives the server as it would drive OpenAI's."""

from __future__ import annotations

import asyncio

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

from tests.conftest import API_KEY, MODEL, colour


def chat(server_url: str, *, responses: bool) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server_url}/v1",
        api_key=SecretStr(API_KEY),
        temperature=0,
        max_completion_tokens=8,
        max_retries=0,
        use_responses_api=responses,
    )


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(server_url: str, request: pytest.FixtureRequest) -> ChatOpenAI:
    return chat(server_url, responses=request.param)


QUESTION = [
    SystemMessage("Be brief."),
    HumanMessage(
        [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": colour(40, 20)}}]
    ),
]


def test_streamed_answers_are_the_whole_ones(model: ChatOpenAI) -> None:
    whole = model.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata is not None and whole.usage_metadata["input_tokens"] > 421
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == whole.text


def test_asynchronous_answers(server_url: str) -> None:
    models = [chat(server_url, responses=responses) for responses in (False, True)]

    async def run() -> list[str]:  # in one event loop, because the adapter keeps its connections
        return [answer.text for answer in await asyncio.gather(*[model.ainvoke(QUESTION) for model in models])]

    first, second = asyncio.run(run())
    assert first == second != ""


def test_a_conversation_goes_on(model: ChatOpenAI) -> None:
    first = model.invoke(QUESTION)
    second = model.invoke([*QUESTION, first, HumanMessage("And now?")])
    assert first.usage_metadata is not None and second.usage_metadata is not None
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_several_at_once(model: ChatOpenAI) -> None:
    answers = model.batch([QUESTION, QUESTION])
    assert answers[0].text == answers[1].text


def test_text_completions(server_url: str) -> None:
    model = OpenAI(
        model=MODEL, base_url=f"{server_url}/v1", api_key=SecretStr(API_KEY), temperature=0, max_tokens=4, max_retries=0
    )
    text = model.invoke("The red")
    assert text
    assert "".join(model.stream("The red")) == text
