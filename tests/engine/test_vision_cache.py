"""The books of the vision cache."""

import pytest

from server.engine.request import RequestImage
from server.engine.vision_cache import VisionCache, VisionCacheError


def image(key: str, slots: int = 10) -> RequestImage:
    """Of two tiles."""
    return RequestImage(0, slots, 1, 1, key.encode(), b"tiles")


def encode(*images: RequestImage) -> None:
    for shown in images:
        assert shown.picture is not None
        shown.picture.encoded_tiles = 2


def test_a_picture_is_shared_from_the_first_moment() -> None:
    cache = VisionCache(100)
    first, second = image("a"), image("a")
    assert cache.hold([first]) and cache.hold([second])
    assert first.picture is second.picture is not None and first.picture.tiles == b"tiles"
    assert first.tiles == second.tiles == b"" and cache.num_hits == 1
    cache.check_integrity([first, second])
    cache.release([first])
    assert cache.take_dropped() == []
    cache.release([second])
    assert cache.take_dropped() == [b"a"]  # never whole: not worth keeping
    cache.check_integrity([])


def test_whole_pictures_are_kept_and_the_one_given_up_longest_ago_makes_room() -> None:
    cache = VisionCache(25)
    a, b = image("a"), image("b")
    assert cache.hold([a]) and cache.hold([b])
    encode(a, b)
    cache.release([b])
    cache.release([a])
    again = image("b")
    assert cache.hold([again]) and cache.num_hits == 1
    cache.release([again])
    assert cache.hold([image("c")])
    assert cache.take_dropped() == [b"a"]
    assert cache.take_dropped() == []


def test_pictures_in_use_never_make_room() -> None:
    cache = VisionCache(25)
    held = [image("a"), image("b")]
    assert cache.hold(held)
    encode(*held)
    wanted = [image("a"), image("c")]
    assert not cache.hold(wanted)
    assert all(shown.picture is None and shown.tiles for shown in wanted) and cache.num_hits == 0
    cache.check_integrity([*held, *wanted])
    cache.release(held[1:])
    assert cache.hold(wanted)
    cache.check_integrity([held[0], *wanted])


def test_one_request_may_show_a_picture_twice() -> None:
    cache = VisionCache(10)
    images = [image("a"), image("a")]
    assert cache.hold(images)
    cache.check_integrity(images)
    encode(*images)
    cache.release(images)
    assert cache.take_dropped() == []
    cache.check_integrity([])


def test_releasing_a_request_that_was_never_admitted_frees_its_tiles() -> None:
    shown = image("a")
    VisionCache(10).release([shown])
    assert shown.tiles == b""


def test_integrity_sees_a_lost_hold() -> None:
    cache = VisionCache(30)
    held = [image("a"), image("b")]
    cache.hold(held)
    with pytest.raises(VisionCacheError, match="holders of 2 pictures"):
        cache.check_integrity(held[:1])
