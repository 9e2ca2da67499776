"""A picture's file to its tiles, remembered for the next question about it.

Decoding and cutting a picture takes tens of milliseconds, which is most of the time to the first token when the engine
still has the picture's pages. What is remembered is found by the file's bytes (SHA-256) and the request's cache salt,
so that nobody can learn by the clock what was sent under another salt. Bounded in bytes; what was not asked for longest
goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from threading import Lock

from cachetools import LRUCache

from model.image import Size, TiledImage, tile_image
from server.media import decode_image

CACHE_BYTES = 128 << 20
"""40 pictures of 7 tiles."""


class PictureCache:
    """For many threads at once; two that ask for the same new picture both make it."""

    def __init__(self, candidates: Sequence[Size], *, max_pixels: int, most_bytes: int = CACHE_BYTES) -> None:
        """`candidates` as in `model.image.tile_grid`, `max_pixels` as in `server.media.decode_image`."""
        self._candidates = candidates
        self._max_pixels = max_pixels
        self._lock = Lock()
        self._known: LRUCache[tuple[bytes, bool, str], TiledImage] = LRUCache(
            most_bytes, lambda image: image.tiles.nbytes
        )

    def load(self, file: bytes, *, tiled: bool, salt: str = "") -> TiledImage:
        """The tiles of an image file. Raises MediaError for one that cannot be used."""
        key = (hashlib.sha256(file).digest(), tiled, salt)
        with self._lock:
            known: TiledImage | None = self._known.get(key)
        if known is not None:
            return known
        image = tile_image(decode_image(file, max_pixels=self._max_pixels), self._candidates, tiled=tiled)
        with self._lock:
            if image.tiles.nbytes <= self._known.maxsize:
                self._known[key] = image
        return image
