"""Pictures are decoded once: by the file's bytes, under the limits, and only within one cache salt."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from server import pictures
from server.media import MediaError
from server.pictures import PictureCache

CANDIDATES = ((384, 384), (768, 384), (384, 768))
TILE = 3 * 384 * 384


def png(colour: str, size: tuple[int, int] = (700, 350)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that were decoded."""
    files: list[bytes] = []
    decode = pictures.decode_image

    def watched(file: bytes, *, max_pixels: int) -> Image.Image:
        files.append(file)
        return decode(file, max_pixels=max_pixels)

    monkeypatch.setattr(pictures, "decode_image", watched)
    return files


def cache(most_bytes: int = 100 * TILE) -> PictureCache:
    return PictureCache(CANDIDATES, max_pixels=1_000_000, most_bytes=most_bytes)


def test_a_picture_is_decoded_once(decoded: list[bytes]) -> None:
    known = cache()
    first, again = known.load(png("red"), tiled=True), known.load(png("red"), tiled=True)
    assert len(decoded) == 1
    assert np.array_equal(first.tiles, again.tiles) and first.digest == again.digest
    assert (first.columns, first.rows, first.size) == (2, 1, (700, 350))


def test_other_bytes_another_cut_and_another_salt_are_not_found(decoded: list[bytes]) -> None:
    known = cache()
    known.load(png("red"), tiled=True)
    assert known.load(png("blue"), tiled=True).digest != known.load(png("red"), tiled=True).digest
    assert known.load(png("red"), tiled=False).columns == 1
    known.load(png("red"), tiled=True, salt="mine")
    assert len(decoded) == 4
    known.load(png("red"), tiled=True, salt="mine")
    assert len(decoded) == 4


def test_what_was_not_asked_for_longest_goes_first(decoded: list[bytes]) -> None:
    known = cache(most_bytes=6 * TILE)  # two pictures of three tiles
    for colour in ("red", "green", "red", "blue", "red", "green"):
        known.load(png(colour), tiled=True)
    assert [file for file in decoded] == [png(colour) for colour in ("red", "green", "blue", "green")]


def test_a_picture_larger_than_the_cache_is_served(decoded: list[bytes]) -> None:
    known = cache(most_bytes=2 * TILE)
    for _ in range(2):
        assert known.load(png("red"), tiled=True).columns == 2
    assert len(decoded) == 2


def test_what_cannot_be_used_stays_an_error() -> None:
    known = cache()
    for _ in range(2):
        with pytest.raises(MediaError, match="more than the limit"):
            known.load(png("red", (1001, 1000)), tiled=True)
        with pytest.raises(MediaError):
            known.load(b"not an image", tiled=True)


def test_many_threads_at_once() -> None:
    known = cache(most_bytes=6 * TILE)
    files = [png(colour) for colour in ("red", "green", "blue", "white", "black")]
    right = [cache().load(file, tiled=True).digest for file in files]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: known.load(files[i % 5], tiled=True).digest, range(60)))
    assert found == [right[i % 5] for i in range(60)]
