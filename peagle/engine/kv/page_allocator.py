"""Pages: one allocator for the KV of target and drafter, and the table of prefixes that requests may share.

A page holds `size` positions of both. Page i of a request holds positions i * size .. (i + 1) * size - 1; the drafter's
row at position j reads token j + 1. So a page may be shared only where its tokens, all before them and the one token
right after them are the same, and its key is a chain over exactly these:

    size 2, tokens 5 6 7 8 9:   key 0 = H(root, 5 6, 7)    key 1 = H(key 0, 7 8, 9)    token 9: not in a full page

A page is in one of three places:

    fresh    nobody holds it and nothing in it matters
    held     refs > 0; with a key once it is full, and in the table unless another page had that key before
    idle     in the table but held by nobody: evicted, the longest unused first, when no page is fresh
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 32  # equal keys are equal prefixes: nobody will ever see a collision of 256 bits
ROOT = bytes(KEY_BYTES)


class PageAllocator:
    def __init__(self, count: int, size: int, caching: bool = True) -> None:
        """`caching`: are prefixes shared at all?"""
        assert count >= 1 and size >= 1
        self.count, self.size, self.caching = count, size, caching
        self.refs = [0] * count
        self.keys: list[bytes | None] = [None] * count  # of full pages, in the table or not
        self.table: dict[bytes, int] = {}
        self.fresh = list(reversed(range(count)))  # a stack: page 0 goes first
        self.idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self.asked = self.found = 0  # tokens looked for in the table, and those that were there

    @property
    def free(self) -> int:
        """How many `allocate` can give."""
        return len(self.fresh) + len(self.idle)

    def needed(self, positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-positions // self.size)

    def allocate(self, n: int) -> list[int] | None:
        """n pages, held once each; None, and nothing changes, if there are fewer."""
        assert n >= 0
        if n > self.free:
            return None
        pages = [self.fresh.pop() if self.fresh else self._evict() for _ in range(n)]
        for page in pages:
            assert self.refs[page] == 0 and self.keys[page] is None
            self.refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of pages that are held or idle."""
        for page in pages:
            assert self.refs[page] > 0 or page in self.idle, (
                f"page {page} is fresh: there is nothing to share"
            )
            self.refs[page] += 1
            self.idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One holder less. The last page of a chain is given up first: without its beginning it is of no use."""
        for page in reversed(pages):
            assert self.refs[page] > 0, f"page {page} is released more often than it was taken"
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self._put_back(page)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The longest chain of published pages that `tokens` begin with, held from now on.

        A page needs the token after it, so at least one token is always left to compute.
        """
        pages: list[int] = []
        for key in self._chain(tokens) if self.caching else ():
            if key not in self.table:
                break
            pages.append(self.table[key])
        self.share(pages)
        self.asked += len(tokens)
        self.found += len(pages) * self.size
        assert not tokens or len(pages) * self.size < len(tokens)
        return pages

    def unmatch(self, tokens: Sequence[int], pages: list[int]) -> None:
        """As if `match(tokens)`, which gave `pages`, had never been asked."""
        self.release(pages)
        self.asked -= len(tokens)
        self.found -= len(pages) * self.size

    def closed(self, page: int) -> bool:
        """It was full when `publish` saw it: nobody writes to it until it is fresh again."""
        return self.keys[page] is not None

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """The KV of all `tokens` but the last has been computed in `pages`: those that are full may be shared.

        A page whose key another page has already stays private. Publishing twice changes nothing.
        """
        if not self.caching:
            return
        full = max(0, len(tokens) - 1) // self.size
        assert full <= len(pages), "more tokens than their pages hold"
        done = full
        while done and self.keys[pages[done - 1]] is None:
            done -= 1
        before = self.keys[pages[done - 1]] if done else ROOT
        assert before is not None
        for page, key in zip(pages[done:full], self._chain(tokens, done, before), strict=True):
            assert self.refs[page] > 0 and self.keys[page] is None
            self.keys[page] = key
            self.table.setdefault(key, page)

    def withdraw(self, pages: Sequence[int]) -> None:
        """What was computed in these pages, still held, is not to be trusted: nobody shall find them again."""
        for page in pages:
            assert self.refs[page] > 0
            key, self.keys[page] = self.keys[page], None
            if key is not None and self.table.get(key) == page:
                del self.table[key]

    def _chain(self, tokens: Sequence[int], first: int = 0, key: bytes = ROOT) -> Iterator[bytes]:
        """The keys of the pages from `first` on that `tokens` fill and go beyond; `key` is that of the page before."""
        for begin in range(first * self.size, len(tokens) - self.size, self.size):
            words = array(
                "q", tokens[begin : begin + self.size + 1]
            )  # the page and the token after it
            key = blake2b(key + words.tobytes(), digest_size=KEY_BYTES).digest()
            yield key

    def _put_back(self, page: int) -> None:
        key = self.keys[page]
        if (
            key is not None and self.table.setdefault(key, page) == page
        ):  # a duplicate follows one that was evicted
            self.idle[page] = None
        else:
            self.keys[page] = None
            self.fresh.append(page)

    def _evict(self) -> int:
        page, _ = self.idle.popitem(last=False)
        key = self.keys[page]
        assert key is not None and self.table[key] == page
        del self.table[key]
        self.keys[page] = None
        return page

    def check_integrity(self, held: Iterable[list[int]]) -> None:
        """`held`: the pages of every request there is."""
        refs: Counter[int] = Counter()
        for pages in held:
            assert len(set(pages)) == len(pages), f"a request holds a page twice: {pages}"
            refs.update(pages)
        assert self.refs == [refs[page] for page in range(self.count)], (
            "references are not what requests hold"
        )
        places = sorted([*self.fresh, *self.idle, *refs])
        assert places == list(range(self.count)), "a page is lost, or in two places"
        assert all(self.keys[page] is None for page in self.fresh)
        assert all(self.keys[page] == key for key, page in self.table.items())
        assert all(self.table.get(self.keys[page] or ROOT) == page for page in self.idle)
        assert 0 <= self.found <= self.asked
