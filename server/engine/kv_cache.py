"""The page pool: who holds each page of the KV cache, and which contents can be found again.

Numbers and names only; the tensors are the runner's. A page is in one of three states:

- *held* by one request or by several that share it: it never changes hands;
- *cached*: held by nobody, its content known by name (see `prefix.py`) and ready to be shared again;
- *blank*: held by nobody, nothing in it worth finding.

Who needs a page gets a blank one, or the cached one that was given up longest ago. Blank and cached pages
together are the free ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class PagePoolError(RuntimeError):
    """The pool's books do not balance: a bug, never the user's doing."""


class PagePool:
    """`num_pages` pages of `page_size` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and tokens in them, got {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._blank = deque(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # given up longest ago first
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix of `keys`. They are not held yet: `share` them before anything else."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_free_without(self, pages: Iterable[int]) -> int:
        """How many pages would be free if these were held."""
        return self.num_free - sum(self._holders[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Take a hold on pages that were just found."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages; PagePoolError if there are fewer (callers look at `num_free` first)."""
        if count > self.num_free:
            raise PagePoolError(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        pages = [self._blank.popleft() if self._blank else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def name(self, page: int, key: bytes) -> None:
        """Make a held page, complete and never to be written again, known by its content.

        If another page has this content already, that one stays known, as if it had been used just now, and this one
        is blank when it is given up.
        """
        if self._holders[page] == 0:
            raise PagePoolError(f"page {page} named without a holder")
        known = self._page_of.setdefault(key, page)
        if known == page:
            self._key_of[page] = key
        elif known in self._cached:
            self._cached.move_to_end(known)

    def forget(self, pages: Iterable[int]) -> None:
        """Make held pages unknown, so that nobody else comes to share them."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._page_of[key]

    def free(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page of a sequence.

        The last pages are given up first and so evicted first: without the earlier ones they could not be found.
        """
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise PagePoolError(f"page {page} freed twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._blank.append(page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise PagePoolError unless `held` (every holder's pages, one after the other), the blank and the cached
        pages account for every page, and the names for every cached one."""
        holders = [0] * self.num_pages
        for page in held:
            holders[page] += 1
        if holders != self._holders:
            wrong = [page for page in range(self.num_pages) if holders[page] != self._holders[page]]
            raise PagePoolError(f"holders of {len(wrong)} pages differ from the pool's count, first page {wrong[0]}")
        free = sorted([*self._blank, *self._cached])
        if free != [page for page in range(self.num_pages) if holders[page] == 0]:
            raise PagePoolError(f"{len(free)} pages blank or cached, {holders.count(0)} without a holder")
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise PagePoolError(f"{len(self._page_of)} names for {len(self._key_of)} named pages, or not the same")
        if not self._key_of.keys() >= self._cached.keys() or not self._key_of.keys().isdisjoint(self._blank):
            raise PagePoolError("a cached page has no name, or a blank one has")

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self.forget([page])
        return page
