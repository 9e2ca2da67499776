"""Fonts, a small tokenizer and scenes, made once for the demo's tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.demo.fonts import FontError, Fonts, find_fonts
from model.demo.rows import Wording
from model.demo.tokenizer import build_tokenizer, corpus
from model.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def fonts() -> Fonts:
    """The system's fonts, or those of the folder that DEMO_FONTS names."""
    folder = os.environ.get("DEMO_FONTS")
    try:
        return find_fonts(Path(folder) if folder else None)
    except FontError as error:
        pytest.skip(f"the demo's pictures need their fonts: {error}")


@pytest.fixture(scope="session")
def tokenizer_folder(fonts: Fonts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from model.demo.tokenizer import save_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(build_tokenizer(corpus(fonts, 7, 250)), folder)
    yield folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder)


@pytest.fixture(scope="session")
def wording(tokenizer: Tokenizer) -> Wording:
    return Wording(tokenizer)
