"""What pages contain: whether they are zero, and their digests.

The digest of a page is XXH3-128 with the seed of the chain. The seed is random, and only the image contains it, so an
attacker cannot construct data with the digest of another page.
"""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from safepoint.transparent.pages.layout import DIGEST, PAGE_BYTES

_WORDS = PAGE_BYTES // 8
_SAMPLE = 64
"""First, only every n-th word of a page is compared with zero. Few pages that are not zero pass this test."""


def find_zero(pages: memoryview) -> NDArray[np.bool_]:
    """Which of the pages have only zero bytes.

    Args:
        pages: N whole pages.

    Returns:
        Shape (N,).
    """
    words = np.frombuffer(pages, np.uint64).reshape(-1, _WORDS)
    are_zero: NDArray[np.bool_] = np.equal(words[:, ::_SAMPLE].max(axis=1), 0)
    candidates = np.flatnonzero(are_zero)
    are_zero[candidates] = np.equal(words[candidates].max(axis=1), 0)
    return are_zero


def digest_pages(pages: memoryview, numbers: NDArray[np.int64], seed: int) -> NDArray[Any]:
    """The digests of some of the pages.

    Args:
        pages: whole pages.
        numbers: which of them, shape (N,).
        seed: the seed of the chain, 64 bits.

    Returns:
        Shape (N,), dtype `DIGEST`.
    """
    digest = xxhash.xxh3_128_digest
    found = [digest(pages[begin : begin + PAGE_BYTES], seed) for begin in (numbers * PAGE_BYTES).tolist()]
    return np.frombuffer(b"".join(found), DIGEST)


def digest_of_zero(seed: int) -> NDArray[Any]:
    """The digest of a page of zeros, shape (1,)."""
    return np.frombuffer(xxhash.xxh3_128_digest(bytes(PAGE_BYTES), seed), DIGEST)
