"""PageAllocator: KV pages of target and drafter, and the prefixes that requests share.

A page holds `page_size` positions of both models. Page i of a request holds positions
i * page_size .. (i + 1) * page_size - 1. The drafter's row at position j reads token j + 1, so a
page may be shared only where its tokens, all tokens before it and the one token right after it are
the same. Its key is a hash chain over exactly these:

    page_size 2, tokens 5 6 7 8 9
    key 0 = H(root, 5 6, 7)
    key 1 = H(key 0, 7 8, 9)
    token 9 is not in a full page

A page is in one of three states:

    fresh    no request holds it, and its contents do not matter
    held     its reference count is above 0; it has a key once it is full, and it is in the prefix
             table unless another page had that key before
    idle     in the prefix table, but held by no request; when no page is fresh, the idle page that
             was unused for longest is evicted
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 32  # 256 bits: equal keys are taken for equal prefixes.
ROOT_KEY = bytes(KEY_BYTES)


class PageAllocator:
    def __init__(self, num_pages: int, page_size: int, caching: bool = True) -> None:
        """`caching`: whether requests share prefixes."""
        assert num_pages >= 1 and page_size >= 1
        self.num_pages = num_pages
        self.page_size = page_size
        self.caching = caching
        self.ref_counts = [0] * num_pages
        # Keys of full pages, whether they are in the prefix table or not.
        self.keys: list[bytes | None] = [None] * num_pages
        self.prefix_table: dict[bytes, int] = {}
        self.fresh = list(reversed(range(num_pages)))  # A stack with page 0 on top.
        self.idle: OrderedDict[int, None] = OrderedDict()  # The longest unused page comes first.
        self.queried_tokens = 0  # Tokens looked up in the prefix table.
        self.hit_tokens = 0  # Those of them that were in it.

    @property
    def num_free(self) -> int:
        """The number of pages that `allocate` can return."""
        return len(self.fresh) + len(self.idle)

    def pages_for(self, positions: int) -> int:
        """The number of pages that hold this many positions."""
        return -(-positions // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one reference each; None, and no change, if fewer are free."""
        assert count >= 0
        if count > self.num_free:
            return None
        pages = [self.fresh.pop() if self.fresh else self._evict() for _ in range(count)]
        for page in pages:
            assert self.ref_counts[page] == 0 and self.keys[page] is None
            self.ref_counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are held or idle."""
        for page in pages:
            assert self.ref_counts[page] > 0 or page in self.idle, (
                f"page {page} is fresh: there is nothing to share"
            )
            self.ref_counts[page] += 1
            self.idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page.

        The last page goes first, so that it is evicted first: it is useless without its prefix.
        """
        for page in reversed(pages):
            assert self.ref_counts[page] > 0, f"page {page} is released more often than held"
            self.ref_counts[page] -= 1
            if self.ref_counts[page] == 0:
                self._put_back(page)

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Hold and return the longest chain of published pages that `tokens` begin with.

        A page needs the token after it, so at least one token is always left to compute.
        """
        pages: list[int] = []
        for key in self._page_keys(tokens) if self.caching else ():
            if key not in self.prefix_table:
                break
            pages.append(self.prefix_table[key])
        self.share(pages)
        self.queried_tokens += len(tokens)
        self.hit_tokens += len(pages) * self.page_size
        assert not tokens or len(pages) * self.page_size < len(tokens)
        return pages

    def undo_match(self, tokens: Sequence[int], pages: list[int]) -> None:
        """Undo `match_prefix(tokens)`, which returned `pages`, counters included."""
        self.release(pages)
        self.queried_tokens -= len(tokens)
        self.hit_tokens -= len(pages) * self.page_size

    def is_sealed(self, page: int) -> bool:
        """Whether `publish` has seen this page full: it is not written until it is fresh again."""
        return self.keys[page] is not None

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make full pages shareable: `pages` hold the KV of all `tokens` but the last.

        A page whose key another page already has stays private. Publishing twice changes nothing.
        """
        if not self.caching:
            return
        full = max(0, len(tokens) - 1) // self.page_size
        assert full <= len(pages), "more tokens than their pages hold"
        sealed = full
        while sealed and self.keys[pages[sealed - 1]] is None:
            sealed -= 1
        parent_key = self.keys[pages[sealed - 1]] if sealed else ROOT_KEY
        assert parent_key is not None
        new_keys = self._page_keys(tokens, sealed, parent_key)
        for page, key in zip(pages[sealed:full], new_keys, strict=True):
            assert self.ref_counts[page] > 0 and self.keys[page] is None
            self.keys[page] = key
            self.prefix_table.setdefault(key, page)

    def unshared(self, pages: Sequence[int]) -> list[int]:
        """Those of a request's pages that no other request holds."""
        return [page for page in pages if self.ref_counts[page] == 1]

    def withdraw(self, pages: Sequence[int]) -> None:
        """Remove held pages from the prefix table, because their contents are not valid."""
        for page in pages:
            assert self.ref_counts[page] > 0
            key = self.keys[page]
            self.keys[page] = None
            if key is not None and self.prefix_table.get(key) == page:
                del self.prefix_table[key]

    def _page_keys(
        self, tokens: Sequence[int], first: int = 0, key: bytes = ROOT_KEY
    ) -> Iterator[bytes]:
        """Yield the keys of the pages from `first` on that `tokens` fill and exceed.

        `key` is the key of the page before `first`.
        """
        size = self.page_size
        for start in range(first * size, len(tokens) - size, size):
            # The tokens of the page, and the one after it.
            ids = array("q", tokens[start : start + size + 1])
            key = blake2b(key + ids.tobytes(), digest_size=KEY_BYTES).digest()
            yield key

    def _put_back(self, page: int) -> None:
        key = self.keys[page]
        # A private duplicate replaces a published page that was evicted.
        if key is not None and self.prefix_table.setdefault(key, page) == page:
            self.idle[page] = None
        else:
            self.keys[page] = None
            self.fresh.append(page)

    def _evict(self) -> int:
        page, _ = self.idle.popitem(last=False)
        key = self.keys[page]
        assert key is not None and self.prefix_table[key] == page
        del self.prefix_table[key]
        self.keys[page] = None
        return page

    def check_integrity(self, requests_pages: Iterable[list[int]]) -> None:
        """Assert that every page is in one state; `requests_pages`: the pages of each request."""
        refs: Counter[int] = Counter()
        for pages in requests_pages:
            assert len(set(pages)) == len(pages), f"a request holds a page twice: {pages}"
            refs.update(pages)
        assert self.ref_counts == [refs[page] for page in range(self.num_pages)], (
            "reference counts differ from what requests hold"
        )
        known_pages = sorted([*self.fresh, *self.idle, *refs])
        assert known_pages == list(range(self.num_pages)), "a page is lost, or in two states"
        assert all(self.keys[page] is None for page in self.fresh)
        assert all(self.keys[page] == key for key, page in self.prefix_table.items())
        idle_keys = {page: self.keys[page] or ROOT_KEY for page in self.idle}
        assert all(self.prefix_table.get(key) == page for page, key in idle_keys.items())
        assert 0 <= self.hit_tokens <= self.queried_tokens
