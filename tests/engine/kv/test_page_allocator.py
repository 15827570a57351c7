"""Pages: allocated, shared, published, found, evicted; never lost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.kv.page_keys import page_key, root_key


def keys_of(tokens: list[int], size: int, salt: str = "") -> list[bytes]:
    """The keys of the pages that the tokens fill and exceed."""
    keys: list[bytes] = []
    for start in range(0, len(tokens) - size, size):
        parent = keys[-1] if keys else root_key(salt)
        keys.append(page_key(parent, tokens[start : start + size + 1]))
    return keys


def published(pages: PageAllocator, tokens: list[int]) -> list[int]:
    """Pages that hold all tokens but the last, as a request would have computed them."""
    owned = pages.allocate(pages.pages_for(len(tokens) - 1))
    assert owned is not None
    pages.publish(keys_of(tokens, pages.page_size), owned)
    return owned


def match(pages: PageAllocator, tokens: list[int], salt: str = "") -> list[int]:
    """Hold and return the pages that the tokens begin with, as at an admission."""
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
    owned = published(pages, [5, 6, 7, 8, 9])
    assert match(pages, [5, 6]) == []  # its next token is not known, and one token must be left
    assert match(pages, [5, 6, 7]) == owned[:1]
    assert match(pages, [5, 6, 0]) == []  # the drafter's row of token 6 has seen 7
    assert match(pages, [5, 6, 7, 8, 0]) == owned[:1]
    assert match(pages, [5, 6, 7, 8, 9, 1, 2]) == owned
    assert match(pages, [0, 6, 7, 8, 9]) == []
    pages.check_integrity([owned, owned[:1], owned[:1], owned])


def test_hits_are_counted() -> None:
    pages = PageAllocator(8, 2)
    owned = published(pages, [5, 6, 7, 8, 9])
    assert match(pages, [5, 6, 7, 0]) == owned[:1]
    assert (pages.queried_tokens, pages.hit_tokens) == (4, 2)
    assert pages.find_prefix(keys_of([5, 6, 7, 8, 9], 2)) == owned  # A look alone does not count.
    assert (pages.queried_tokens, pages.hit_tokens) == (4, 2)
    pages.check_integrity([owned, owned[:1]])


def test_what_is_free_beside_shared_pages() -> None:
    pages = PageAllocator(4, 2)
    owned = published(pages, [1, 2, 3, 4, 5])
    assert (pages.num_free, pages.free_beside(owned)) == (2, 2)
    pages.release(owned)
    assert (pages.num_free, pages.free_beside(owned), pages.free_beside(owned[:1])) == (4, 2, 3)


def test_different_salts_share_nothing() -> None:
    pages = PageAllocator(8, 2)
    tokens = [5, 6, 7, 8, 9]
    plain = published(pages, tokens)
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


def test_publishing_twice_changes_nothing_and_goes_on_where_it_was() -> None:
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
    first, second = published(pages, [1, 2, 3]), published(pages, [1, 2, 3])
    pages.release(second)
    assert (len(pages.fresh), len(pages.idle)) == (3, 0)
    assert match(pages, [1, 2, 3]) == first
    pages.check_integrity([first, first])


def test_a_private_page_takes_the_place_of_an_evicted_one() -> None:
    pages = PageAllocator(2, 2)
    first, second = published(pages, [1, 2, 3]), published(pages, [1, 2, 3])
    pages.release(first)
    assert pages.allocate(1) == first and not pages.prefix_table
    pages.release(second)
    assert match(pages, [1, 2, 3]) == second
    pages.check_integrity([first, second])


def test_the_longest_unused_is_evicted_first_and_of_a_chain_its_end() -> None:
    pages = PageAllocator(4, 2)
    old, new = published(pages, [1, 1, 1, 1, 1]), published(pages, [2, 2, 2, 2, 2])
    pages.release(old)
    pages.release(new)
    assert pages.num_free == 4
    taken = pages.allocate(1)
    assert (
        taken == old[1:] and match(pages, [1, 1, 1, 1, 1]) == old[:1]
    )  # which makes the old one used again
    pages.release(old[:1])
    assert pages.allocate(1) == new[1:]
    pages.check_integrity([[old[1]], [new[1]]])


def test_mistakes_are_noticed() -> None:
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
def test_what_is_found_was_written_for_the_same_tokens(size: int, prompts: list[list[int]]) -> None:
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
