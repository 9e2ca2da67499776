"""`vl2 caption` and `vl2 chat`: HTTP clients of a running server, or of one that lives as long as the command."""

from __future__ import annotations

import base64
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from server.errors import StartupError
from server.logs import configure_logging
from server.settings import Settings, quiet

# A caption on a slow CPU, or a full queue, takes its time; a server that is not there says so at once.
TIMEOUT = httpx.Timeout(600, connect=10)


@contextmanager
def connect(settings: Settings, base_url: str | None) -> Iterator[httpx.Client]:
    """A client of the server at `base_url`, or of a private one made for it. Raises StartupError."""
    if base_url is not None:
        key = settings.api_key[0].get_secret_value() if settings.api_key else None
        with _client(base_url, key) as client:
            yield client
        return
    from server.serve import BackgroundServer  # with all that a server needs

    # Other people on this machine can reach the port, so it has a key of its own.
    key = secrets.token_urlsafe(16)
    private = settings.model_copy(update={"api_key": (SecretStr(key),)})
    with BackgroundServer(private) as server, _client(server.url, key) as client:
        yield client


def _client(base_url: str, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=base_url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT)


def caption_files(
    settings: Settings, files: Sequence[Path], *, base_url: str | None, prompt: str | None, max_tokens: int | None
) -> bool:
    """Print a caption for each file, after its name if there are several. Whether all went well."""
    settings = quiet(settings)
    configure_logging(settings.log_level, settings.log_format)
    fields: dict[str, str] = {}
    if prompt is not None:
        fields["prompt"] = prompt
    if max_tokens is not None:
        fields["max_tokens"] = str(max_tokens)
    well = True
    try:
        with connect(settings, base_url) as client:
            for file in files:
                label = f"{file}: " if len(files) > 1 else ""
                response = client.post("/v1/caption", files={"image": (file.name, file.read_bytes())}, data=fields)
                if response.status_code == 200:
                    print(label + response.json()["caption"], flush=True)
                else:
                    well = False
                    print(f"error: {file}: {_reason(response)}", file=sys.stderr)
    except (StartupError, httpx.TransportError, httpx.InvalidURL) as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return well


def chat_loop(settings: Settings, *, base_url: str | None, temperature: float) -> bool:
    """Read lines and print answers until the input ends. Whether there was a server to talk to up to then."""
    settings = quiet(settings)
    configure_logging(settings.log_level, settings.log_format)
    try:
        with connect(settings, base_url) as client:
            model = _checked(client.get("/v1/models")).json()["data"][0]["id"]
            print(f"{model}: type a question; /image FILE, /reset, /quit", file=sys.stderr)
            _Conversation(client, model, temperature).run()
    except (StartupError, httpx.TransportError, httpx.InvalidURL, _Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


class _Refused(Exception):
    """The server answered with an error."""


class _Conversation:
    def __init__(self, client: httpx.Client, model: str, temperature: float) -> None:
        self._client = client
        self._model = model
        self._temperature = temperature
        self._messages: list[dict[str, Any]] = []
        self._parts: list[dict[str, Any]] = []

    def run(self) -> None:
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            command, _, argument = line.partition(" ")
            if command == "/quit":
                return
            if command == "/reset":
                self._messages, self._parts = [], []
            elif command == "/image":
                self._add_image(Path(argument.strip()).expanduser())
            elif command.startswith("/"):
                print("error: the commands are /image FILE, /reset and /quit", file=sys.stderr)
            elif line:
                self._ask(line)

    def _add_image(self, path: Path) -> None:
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return
        self._parts.append({"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}})

    def _ask(self, text: str) -> None:
        """Stream one answer.

        A question that is refused, or given up before its answer begins, leaves the conversation and the pictures that
        wait for a question as they were before.
        """
        question = {"role": "user", "content": [*self._parts, {"type": "text", "text": text}]}
        body = {
            "model": self._model,
            "messages": [*self._messages, question],
            "temperature": self._temperature,
            "stream": True,
        }
        answer = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                for delta in _deltas(_checked(response)):
                    print(delta, end="", flush=True)
                    answer += delta
        except _Refused as error:
            print(f"error: {error}", file=sys.stderr)
            return
        except KeyboardInterrupt:  # closing the stream has ended the answer on the server, too
            if not answer:
                print()
                return
        print()
        self._parts = []
        self._messages += [question, {"role": "assistant", "content": answer}]


def _deltas(response: httpx.Response) -> Iterator[str]:
    """The text in the events of a stream."""
    for line in _lines(response):
        payload = line.removeprefix("data: ")
        if not payload or payload == "[DONE]":
            continue
        event = json.loads(payload)
        if "error" in event:
            raise _Refused(event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _lines(response: httpx.Response) -> Iterator[str]:
    """The lines of a stream. httpx's own end at every character that Unicode calls a line's end, inside JSON, too."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()
    yield rest.decode()


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        response.read()
        raise _Refused(_reason(response))
    return response


def _reason(response: httpx.Response) -> str:
    """The message of an error answer, whoever sent it."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {response.status_code}"
