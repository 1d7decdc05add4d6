"""Which jobs a list shows, and in which order: the search, the filters, and the sorting."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from safepoint.dashboard.reading.places import ListedJob, PlaceReader, Places
from safepoint.jobs.model.states import JobState

PAGE_SIZE = 50
_LONGEST_QUERY = 200
_Word = TypeVar("_Word", bound=enum.StrEnum)


class Group(enum.StrEnum):
    """The groups of jobs that a list can show."""

    ALL = "all"
    ACTIVE = "active"
    ATTENTION = "attention"
    WAITING = "waiting"
    STOPPED = "suspended"
    ENDED = "ended"


class Order(enum.StrEnum):
    """The orders of a list."""

    ATTENTION = "attention"
    NEWEST = "newest"
    NAME = "name"
    PROGRESS = "progress"


_IN_GROUP: Mapping[Group, Callable[[ListedJob], bool]] = {
    Group.ALL: lambda one: True,
    Group.ACTIVE: lambda one: one.job.state.is_active,
    Group.ATTENTION: lambda one: bool(one.attention.urgency),
    Group.WAITING: lambda one: one.job.state.is_waiting,
    Group.STOPPED: lambda one: one.job.state is JobState.SUSPENDED,
    Group.ENDED: lambda one: one.job.state.is_over,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a visitor has chosen to see.

    Args:
        query: words. A job is shown if each word is in its name, command, state or place.
        group: the group of jobs.
        place: the key of a place; empty for all places.
        order: how the jobs are sorted.
        page: the number of the page, from 1.
    """

    query: str = ""
    group: Group = Group.ALL
    place: str = ""
    order: Order = Order.ATTENTION
    page: int = 1

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "Choice":
        """The choice in the query of a request. Invalid values are ignored."""
        page = parameters.get("page", "1")
        return cls(
            query=parameters.get("q", "")[:_LONGEST_QUERY].strip(),
            group=_member(Group, parameters.get("state", ""), Group.ALL),
            place=parameters.get("place", ""),
            order=_member(Order, parameters.get("sort", ""), Order.ATTENTION),
            page=int(page) if page.isdecimal() and 0 < len(page) < 7 and int(page) else 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    """The jobs of a page of a list.

    Args:
        rows: the jobs, each with the reader of its place.
        num_found: how many jobs match, on all pages.
        num_pages: how many pages these jobs take; at least 1.
        counts: group → how many of its jobs match the query and the place.
        failures: the title of each place that cannot be read, and the reason.
        is_empty: whether there is no job at all.
    """

    rows: tuple[tuple[PlaceReader, ListedJob], ...]
    num_found: int
    num_pages: int
    counts: Mapping[Group, int]
    failures: tuple[tuple[str, str], ...]
    is_empty: bool


def read_list(
    places: Places,
    choice: Choice,
    *,
    page_size: int | None = PAGE_SIZE,
    problems: Mapping[str, str] = MappingProxyType({}),
) -> JobList:
    """The jobs that a visitor has chosen.

    Args:
        places: where the jobs are.
        choice: what the visitor has chosen.
        page_size: how many jobs a page has; None if one page has all of them.
        problems: the key of a job → a further reason why it needs attention.
    """
    failures: list[tuple[str, str]] = []
    everything: list[tuple[PlaceReader, ListedJob]] = []
    for reader in places.readers.values():
        found = reader.read()
        if found.failure:
            failures.append((reader.title, found.failure))
        everything += [(reader, _with_problem(one, problems.get(one.key))) for one in found.jobs.values()]
    words = choice.query.lower().split()
    matching = [
        (reader, one)
        for reader, one in everything
        if (not choice.place or one.place == choice.place) and _has(one, words)
    ]
    counts = {group: sum(is_in(one) for _, one in matching) for group, is_in in _IN_GROUP.items()}
    chosen = [pair for pair in matching if _IN_GROUP[choice.group](pair[1])]
    chosen.sort(key=lambda pair: pair[1].job.created, reverse=True)
    if choice.order is Order.ATTENTION:
        chosen.sort(key=lambda pair: (-pair[1].attention.urgency, not pair[1].job.state.is_active))
    elif choice.order is Order.NAME:
        chosen.sort(key=lambda pair: pair[1].job.name)
    elif choice.order is Order.PROGRESS:
        chosen.sort(key=lambda pair: -(_percent(pair[1]) or 0.0))
    size = page_size or max(1, len(chosen))
    num_pages = max(1, -(-len(chosen) // size))
    begin = (min(choice.page, num_pages) - 1) * size
    return JobList(
        rows=tuple(chosen[begin : begin + size]),
        num_found=len(chosen),
        num_pages=num_pages,
        counts=counts,
        failures=tuple(failures),
        is_empty=not everything,
    )


def _with_problem(one: ListedJob, problem: str | None) -> ListedJob:
    return one if problem is None else replace(one, attention=one.attention.with_problem(problem))


def _has(one: ListedJob, words: Sequence[str]) -> bool:
    if not words:  # it takes time to make the text of the command
        return True
    text = f"{one.job.name} {one.job.command} {one.job.state} {one.place}".lower()
    return all(word in text for word in words)


def _percent(one: ListedJob) -> float | None:
    return None if one.progress is None else one.progress.percent


def _member(kind: type[_Word], text: str, default: _Word) -> _Word:
    try:
        return kind(text)
    except ValueError:
        return default
