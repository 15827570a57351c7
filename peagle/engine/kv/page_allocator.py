"""PageAllocator: KV pages of target and drafter, and the prefixes that requests share.

A page holds `page_size` positions of both models. Page i of a request holds positions
i * page_size .. (i + 1) * page_size - 1. Requests share a page by its key (page_keys.py). A page is
in one of three states:

    fresh    no request holds it, and its contents do not matter
    held     its reference count is above 0; it has a key once the pass that fills it is planned,
             and it is in the prefix table unless another page had that key before
    idle     in the prefix table, but held by no request; when no page is fresh, the idle page that
             was unused for longest is evicted

A page is *unverified* if it was released before the logits of the passes that wrote it were read
back: it may hold NaN. It is overwritten with zeros before its next owner uses it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from peagle.engine.kv.page_keys import ROOT_KEY


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
        self.unverified: set[int] = set()  # Released or held: see above.
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

    def release(self, pages: Sequence[int], verified: bool = True) -> None:
        """Drop a reference to each page; `verified`: their contents are known to be finite.

        The last page goes first, so that it is evicted first: it is useless without its prefix.
        """
        if not verified:
            self.unverified.update(pages)
        for page in reversed(pages):
            assert self.ref_counts[page] > 0, f"page {page} is released more often than held"
            self.ref_counts[page] -= 1
            if self.ref_counts[page] == 0:
                self._put_back(page)

    def take_unverified(self, pages: Sequence[int]) -> list[int]:
        """Those of `pages` that may hold NaN. The caller overwrites them: they count as clean."""
        if not self.unverified:
            return []
        dirty = [page for page in pages if page in self.unverified]
        self.unverified.difference_update(dirty)
        return dirty

    def find_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest beginning of `keys` that is published; none gets a reference."""
        pages: list[int] = []
        for key in keys if self.caching else ():
            page = self.prefix_table.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def free_beside(self, pages: Iterable[int]) -> int:
        """The number of pages that `allocate` can return once `pages` are shared."""
        return self.num_free - sum(page in self.idle for page in pages)

    def count_query(self, tokens: int, pages: Sequence[int]) -> None:
        """Count a prompt of so many tokens, of which `pages` were found."""
        self.queried_tokens += tokens
        self.hit_tokens += len(pages) * self.page_size

    def is_sealed(self, page: int) -> bool:
        """Whether this page has a key: beyond the pass that fills it, it is not written again."""
        return self.keys[page] is not None

    def publish(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Make full pages shareable: page i of `pages` has the i-th key.

        The pass that fills them must run before, or be the same as, the first pass that reads them.
        A page whose key another page already has stays private. Publishing twice changes nothing.
        """
        if not self.caching:
            return
        assert len(keys) <= len(pages), "more keys than pages"
        sealed = len(keys)
        while sealed and self.keys[pages[sealed - 1]] is None:
            sealed -= 1
        for page, key in zip(pages[sealed:], keys[sealed:], strict=False):
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
