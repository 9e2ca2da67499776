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


def test_named_pages_are_found_shared_and_counted_by_holder() -> None:
    pool = PagePool(num_pages=4, page_size=64)
    pages = pool.allocate(3)
    pool.name(pages[0], b"a")
    pool.name(pages[1], b"b")
    assert pool.find([b"a", b"b", b"c"]) == pages[:2]
    assert pool.find([b"x", b"a"]) == []
    pool.share(pages[:2])
    pool.free(pages)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check_integrity(pages[:2])
    pool.free(pages[:2])
    assert (pool.num_free, pool.num_cached) == (4, 2)
    pool.check_integrity([])
    assert pool.num_free_without(pages[:2]) == 2


def test_blank_pages_go_first_then_the_end_of_what_was_given_up_longest_ago() -> None:
    pool = PagePool(num_pages=5, page_size=64)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, key in zip(old + new, (b"o1", b"o2", b"n1", b"n2"), strict=True):
        pool.name(page, key)
    pool.free(old)
    pool.free(new)
    assert pool.allocate(1) == [4]
    assert pool.allocate(2) == [old[1], old[0]]
    assert pool.find([b"n1", b"n2"]) == new and pool.find([b"o1"]) == []
    pool.share(new)
    with pytest.raises(PagePoolError, match="1 pages wanted, 0 of 5 free"):
        pool.allocate(1)


def test_a_content_has_one_page_and_a_forgotten_page_none() -> None:
    pool = PagePool(num_pages=3, page_size=64)
    first, second, third = pool.allocate(3)
    pool.name(first, b"a")
    pool.name(second, b"a")
    assert pool.find([b"a"]) == [first]
    pool.free([second])
    assert pool.num_cached == 0
    pool.forget([first])
    assert pool.find([b"a"]) == []
    pool.name(third, b"a")
    assert pool.find([b"a"]) == [third]
    pool.free([first, third])
    assert pool.num_cached == 1
    pool.check_integrity([])
    with pytest.raises(PagePoolError, match="named without a holder"):
        pool.name(first, b"b")


def test_a_cached_page_counts_as_used_when_its_content_is_computed_again() -> None:
    pool = PagePool(num_pages=3, page_size=64)
    first, second = pool.allocate(2)
    pool.name(first, b"a")
    pool.name(second, b"b")
    pool.free([first])
    pool.free([second])
    (again,) = pool.allocate(1)
    pool.name(again, b"a")
    assert pool.allocate(1) == [second]
    assert pool.find([b"a"]) == [first]


def test_integrity_sees_names_that_do_not_match() -> None:
    pool = PagePool(num_pages=3, page_size=64)
    pages = pool.allocate(2)
    pool.name(pages[0], b"a")
    del pool._page_of[b"a"]
    with pytest.raises(PagePoolError, match="0 names for 1 named pages"):
        pool.check_integrity(pages)


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="0 pages of 64"):
        PagePool(num_pages=0, page_size=64)
