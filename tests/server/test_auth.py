"""Keys from a file, and their rotation. What KeyAuth refuses is tested with the other middleware."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import SecretStr

from server.auth import KeyRing
from server.settings import ConfigurationError, Settings


def key_file(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_of_the_file_and_of_the_settings_are_valid_together(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# those of the first floor\n\n  one  \r\nclé\n")
    keys = KeyRing.of(Settings(api_key=(SecretStr("given"),), api_key_file=path))
    for key in ("one", "clé", "given"):
        assert keys.find(key.encode())
    for key in ("", "# those of the first floor", "  one  ", "On", "two"):
        assert keys.find(key.encode()) is None
    assert len({keys.find(b"one"), keys.find("clé".encode()), keys.find(b"given")}) == 3


def test_rotation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = key_file(tmp_path, "old-key")
    keys = KeyRing((), path)
    path.write_text("old-key\nnew-key\n")
    assert keys.find(b"new-key") is None
    with caplog.at_level(logging.INFO):
        keys.reload()
        assert keys.find(b"old-key") and keys.find(b"new-key")
        path.write_text("new-key\n")
        keys.reload()
        assert keys.find(b"old-key") is None and keys.find(b"new-key")
    assert "2 API keys are valid now" in caplog.text
    assert "-key" not in caplog.text.replace("--api-key-file", "")


@pytest.mark.parametrize("text", ["", "\n# none\n", None])
def test_a_file_without_keys_opens_nothing(tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture) -> None:
    path = key_file(tmp_path, "key")
    keys = KeyRing((), path)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match="--api-key-file"):
        KeyRing(["other"], path)
    keys.reload()
    assert keys.find(b"key") and not keys.is_empty
    assert "stay as they were" in caplog.text


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        KeyRing((), path)
