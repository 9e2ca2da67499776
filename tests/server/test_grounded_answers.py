"""Boxes over HTTP: asked for by name, given as data, and gone from the text that people read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw

from model.tokenizer import Tokenizer
from server.settings import DEFAULT_MODEL
from tests.conftest import MODEL, chat_body, colour, data_url
from tests.server.scripted import application, payloads, post, says

CHAT = "/v1/chat/completions"
MARKED = "The <|ref|>red circle<|/ref|><|det|>[[0, 100, 500, 999]]<|/det|> is left."
READABLE = "The red circle is left."
BOXES = {"label": "red circle", "boxes": [[0, 100, 500, 999]], "boxes_pixels": [[0, 20, 50, 200]], "image_index": 0}


def ask(answer: str, *images: str, text: str = "Where is it?", **fields: Any) -> Any:
    """The first choice of a whole answer, after a look at the streamed one, which must say the same."""
    app, _ = application(says(answer))
    body = chat_body(text, *images, **fields)
    response = post(app, CHAT, body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    deltas = [chunk["choices"][0]["delta"] for chunk in payloads(post(app, CHAT, {**body, "stream": True}))]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
    assert all("grounding" not in delta for delta in deltas[:-1])
    assert deltas[-1].get("grounding") == choice["message"].get("grounding")
    return choice


def test_boxes_come_as_data_and_the_text_is_as_people_read_it() -> None:
    message = ask(MARKED, colour(100, 200))["message"]
    assert message["content"] == READABLE
    assert message["grounding"] == [BOXES]


@pytest.mark.parametrize("skip", [None, True, False])
def test_markup_is_kept_for_those_who_want_special_tokens(skip: bool | None) -> None:
    message = ask(MARKED, colour(100, 200), skip_special_tokens=skip)["message"]
    assert message["content"] == (MARKED if skip is False else READABLE)
    assert message["grounding"] == [BOXES]


def test_pixels_are_those_of_the_picture_that_was_sent_and_named() -> None:
    pictures = [colour(100, 200), colour(999, 1998)]
    assert ask(MARKED, *pictures)["message"]["grounding"] == [
        {**BOXES, "boxes_pixels": [[0, 200, 500, 1998]], "image_index": 1}
    ]
    wish = {"locate": "the red circle", "image_index": 0}
    assert ask(MARKED, *pictures, grounding=wish)["message"]["grounding"] == [BOXES]


def test_malformed_markup_stays_text() -> None:
    message = ask("a <|ref|>b<|/ref|><|det|>[[1, 2, 3]]<|/det|>", colour())["message"]
    assert message == {"role": "assistant", "content": "a b[[1, 2, 3]]", "refusal": None}


def test_a_plain_answer_has_no_boxes_unless_they_were_asked_for() -> None:
    assert "grounding" not in ask("A cat.", colour())["message"]
    assert ask("A cat.", colour(), grounding={"describe": True})["message"]["grounding"] == []
    assert "grounding" not in ask(MARKED)["message"]  # without a picture there is nothing to point into


def test_the_log_probabilities_are_those_of_the_markup_too() -> None:
    content = ask(MARKED, colour(), logprobs=True)["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == MARKED


def test_log_probabilities_have_the_true_bytes_of_characters_in_pieces() -> None:
    text = "a 🙂 é 漢"
    choice = ask(text, colour(), logprobs=True, top_logprobs=0)
    assert choice["message"]["content"] == text
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert any("\ufffd" in entry["token"] for entry in entries)  # a piece has no text of its own, but it has bytes


@pytest.mark.parametrize(
    ("wish", "text", "prompt"),
    [
        ({"locate": "the red circle"}, "", "<|ref|>the red circle<|/ref|>."),
        ({"describe": True}, "What is here?", "<|grounding|>What is here?"),
        ({"describe": True}, "", "<|grounding|>Describe this image."),
    ],
    ids=str,
)
def test_boxes_are_asked_for_without_knowing_the_tags(wish: dict[str, Any], text: str, prompt: str) -> None:
    app, _ = application(says("x"))
    asked = post(app, "/tokenize", chat_body(text, colour(), grounding=wish)).json()
    typed = post(app, "/tokenize", chat_body(prompt, colour())).json()
    assert asked == typed
    assert prompt in Tokenizer.from_folder(DEFAULT_MODEL).decode(asked["tokens"], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("wish", "images", "reason"),
    [
        ({}, 1, "either locate or describe"),
        ({"locate": "x", "describe": True}, 1, "either locate or describe"),
        ({"locate": " "}, 1, "empty"),
        ({"locate": "a<|/ref|>b"}, 1, "must not have"),
        ({"describe": True}, 0, "with a picture"),
        ({"describe": True, "image_index": 1}, 1, "no picture 1"),
    ],
    ids=str,
)
def test_wishes_for_boxes_that_cannot_be_met(wish: dict[str, Any], images: int, reason: str) -> None:
    app, engine = application(says("x"))
    response = post(app, CHAT, chat_body("x", *[colour()] * images, grounding=wish))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "grounding")
    assert reason in response.json()["error"]["message"]
    assert not engine.ended


@pytest.mark.parametrize(
    ("wish", "param"), [({"find": "x"}, "grounding.find"), ({"image_index": -1}, "grounding.image_index")]
)
def test_wishes_for_boxes_in_the_wrong_form(wish: dict[str, Any], param: str) -> None:
    app, _ = application(says("x"))
    assert post(app, CHAT, chat_body("x", colour(), grounding=wish)).json()["error"]["param"] == param


def test_the_demo_model_locates_things(client: httpx.Client) -> None:
    """The whole way: the question made, the answer read, the box in pixels of a picture that is no square."""
    picture = Image.new("RGB", (500, 400), "white")
    draw = ImageDraw.Draw(picture)
    places = {"the red circle": (50, 100, 170, 220), "the blue square": (300, 50, 420, 170)}
    draw.ellipse(places["the red circle"], fill="red")
    draw.rectangle(places["the blue square"], fill="blue")
    for what, place in places.items():
        body = chat_body("", data_url(picture), grounding={"locate": what}, max_tokens=60)
        response = client.post(CHAT, json=body)
        [found] = response.json()["choices"][0]["message"]["grounding"]
        assert found["label"] == what
        [box] = found["boxes_pixels"]
        assert all(abs(side - true) <= 20 for side, true in zip(box, place, strict=True)), (what, box)


def test_text_completions_have_no_pictures_and_so_no_boxes() -> None:
    app, _ = application(says("a<|ref|>b<|/ref|>"))
    for skip, text in ((None, "ab"), (True, "ab"), (False, "a<|ref|>b<|/ref|>")):
        body = {"model": MODEL, "prompt": "x", "skip_special_tokens": skip}
        assert post(app, "/v1/completions", body).json()["choices"][0]["text"] == text
