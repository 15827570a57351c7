"""Hypothesis strategies for request bodies that are valid except for a few random values."""

from typing import Any

from hypothesis import strategies as st

JUNK_RATE = 16  # one value of this many is junk
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "auto", "text"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "text", "name", "content"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def mostly(*right: Any) -> st.SearchStrategy[Any]:
    """One of these strategies or values, and sometimes junk."""
    options = [value if isinstance(value, st.SearchStrategy) else st.just(value) for value in right]
    return st.integers(1, JUNK_RATE).flatmap(lambda i: JUNK if i == 1 else st.one_of(options))
