"""Decides whether the listed parts of a tensor make the whole tensor.

Promises: the time grows with the number of parts and of dimensions, and not with the number of pairs of parts,
because a small file can list very many parts.
"""

import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence

_PRIME = (1 << 127) - 1


def make_whole(sizes: Sequence[int], parts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether each element of a tensor is in exactly one part, and no part is outside of the tensor.

    A part is a box, which begins and ends at some position in each dimension. The function draws a random number for
    each of these positions. In each dimension, a box has a difference: the number of the position where it ends,
    minus the number of the position where it begins. The value of a box is the product of its differences. If the
    parts make the whole tensor, the sum of their values is the value of the tensor: multiplied out, each term stands
    for a corner, and the terms of inner corners cancel. If the parts do not make the tensor, the sum and the value of
    the tensor are different polynomials of the random numbers. They are then equal with a probability of at most the
    number of dimensions divided by 2^127 - 1 (lemma of Schwartz and Zippel). The numbers are drawn after the file was
    made, so no file can be made for which they are equal.

    Args:
        sizes: the sizes of the tensor, none below 0.
        parts: the offsets and the sizes of each part, none below 0. Parts without elements do not count.
    """
    numbers: list[dict[int, int]] = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in sizes]

    def product(offsets: Sequence[int], counts: Sequence[int]) -> int:
        found = 1
        for of, begin, count in zip(numbers, offsets, counts, strict=True):
            found = found * (of[begin + count] - of[begin]) % _PRIME
        return found

    total = 0
    for offsets, counts in parts:
        if 0 in counts:
            continue
        if not len(offsets) == len(counts) == len(sizes):
            return False
        total += product(offsets, counts)
    return (total - product([0] * len(sizes), sizes)) % _PRIME == 0
