"""Names of page contents: equal for equal prefixes only."""

from collections.abc import Sequence

import pytest

from server.engine.prefix import ContentKeys
from server.engine.request import Request, RequestImage, SamplingParams

IMAGE_TOKEN = 9


def keys_of(
    tokens: list[int],
    images: Sequence[tuple[int, int, bytes]] = (),
    *,
    salt: bytes = b"s",
    cache_salt: str = "",
) -> list[bytes]:
    names = ContentKeys(page_size=4, salt=salt)
    root = names.root(cache_salt)
    request = Request(
        "r",
        tokens,
        SamplingParams(max_tokens=1),
        seed=0,
        images=[RequestImage(start, n, 1, 1, names.picture(root, digest, 1, 1), b"") for start, n, digest in images],
        root_key=root,
    )
    names.extend(request)
    return request.page_keys


def common(first: list[bytes], second: list[bytes]) -> int:
    """Length of the common prefix; behind it, nothing may be equal."""
    same = [a == b for a, b in zip(first, second, strict=True)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def test_only_whole_pages_have_names_of_256_bits() -> None:
    assert [len(keys_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(key) == 32 for key in keys_of(list(range(8))))


@pytest.mark.parametrize("place", range(12))
def test_a_changed_token_changes_its_page_and_all_after_it(place: int) -> None:
    tokens = list(range(12))
    changed = [*tokens[:place], 99, *tokens[place + 1 :]]
    assert common(keys_of(tokens), keys_of(changed)) == place // 4


def test_equal_pages_at_other_places_have_other_names() -> None:
    assert len(set(keys_of([1, 2, 3, 4] * 3))) == 3


def test_pictures_under_the_same_tokens_tell_pages_apart() -> None:
    tokens = [1, 2, *[IMAGE_TOKEN] * 8, 3, 4]
    red = keys_of(tokens, [(2, 8, b"red")])
    assert common(red, keys_of(tokens, [(2, 8, b"red")])) == 3
    assert common(red, keys_of(tokens, [(2, 8, b"blue")])) == 0
    assert common(red, keys_of(tokens)) == 0  # typed image tokens
    pair = keys_of(tokens, [(2, 4, b"red"), (6, 4, b"blue")])
    assert common(pair, keys_of(tokens, [(2, 4, b"blue"), (6, 4, b"red")])) == 0
    assert common(pair, keys_of(tokens, [(2, 4, b"red"), (6, 4, b"red")])) == 1
    assert common(red, keys_of(tokens, [(3, 7, b"red")])) == 0


def test_salts_part_tenants_and_deployments() -> None:
    tokens = list(range(8))
    assert common(keys_of(tokens), keys_of(tokens, cache_salt="a")) == 0
    assert common(keys_of(tokens), keys_of(tokens, salt=b"other")) == 0
    assert common(keys_of(tokens, cache_salt="a"), keys_of(tokens, cache_salt="a")) == 2


def test_names_grow_with_the_answer() -> None:
    names = ContentKeys(page_size=4)
    request = Request("r", list(range(6)), SamplingParams(max_tokens=9), seed=0, root_key=names.root(""))
    names.extend(request)
    first = list(request.page_keys)
    request.token_ids += range(6, 13)
    names.extend(request)
    assert request.page_keys[:1] == first and len(request.page_keys) == 3
    whole = Request("w", list(range(12)), SamplingParams(max_tokens=1), seed=0, root_key=names.root(""))
    names.extend(whole)
    assert whole.page_keys == request.page_keys
