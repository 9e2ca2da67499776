"""Bad input: a 4xx error object that names the cause; the server and other requests unharmed."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.conftest import API_KEY, MODEL, auth, chat_body, colour, data_url

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module", autouse=True)
def neighbour(server_url: str) -> Iterator[None]:
    """A stream that runs while the tests of this file do. It must end as if it were alone."""
    text: list[str] = []
    body = chat_body("Tell me.", max_tokens=600, ignore_eos=True, stream=True)

    def read() -> None:
        with (
            httpx.Client(base_url=server_url, headers=auth(), timeout=120) as client,
            client.stream("POST", CHAT, json=body) as response,
        ):
            text.extend(response.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    yield
    thread.join()
    assert text[-2:] == ["data: [DONE]", ""]
    finish = json.loads(text[-4].removeprefix("data: "))
    assert finish["choices"][0]["finish_reason"] == "length"


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def jpeg_half() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((300, 300), 60).save(buffer, "JPEG")
    return buffer.getvalue()[: buffer.tell() // 2]


BAD_IMAGES = [
    ("data:image/png;base64", "comma"),
    ("data:image/png;base64,", "nothing after"),
    ("data:image/png;base64,!!!!", "not base64"),
    (url(b"this is no picture at all"), "format"),
    (url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "PNG"),
    (url(jpeg_half(), "image/jpeg"), "incomplete"),
    (url(png(30_000, 30_000, "1")), "64000000"),
    ("ftp://example.com/cat.png", "scheme"),
    ("file:///etc/hostname", "opens no files"),
    ("/etc/hostname", "opens no files"),
    ("../cat.png", "paths are not opened"),
    ("http://127.0.0.1/cat.png", "127.0.0.1: it is not public"),
    ("http://169.254.169.254/latest", "169.254.169.254: it is not public"),
    ("http://[::1]/", "::1: it is not public"),
    ("http://0x7f000001/", "form that is not accepted"),
    ("http://2130706433/", "not"),
    ("http://127.0.0.1:8000/health", "port 8000"),
    ("", ""),
]


@pytest.mark.parametrize(("image", "reason"), BAD_IMAGES, ids=[image[:40] for image, _ in BAD_IMAGES])
def test_bad_images(client: httpx.Client, image: str, reason: str) -> None:
    error = refused(client.post(CHAT, json=chat_body("x", image)))
    assert error["param"] == "messages[0].content[0].image_url"
    assert error["code"] == "invalid_image"
    assert reason in error["message"]


@pytest.mark.parametrize(
    "image",
    [
        pytest.param(url(png(8, 8), "image/jpeg"), id="wrong kind"),
        pytest.param("data:;base64," + base64.b64encode(png(8, 8)).decode(), id="no kind"),
        pytest.param(data_url(Image.new("P", (8, 8)), "GIF"), id="gif"),
        pytest.param(colour(10_000, 1), id="very wide"),
        pytest.param(colour(1, 10_000), id="very tall"),
    ],
)
def test_odd_images_that_are_fine(client: httpx.Client, image: str) -> None:
    assert client.post("/tokenize", json={"messages": chat_body("x", image)["messages"]}).status_code == 200


def test_too_many_images(client: httpx.Client) -> None:
    error = refused(client.post(CHAT, json=chat_body("x", *[colour(8, 8)] * 17)))
    assert "17" in error["message"] and "16" in error["message"]
    assert error["code"] == "too_many_images"


def test_prompt_longer_than_the_context(client: httpx.Client) -> None:
    error = refused(client.post(CHAT, json=chat_body("x y " * 20_000, colour())))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "text tokens" in error["message"] and "image slots" in error["message"] and "4096" in error["message"]


def test_images_that_do_not_fit_and_that_just_do(client: httpx.Client) -> None:
    body = chat_body("x", *[colour(8, 8)] * 10)
    error = refused(client.post(CHAT, json=body))
    assert error["code"] == "context_length_exceeded"
    assert "4210 image slots (421 + 421" in error["message"]
    fits = client.post("/tokenize", json={"messages": chat_body("x", *[colour(8, 8)] * 9)["messages"]}).json()
    assert fits["count"] < fits["max_model_len"]


def test_more_tokens_than_there_is_room(client: httpx.Client) -> None:
    error = refused(client.post(CHAT, json=chat_body("x", max_tokens=100_000)))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    error = refused(client.post(CHAT, json=chat_body("x", max_tokens=None, min_tokens=100_000)))
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 2),
        ("logit_bias", {"999999999": 5}),
        ("stop_token_ids", [999_999_999]),
        ("stop_token_ids", [-1]),
        ("logprobs", 10**6),
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("unknown_field", 1),
        ("messages", []),
        ("messages", "x"),
        ("messages", [{"role": "system", "content": "only"}]),
    ],
    ids=str,
)
def test_bad_fields(client: httpx.Client, field: str, value: Any) -> None:
    error = refused(client.post(CHAT, json={**chat_body("x"), field: value}))
    assert error["param"] == field


def test_the_place_of_a_bad_key_is_its_own_and_short(client: httpx.Client) -> None:
    for body, param in (
        ({"logit_bias": {"01": 1}}, "logit_bias.01"),
        ({"logit_bias": {"x" * 10_000: 1}}, "logit_bias." + "x" * 189),
        ({"[key]": 1}, "[key]"),
        ({"x" * 10_000: 1}, "x" * 200),
    ):
        assert refused(client.post(CHAT, json={**chat_body("x"), **body}))["param"] == param


def test_nan_and_infinity(client: httpx.Client) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = json.dumps(chat_body("x")).replace('"temperature": 0', f'"temperature": {number}')
        assert number in body
        refused(client.post(CHAT, content=body, headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"{", b"", b"[" * 10_000, b"\xff\xfe", b'{"a": {"b"', b"[1]", b"null"])
def test_bodies_that_are_no_json_object(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body, headers={"Content-Type": "application/json; charset=utf-8"}))


def test_deep_nesting_within_a_field(client: httpx.Client) -> None:
    body = json.dumps(chat_body("x"))[:-1] + ', "metadata": {"a":' + "[" * 10_000 + "]" * 10_000 + "}}"
    refused(client.post(CHAT, content=body, headers={"Content-Type": "application/json"}))


def test_lone_surrogates(client: httpx.Client) -> None:
    body = json.dumps(chat_body("X")).replace("X", "\\ud800")
    response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400)


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_wrong_content_type(client: httpx.Client, media_type: str | None) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    error = refused(client.post(CHAT, content=json.dumps(chat_body("x")), headers=headers), 415)
    assert "application/json" in error["message"]


def test_unknown_model_route_and_method(client: httpx.Client, server_url: str) -> None:
    error = refused(client.post(CHAT, json={**chat_body("x"), "model": "gpt-4"}), 404)
    assert error["code"] == "model_not_found" and MODEL in error["message"]
    refused(client.get("/v1/nothing"), 404)
    assert refused(client.get(CHAT), 405)["code"] == "method_not_allowed"
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key=API_KEY, max_retries=0) as api:
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=3)
    assert caught.value.param == "temperature"


def test_bodies_over_the_limit(client: httpx.Client) -> None:
    size = (32 << 20) + 1
    headers = {"Content-Type": "application/json"}
    assert refused(client.post(CHAT, content=b" " * size, headers=headers), 413)["code"] == "request_too_large"
    chunks = (b" " * (1 << 20) for _ in range(33))
    refused(client.post(CHAT, content=chunks, headers=headers), 413)
    refused(client.post("/v1/caption", files={"image": b" " * size}), 413)


@pytest.mark.parametrize("value", [None, "Bearer wrong", "Bearer é", "Basic eDp5"])
def test_missing_or_wrong_key(server_url: str, value: str | None) -> None:
    headers = [] if value is None else [(b"Authorization", value.encode())]
    for path in (CHAT, "/v1/models", "/docs", "/nowhere"):
        response = httpx.post(f"{server_url}{path}", headers=headers, json=chat_body("x"))
        assert refused(response, 401)["code"] == "invalid_api_key"


def test_the_scheme_of_the_key_has_any_case(server_url: str) -> None:
    response = httpx.get(f"{server_url}/v1/models", headers={"Authorization": f"bearer {API_KEY}"})
    assert response.status_code == 200


def test_prompts_of_completions(client: httpx.Client) -> None:
    error = refused(client.post("/v1/completions", json={"model": MODEL, "prompt": [10**9]}))
    assert error["param"] == "prompt"
    error = refused(client.post("/v1/completions", json={"model": MODEL, "prompt": ["x", "y " * 9000]}))
    assert error["code"] == "context_length_exceeded"
