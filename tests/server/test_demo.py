"""The demo model tells the truth about the example pictures, over HTTP."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.config import load_config
from server.settings import DEFAULT_MODEL
from tests.conftest import chat_body

DATA = Path(__file__).parents[1] / "data"
ENTRIES: list[dict[str, Any]] = json.loads((DATA / "captions.json").read_text(encoding="utf-8"))


def ids(entry: dict[str, Any]) -> str:
    return f"{'+'.join(entry['files'])}: {entry['question']}"


def data_url(name: str) -> str:
    return f"data:image/png;base64,{base64.b64encode((DATA / name).read_bytes()).decode()}"


def ask(client: httpx.Client, entry: dict[str, Any]) -> str:
    body = chat_body(entry["question"], *map(data_url, entry["files"]), max_tokens=60)
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    answer: str = choice["message"]["content"]
    return answer


def missing_facts(entry: dict[str, Any], answer: str) -> list[str]:
    """The facts that an answer lacks. Quoted text must be right to the letter, all else whatever its case."""
    return [
        fact for fact in entry["facts"] if fact not in answer and ('"' in fact or fact.lower() not in answer.lower())
    ]


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry["needs_tiles"]], ids=ids)
def test_facts(entry: dict[str, Any], client: httpx.Client) -> None:
    answer = ask(client, entry)
    assert not missing_facts(entry, answer), answer


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry["needs_tiles"]], ids=ids)
def test_facts_that_need_tiles(entry: dict[str, Any], client: httpx.Client) -> None:
    """Small print in a large picture, and pairs of pictures: for a model trained with several tiles."""
    if len(load_config(DEFAULT_MODEL).candidate_resolutions) < 2:
        pytest.skip("the served demo checkpoint has one candidate resolution: it was trained on single tiles")
    answer = ask(client, entry)
    assert not missing_facts(entry, answer), answer


@pytest.mark.parametrize("entry", ENTRIES, ids=ids)
def test_stated_answers_hold_their_facts(entry: dict[str, Any]) -> None:
    assert not missing_facts(entry, entry["answer"])
    assert all((DATA / name).is_file() for name in entry["files"])


def test_caption_of_an_uploaded_picture(client: httpx.Client) -> None:
    entry = next(entry for entry in ENTRIES if entry["question"] == "Describe this image.")
    files = {"image": (entry["files"][0], (DATA / entry["files"][0]).read_bytes())}
    response = client.post("/v1/caption", files=files)
    assert response.status_code == 200, response.text
    assert not missing_facts(entry, response.json()["caption"])
