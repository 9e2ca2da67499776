"""API keys: every route but the open ones wants `Authorization: Bearer <key>` once a key is set.

Keys come from the settings and from a file with one a line, which is read again on request: a key can be added, the
clients moved over, and the old one taken out, without a pause.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import APIError, error_response
from server.settings import ConfigurationError, Settings

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
# Where a request's scope says whose key it has: a digest, which is no secret and no longer than any other.
CLIENT = "vl2.client"


class KeyRing:
    """The keys that are valid now, as digests: comparing these tells nothing of a key's length either."""

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises ConfigurationError when the file can't be read or has no key."""
        self._given = tuple(keys)
        self._file = file
        self._digests = self._read()

    @classmethod
    def of(cls, settings: Settings) -> KeyRing:
        return cls([key.get_secret_value() for key in settings.api_key], settings.api_key_file)

    @property
    def is_empty(self) -> bool:
        """Whether no key is wanted at all."""
        return not self._digests

    def find(self, token: bytes) -> str | None:
        """The digest of the key that this is, or None. Every key costs the same time, whichever it is."""
        digest = hashlib.sha256(token).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._digests]
        return digest.hex() if any(matches) else None

    def reload(self) -> None:
        """Read the file again. One that can't be used leaves all as it was: nobody is locked out, nothing is opened."""
        try:
            self._digests = self._read()
        except ConfigurationError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys are valid now", len(self._digests))

    def _read(self) -> tuple[bytes, ...]:
        keys = [*self._given, *(_read_keys(self._file) if self._file is not None else ())]
        return tuple({hashlib.sha256(key.encode()).digest(): None for key in keys})


def _read_keys(path: Path) -> list[str]:
    """One key a line; empty lines and those that begin with # are left out. Raises ConfigurationError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"--api-key-file: cannot read {path}: {reason}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigurationError(f"--api-key-file: {path} has no key")
    return keys


class KeyAuth:
    """Plain ASGI middleware that refuses requests without one of the keys, before their body is read."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._keys.is_empty or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        client = self._client(scope)
        if client is None:
            error = APIError(
                401,
                "Missing or wrong API key. Send it as the header `Authorization: Bearer <key>`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        scope[CLIENT] = client
        await self.app(scope, receive, send)

    def _client(self, scope: Scope) -> str | None:
        """Whose key the request has. Bytes are compared, so any header is safe."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return None
        scheme, _, token = values[0].partition(b" ")
        found = self._keys.find(token)
        return found if scheme.lower() == b"bearer" else None
