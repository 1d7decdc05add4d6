"""Finds the pages of an older image that equal new pages, wherever they are in the image.

A new page is first compared with the page that follows the last match, then looked up in a sorted table of eight
bytes of each digest. If the older image has more than MOST_LISTED pages, the table has only every second, third …
page, chosen by digest. After a match, the other pages of the block are compared with the old pages at the same
distance: the number of the old page minus the number of the new page. So the table takes at most 24 MiB, and pages
that have moved together are found in an image of any size.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safepoint.transparent.pages.contents import digest_of_zero
from safepoint.transparent.pages.layout import DIGEST, FIRST_SOURCE, MOST_PAGES, RUN, THIS_IMAGE
from safepoint.transparent.pages.table import PageTable

MOST_LISTED = 2 << 20
_CHUNK_PAGES = 1 << 18
_MOST_DISTANCES = 8


class OlderPages:
    """The pages of the previous image, to which a new image may refer.

    The pages are numbered from the first page file of the previous image to the last, in the order of `tables`.
    """

    def __init__(self, tables: Mapping[tuple[int, int], PageTable], *, most_listed: int = MOST_LISTED) -> None:
        """Build the table for looking up pages.

        Args:
            tables: the tables of the previous image, by the numbers of part and page file; `check_runs` accepted
                them.
            most_listed: how many pages the table for looking up may have.
        """
        self._places = list(tables)
        self._tables = list(tables.values())
        self._begins = np.array([0, *itertools.accumulate(len(one.digests) for one in self._tables)], np.int64)
        self._ends_of_runs: list[NDArray[np.int64]] = [
            np.cumsum(one.runs["num_pages"], dtype=np.int64) for one in self._tables
        ]
        self._keys, self._numbers = self._list_pages(most_listed)
        self._distance = 0

    def _list_pages(self, most: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """The first halves of the digests, sorted, and the numbers of their pages. Zero pages are left out."""
        share = np.uint64(max(1, -(-int(self._begins[-1]) // most)))
        chosen = [
            (begin + start, digests["low"][is_chosen], np.flatnonzero(is_chosen))
            for begin, table in zip(self._begins.tolist(), self._tables, strict=False)
            for start, digests in _chunks(table.digests)
            if begin + start + len(digests) <= MOST_PAGES
            for is_chosen in [(digests["high"] % share == 0) & (digests != digest_of_zero(table.header.seed))]
        ]
        keys: NDArray[np.uint64] = np.concatenate([one for _, one, _ in chosen] or [np.empty(0, np.uint64)])
        numbers = np.concatenate(
            [(positions + begin).astype(np.uint32) for begin, _, positions in chosen] or [np.empty(0, np.uint32)]
        )
        del chosen
        order = np.argsort(keys)
        return keys[order], numbers[order]

    def begin(self, part: int, file: int) -> None:
        """Begin a page file. Its pages are first compared with the pages of the old page file of the same name, if
        there is one."""
        place = (part, file)
        self._distance = int(self._begins[self._places.index(place)]) if place in self._places else 0

    def find(self, numbers: NDArray[np.int64], digests: NDArray[Any]) -> NDArray[np.int64]:
        """Find equal pages.

        Args:
            numbers: the numbers of the new pages in their stream, ascending, shape (N,).
            digests: their digests, shape (N,). None of the pages is zero.

        Returns:
            For each page, the number of an equal page of the previous image, or -1; shape (N,).
        """
        found = np.full(len(numbers), -1, np.int64)
        self._compare(found, numbers, digests, self._distance)
        missing = np.flatnonzero(found < 0)
        if len(missing) and len(self._keys):
            where = np.searchsorted(self._keys, digests["low"][missing])
            where[where == len(self._keys)] = 0
            candidates = self._numbers[where].astype(np.int64)
            is_equal = self._digests_of(candidates) == digests[missing]
            found[missing[is_equal]] = candidates[is_equal]
            distances = candidates[is_equal] - numbers[missing[is_equal]]
            for distance in itertools.islice(dict.fromkeys(distances.tolist()), _MOST_DISTANCES):
                self._compare(found, numbers, digests, distance)
        matches = np.flatnonzero(found >= 0)
        if len(matches):
            self._distance = int(found[matches[-1]] - numbers[matches[-1]])
        return found

    def _compare(
        self, found: NDArray[np.int64], numbers: NDArray[np.int64], digests: NDArray[Any], distance: int
    ) -> None:
        """Compare the new pages that have no match yet with the old pages at this distance."""
        missing = np.flatnonzero(found < 0)
        candidates = numbers[missing] + distance
        is_there = (candidates >= 0) & (candidates < self._begins[-1])
        missing, candidates = missing[is_there], candidates[is_there]
        is_equal = self._digests_of(candidates) == digests[missing]
        found[missing[is_equal]] = candidates[is_equal]

    def _digests_of(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        digests = np.empty(len(numbers), DIGEST)
        files: NDArray[np.int64] = np.searchsorted(self._begins, numbers, side="right") - 1
        for file in _values(files):
            is_here = files == file
            digests[is_here] = self._tables[file].digests[numbers[is_here] - self._begins[file]]
        return digests

    def references(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Where old pages are stored, as references of the new image.

        Args:
            numbers: numbers that `find` returned, shape (N,).

        Returns:
            Shape (N,), dtype `RUN`, each with one page. The previous image is the first source of the new image, and
            the sources of the previous image follow it. So the number of each source is one higher than before.
        """
        places = np.zeros(len(numbers), RUN)
        files: NDArray[np.int64] = np.searchsorted(self._begins, numbers, side="right") - 1
        for file in _values(files):
            is_here = files == file
            inside: NDArray[np.int64] = numbers[is_here] - self._begins[file]
            ends: NDArray[np.int64] = self._ends_of_runs[file]
            which = np.searchsorted(ends, inside, side="right")
            runs: NDArray[Any] = self._tables[file].runs[which]
            into_run = inside - (ends[which] - runs["num_pages"])
            runs["first"] += into_run.astype(np.uint64)
            places[is_here] = runs
        places["num_pages"] = 1
        places["image"] += FIRST_SOURCE - THIS_IMAGE
        return places


def _values(numbers: NDArray[np.int64]) -> list[int]:
    return np.unique(numbers).tolist()


def _chunks(digests: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for start in range(0, len(digests), _CHUNK_PAGES):
        yield start, digests[start : start + _CHUNK_PAGES]
