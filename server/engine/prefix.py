"""Names for what a page of the KV cache holds, so that requests find each other's pages.

A page's rows depend on its tokens, on the pictures whose slots it has, and on everything before it. Its name
is therefore a hash chained over the pages of the sequence:

    root     = H(cache_salt)
    picture  = H(root, digest, columns, rows)
    page[i]  = H(page[i-1] or root, token ids, and for each picture in it: place in the page, offset in it, its name)

with H a blake2b of 256 bits, keyed with a salt drawn at the start. Names cannot be made to collide, tell
nothing about the content, mean nothing to another process, and requests with different cache_salts never
share one. A picture's digest stands for its pixels and the way it was cut into tiles, so the same text under
another picture, in another order, or cut otherwise has another name. Only whole pages have names.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array

from server.engine.request import Request

SALT_BYTES = 32


class ContentKeys:
    """Makes names for pages of `page_size` tokens."""

    def __init__(self, page_size: int, salt: bytes | None = None) -> None:
        """`salt`: for tests; by default one that nobody can guess."""
        self._page_size = page_size
        self._salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt

    def root(self, cache_salt: str) -> bytes:
        """What the names of all requests with this salt begin with."""
        return self._hash(b"root", cache_salt.encode())

    def picture(self, root: bytes, digest: bytes, columns: int, rows: int) -> bytes:
        return self._hash(b"picture", root, struct.pack("<2q", columns, rows), digest)

    def extend(self, request: Request) -> None:
        """Name the request's pages that its known tokens fill and that have no name yet."""
        keys = request.page_keys
        for index in range(len(keys), request.num_known // self._page_size):
            keys.append(self._page(request, index))

    def _page(self, request: Request, index: int) -> bytes:
        first, end = index * self._page_size, (index + 1) * self._page_size
        parts = [request.page_keys[index - 1] if index else request.root_key]
        parts.append(array("q", request.token_ids[first:end]).tobytes())
        for image in request.images:
            if image.start < end and image.end > first:
                parts += [struct.pack("<2q", max(image.start - first, 0), max(first - image.start, 0)), image.key]
        return self._hash(b"page", *parts)

    def _hash(self, kind: bytes, *parts: bytes) -> bytes:
        """Every kind has parts of fixed length but for the last, so that no two lists of parts read the same."""
        return hashlib.blake2b(b"".join(parts), digest_size=32, key=self._salt, person=kind).digest()
