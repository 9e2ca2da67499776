"""The page pool's books."""

import pytest

from server.engine.kv_cache import PagePool, PagePoolError


def test_pages_come_once_and_return() -> None:
    pool = PagePool(num_pages=5, page_size=64)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == list(range(5))
    assert pool.num_free == 0
    pool.free(first)
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == sorted(first)


def test_pages_for_rounds_up() -> None:
    pool = PagePool(num_pages=1, page_size=64)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    pool = PagePool(num_pages=2, page_size=64)
    with pytest.raises(PagePoolError, match="3 pages wanted, 2 of 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_double_free_is_an_error() -> None:
    pool = PagePool(num_pages=2, page_size=64)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(PagePoolError, match="freed twice"):
        pool.free(pages)
    with pytest.raises(PagePoolError, match="freed twice"):
        pool.free([1])


def test_integrity_sees_leaks_and_double_bookings() -> None:
    pool = PagePool(num_pages=4, page_size=64)
    pages = pool.allocate(2)
    pool.check_integrity(pages)
    with pytest.raises(PagePoolError, match="holders of 1 pages"):
        pool.check_integrity(pages[:1])
    with pytest.raises(PagePoolError, match="holders of 1 pages"):
        pool.check_integrity([*pages, pages[0]])


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="0 pages of 64"):
        PagePool(num_pages=0, page_size=64)
