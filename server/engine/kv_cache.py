"""The page pool: which pages of the KV cache are free, and how many hold each of the others.

Numbers only; the tensors are the runner's. A page has one holder today. The count is what lets requests
share the pages of a common prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PagePoolError(RuntimeError):
    """The pool's books do not balance: a bug, never the user's doing."""


class PagePool:
    """`num_pages` pages of `page_size` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and tokens in them, got {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages; PagePoolError if there are fewer (callers look at `num_free` first)."""
        if count > len(self._free):
            raise PagePoolError(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give up one hold on each page; the last holder's goes back to the pool."""
        for page in pages:
            if self._holders[page] == 0:
                raise PagePoolError(f"page {page} freed twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise PagePoolError unless `held` (every holder's pages, one after the other) and the free list account
        for every page."""
        holders = [0] * self.num_pages
        for page in held:
            holders[page] += 1
        if holders != self._holders:
            wrong = [page for page in range(self.num_pages) if holders[page] != self._holders[page]]
            raise PagePoolError(f"holders of {len(wrong)} pages differ from the pool's count, first page {wrong[0]}")
        free = sorted(self._free)
        if free != [page for page in range(self.num_pages) if holders[page] == 0]:
            raise PagePoolError(f"{len(free)} pages on the free list, {holders.count(0)} without a holder")
