"""The page allocator: allocation, sharing, publishing, prefix lookup and eviction."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.kv.page_keys import page_key, root_key


def keys_of(tokens: list[int], size: int, salt: str = "") -> list[bytes]:
    """The keys of the full pages whose next token is known."""
    keys: list[bytes] = []
    for start in range(0, len(tokens) - size, size):
        parent = keys[-1] if keys else root_key(salt)
        keys.append(page_key(parent, tokens[start : start + size + 1]))
    return keys


def publish_pages(pages: PageAllocator, tokens: list[int]) -> list[int]:
    """Publish and return pages with all tokens but the last, as a request computes them."""
    owned = pages.allocate(pages.pages_for(len(tokens) - 1))
    assert owned is not None
    pages.publish(keys_of(tokens, pages.page_size), owned)
    return owned


def match(pages: PageAllocator, tokens: list[int], salt: str = "") -> list[int]:
    """Share and return the pages of the longest cached prefix, as at an admission."""
    shared = pages.find_prefix(keys_of(tokens, pages.page_size, salt))
    pages.share(shared)
    pages.count_query(len(tokens), shared)
    return shared


def test_all_or_nothing() -> None:
    pages = PageAllocator(3, 4)
    assert pages.allocate(4) is None and pages.num_free == 3
    owned = pages.allocate(2)
    assert owned == [0, 1] and pages.allocate(2) is None and pages.num_free == 1
    assert pages.allocate(0) == []
    pages.check_integrity([owned])
    pages.release(owned)
    pages.check_integrity([])


@pytest.mark.parametrize(("positions", "count"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_needed(positions: int, count: int) -> None:
    assert PageAllocator(3, 4).pages_for(positions) == count


def test_a_page_is_shared_only_with_its_next_token() -> None:
    pages = PageAllocator(8, 2)
    owned = publish_pages(pages, [5, 6, 7, 8, 9])
    assert match(pages, [5, 6]) == []  # The next token is unknown, and one token must be computed.
    assert match(pages, [5, 6, 7]) == owned[:1]
    assert match(pages, [5, 6, 0]) == []  # The drafter's row of token 6 has read 7.
    assert match(pages, [5, 6, 7, 8, 0]) == owned[:1]
    assert match(pages, [5, 6, 7, 8, 9, 1, 2]) == owned
    assert match(pages, [0, 6, 7, 8, 9]) == []
    pages.check_integrity([owned, owned[:1], owned[:1], owned])


def test_hits_are_counted() -> None:
    pages = PageAllocator(8, 2)
    owned = publish_pages(pages, [5, 6, 7, 8, 9])
    assert match(pages, [5, 6, 7, 0]) == owned[:1]
    assert (pages.queried_tokens, pages.hit_tokens) == (4, 2)
    assert pages.find_prefix(keys_of([5, 6, 7, 8, 9], 2)) == owned  # A lookup alone does not count.
    assert (pages.queried_tokens, pages.hit_tokens) == (4, 2)
    pages.check_integrity([owned, owned[:1]])


def test_free_pages_beside_shared_ones() -> None:
    pages = PageAllocator(4, 2)
    owned = publish_pages(pages, [1, 2, 3, 4, 5])
    assert (pages.num_free, pages.free_beside(owned)) == (2, 2)
    pages.release(owned)
    assert (pages.num_free, pages.free_beside(owned), pages.free_beside(owned[:1])) == (4, 2, 3)


def test_different_salts_share_nothing() -> None:
    pages = PageAllocator(8, 2)
    tokens = [5, 6, 7, 8, 9]
    plain = publish_pages(pages, tokens)
    salted = pages.allocate(2)
    assert salted is not None
    pages.publish(keys_of(tokens, 2, "a"), salted)
    assert match(pages, tokens) == plain and match(pages, tokens, "a") == salted
    assert match(pages, tokens, "b") == []
    assert len({root_key(salt) for salt in ("", "a", "b")}) == 3


def test_unverified_pages_are_cleaned_once() -> None:
    pages = PageAllocator(4, 2)
    aborted, finished = pages.allocate(2), pages.allocate(2)
    assert aborted is not None and finished is not None
    pages.release(aborted, verified=False)
    pages.release(finished)
    owned = pages.allocate(4)
    assert owned is not None and sorted(pages.take_unverified(owned)) == sorted(aborted)
    assert pages.take_unverified(owned) == []


def test_publishing_is_idempotent_and_incremental() -> None:
    pages = PageAllocator(8, 2)
    owned = pages.allocate(3)
    assert owned is not None
    tokens = [1, 2, 3, 4, 5, 6, 7]
    for known in (1, 3, 3, 4, 7):
        pages.publish(keys_of(tokens[:known], 2), owned)
        assert len(pages.prefix_table) == (known - 1) // 2
    assert match(pages, [*tokens, 0]) == owned


def test_a_second_page_of_the_same_prefix_stays_private() -> None:
    pages = PageAllocator(4, 2)
    first, second = publish_pages(pages, [1, 2, 3]), publish_pages(pages, [1, 2, 3])
    pages.release(second)
    assert (len(pages.fresh), len(pages.idle)) == (3, 0)
    assert match(pages, [1, 2, 3]) == first
    pages.check_integrity([first, first])


def test_a_private_page_replaces_an_evicted_one() -> None:
    pages = PageAllocator(2, 2)
    first, second = publish_pages(pages, [1, 2, 3]), publish_pages(pages, [1, 2, 3])
    pages.release(first)
    assert pages.allocate(1) == first and not pages.prefix_table
    pages.release(second)
    assert match(pages, [1, 2, 3]) == second
    pages.check_integrity([first, second])


def test_least_recently_used_pages_are_evicted_from_the_end() -> None:
    pages = PageAllocator(4, 2)
    old, new = publish_pages(pages, [1, 1, 1, 1, 1]), publish_pages(pages, [2, 2, 2, 2, 2])
    pages.release(old)
    pages.release(new)
    assert pages.num_free == 4
    taken = pages.allocate(1)
    # This match uses the old page again.
    assert taken == old[1:] and match(pages, [1, 1, 1, 1, 1]) == old[:1]
    pages.release(old[:1])
    assert pages.allocate(1) == new[1:]
    pages.check_integrity([[old[1]], [new[1]]])


def test_misuse_raises() -> None:
    pages = PageAllocator(2, 2)
    owned = pages.allocate(1)
    assert owned is not None
    with pytest.raises(AssertionError, match="differ from what requests hold"):
        pages.check_integrity([])
    with pytest.raises(AssertionError, match="holds a page twice"):
        pages.check_integrity([owned * 2])
    pages.release(owned)
    with pytest.raises(AssertionError, match="more often than"):
        pages.release(owned)
    with pytest.raises(AssertionError, match="fresh"):
        pages.share(owned)
    pages.fresh.pop()
    with pytest.raises(AssertionError, match="lost"):
        pages.check_integrity([])


@given(
    st.integers(1, 4),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12),
)
def test_cached_prefixes_have_the_same_tokens(size: int, prompts: list[list[int]]) -> None:
    pages, written, holders = PageAllocator(8, size), dict[int, list[int]](), []
    for tokens in prompts:
        owned = match(pages, tokens)
        for i, page in enumerate(owned):
            assert written[page] == tokens[: (i + 1) * size + 1]
        more = pages.allocate(pages.pages_for(len(tokens) - 1) - len(owned))
        if more is None:
            pages.release(owned)
            continue
        owned += more
        for i, page in enumerate(owned):
            written[page] = tokens[: (i + 1) * size + 1]
        pages.publish(keys_of(tokens, size), owned)
        holders.append(owned)
        if len(holders) > 2:
            pages.release(holders.pop(random.Random(len(tokens)).randrange(3)))
        pages.check_integrity(holders)
