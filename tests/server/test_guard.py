"""The whole application's middleware together: preflights, keys, limits and headers, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from server.app import create_app
from server.settings import ConfigurationError, Settings, load_settings
from tests.server.test_middleware import call

KEY = "a-key"
ORIGIN = "https://app.example.org"


def guarded(**settings: Any) -> FastAPI:
    return create_app(Settings(api_key=(SecretStr(KEY),), **settings))


def preflight(app: FastAPI, origin: str) -> Any:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return call(app, "OPTIONS", "/v1/chat/completions", headers=headers)


def test_preflights_need_no_key_and_only_listed_origins_pass() -> None:
    app = guarded(allowed_origins=(ORIGIN, "http://localhost:3000"))
    for origin in (ORIGIN, "http://localhost:3000"):
        answer = preflight(app, origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    for origin in ("https://evil.example", f"{ORIGIN}.evil.example", "null"):
        assert "access-control-allow-origin" not in preflight(app, origin).headers


def test_a_page_can_read_why_it_was_refused() -> None:
    answer = call(guarded(allowed_origins=(ORIGIN,)), "POST", "/tokenize", headers={"Origin": ORIGIN})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


def test_without_origins_no_page_may_call() -> None:
    assert preflight(guarded(), ORIGIN).status_code == 401
    assert "access-control-allow-origin" not in call(guarded(), "GET", "/docs", headers={"Origin": ORIGIN}).headers


def test_any_origin() -> None:
    assert preflight(guarded(allowed_origins=("*",)), "null").headers["access-control-allow-origin"] == "*"


def test_every_answer_has_the_headers() -> None:
    app = guarded(rate_limit="2/day")
    key = {"Authorization": f"Bearer {KEY}"}
    answers = [call(app, "GET", "/nowhere", headers=headers) for headers in ({}, key, key, key)]
    assert [answer.status_code for answer in answers] == [401, 404, 404, 429]
    answers.append(call(app, "GET", "/nowhere", headers={"X-Long": "a" * 40_000}))
    assert answers[-1].status_code == 431
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert len(answer.headers["x-request-id"]) == 32
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate_limit", "many"),
        ("rate_limit", "0.5/minute"),
        ("allowed_origins", "example.org"),
        ("allowed_origins", "https://example.org/path"),
        ("allowed_origins", "https://a.example,"),
        ("read_timeout", 0),
        ("max_header_bytes", 10),
        ("max_requests_per_client", 0),
    ],
)
def test_limits_that_make_no_sense(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="--" + name.replace("_", "-")):
        load_settings({name: value})
