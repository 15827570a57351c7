"""Page keys: a hash chain over the tokens of a request, by which requests share pages.

The drafter's row at position j reads token j + 1, so a page may be shared only where its tokens,
all tokens before it and the one token right after it are the same. Its key covers exactly these:

    page_size 2, tokens 5 6 7 8 9
    key 0 = H(root, 5 6, 7)
    key 1 = H(key 0, 7 8, 9)
    token 9 is not in a full page

Requests with different salts have different roots: they never share a page.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 32  # 256 bits: equal keys are taken for equal prefixes.
ROOT_KEY = bytes(KEY_BYTES)  # Without a salt.
SALT_PERSON = b"peagle salt"  # Keeps the digest of a salt apart from the key of a page.


def root_key(salt: str) -> bytes:
    """The key before the first page."""
    if not salt:
        return ROOT_KEY
    data = salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=KEY_BYTES, person=SALT_PERSON).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a page behind `parent`; `tokens`: those of the page, and the one after it."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()
