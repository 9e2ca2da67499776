"""Prompts from requests: limits on pictures, and how much room is left for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from model.config import load_config
from model.tokenizer import Tokenizer
from server.errors import APIError
from server.fetch import MediaFetcher
from server.prepare import MAX_PIXELS_FACTOR, PreparedPrompt, Preparer, answer_room
from server.protocol import ChatRequest, GroundingRequest, Message
from server.settings import DEFAULT_MODEL, Settings
from tests.conftest import chat_body, colour


def messages(text: str, *images: str) -> Sequence[Message]:
    return ChatRequest.model_validate(chat_body(text, *images)).messages


def prepare(
    content: Sequence[Message],
    *,
    grounding: GroundingRequest | None = None,
    fetcher: MediaFetcher | None = None,
    **settings: Any,
) -> PreparedPrompt:
    async def run() -> PreparedPrompt:
        chosen = Settings(**settings)
        tokenizer = Tokenizer.from_folder(DEFAULT_MODEL)
        source = fetcher if fetcher is not None else MediaFetcher(chosen.fetch_policy)
        preparer = Preparer(chosen, load_config(DEFAULT_MODEL), tokenizer, source)
        try:
            return await preparer.chat(content, grounding)
        finally:
            await preparer.close()

    return asyncio.run(run())


def refusal(content: Sequence[Message], **settings: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        prepare(content, **settings)
    assert caught.value.status == 400
    return caught.value


def test_images_have_their_slots_in_order() -> None:
    prompt = prepare(messages("x", colour(20, 10), colour(10, 20), colour()))
    assert prompt.image_slots == (421, 421, 421)
    starts = [image.start for image in prompt.images]
    assert starts == sorted(starts)
    assert len({image.digest for image in prompt.images}) == 3
    for image in prompt.images:
        assert len(image.tiles) == (1 + image.columns * image.rows) * 3 * 384 * 384


def test_limits_on_one_image_and_on_all_together() -> None:
    limit = 100
    assert "101" in refusal(messages("x", colour(101, 1)), max_image_pixels=limit).message
    within = [colour(10, 10)] * MAX_PIXELS_FACTOR
    prepare(messages("x", *within), max_image_pixels=limit)
    error = refusal(messages("x", *within, colour(1, 1)), max_image_pixels=limit)
    assert str(limit * MAX_PIXELS_FACTOR) in error.message
    assert error.param == f"messages[0].content[{MAX_PIXELS_FACTOR}].image_url"


def test_no_images_allowed() -> None:
    error = refusal(messages("x", colour()), max_images=0)
    assert "1" in error.message and "0" in error.message


def test_conversations_that_have_no_form() -> None:
    body = chat_body("x")
    late_system = [*body["messages"], {"role": "system", "content": "y"}]
    error = refusal(ChatRequest.model_validate({**body, "messages": late_system}).messages)
    assert error.param == "messages" and "system" in error.message


@pytest.mark.parametrize(
    ("length", "wanted", "least", "room"),
    [(10, None, 0, 90), (10, 90, 0, 90), (10, 5, 0, 5), (99, None, 0, 1), (99, 1, 1, 1), (10, None, 90, 90)],
)
def test_room_for_the_answer(length: int, wanted: int | None, least: int, room: int) -> None:
    prompt = PreparedPrompt([0] * length)
    assert answer_room(prompt, 100, wanted=wanted, least=least, param="prompt") == room


@pytest.mark.parametrize(
    ("length", "wanted", "least", "param", "numbers"),
    [
        (100, None, 0, "prompt", ("100",)),
        (250, 5, 0, "prompt", ("250", "100")),
        (10, 91, 0, "max_tokens", ("91", "90", "10", "100")),
        (10, None, 91, "min_tokens", ("91", "90")),
    ],
)
def test_no_room_for_the_answer(
    length: int, wanted: int | None, least: int, param: str, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(APIError) as caught:
        answer_room(PreparedPrompt([0] * length), 100, wanted=wanted, least=least, param="prompt")
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == param
    assert all(number in caught.value.message for number in numbers)


def test_the_message_has_text_tokens_and_the_slots_of_each_image() -> None:
    prompt = PreparedPrompt([0] * 1000, image_slots=(421, 500))
    with pytest.raises(APIError) as caught:
        answer_room(prompt, 900, wanted=None, least=0, param="messages")
    assert "1000 tokens: 79 text tokens and 921 image slots (421 + 500)" in caught.value.message
