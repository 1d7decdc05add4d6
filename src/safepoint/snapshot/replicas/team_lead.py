"""The lead of a team: the rank whose files they are (see `team`)."""

import dataclasses
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from safepoint.snapshot.images.image import Image
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from safepoint.snapshot.protocol.channel import Channel, Message
from safepoint.snapshot.protocol.layout import SMALL_BYTES
from safepoint.snapshot.replicas.replicas import Division, Slice, divide
from safepoint.snapshot.replicas.team import COPY, NOTHING, REHEARSE, Arrangement, Ending
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Placed

_log = logging.getLogger("safepoint")
_MOST_REHEARSALS = 16
"""So many in a row mean that tensors or blocks are others at each snapshot."""
_DIFFERS = "rank {} holds other parameters or optimizer states than the first rank, whose are saved"


@dataclass(slots=True, kw_only=True)
class _Take:
    """One snapshot of the lead's."""

    number: int
    how: str = NOTHING
    serials: tuple[int, ...] = ()
    """Of the blocks of `Division.own`."""
    sums: Sequence[int] | None = None
    has_ended: bool = False
    is_aborted: bool = False


class _Window(NamedTuple):
    """The part of a file that a helper fills, in whole pages."""

    file: int
    begin: int
    length: int


class Lead:
    """The rank whose files they are.

    Args:
        channels: to the helpers, by rank.
        least_bytes: with less than this in common, it copies everything itself.
    """

    def __init__(self, channels: Mapping[int, Channel], *, least_bytes: int) -> None:
        self._channels = dict(channels)
        self._least_bytes = least_bytes
        self._changed = threading.Condition()
        self._gone: set[int] = set()
        self._reports: dict[tuple[int, int], Message] = {}
        """By number and rank."""
        self._take = _Take(number=0)
        self._told = 0
        self._is_over = False
        self._rehearsal: _Take | None = None
        self._num_rehearsals = 0
        self._division: Division | None = None
        self._divided: tuple[int, list[list[tuple[int, int, int]]]] | None = None
        self._num_divisions = 0
        self._windows: list[list[_Window]] = []
        self._serials: WeakKeyDictionary[Block, int] = WeakKeyDictionary()
        """Names of blocks with the pages that they have now."""
        self._new_serials = itertools.count(1)
        self._ready: set[int] = set()
        self._sent: dict[int, set[int]] = {rank: set() for rank in channels}
        self._known: dict[int, int] = dict.fromkeys(channels, 0)
        """Which division each helper knows."""
        for rank, channel in self._channels.items():
            threading.Thread(target=self._listen, args=[rank, channel], name="safepoint-team", daemon=True).start()

    def _listen(self, rank: int, channel: Channel) -> None:
        while (received := channel.receive()) is not None:
            message, _ = received
            with self._changed:
                self._reports[message["number"], rank] = message
                self._changed.notify_all()
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    # ---- who copies what --------------------------------------------------------------------------------------

    def arrange(self, number: int, placed: Sequence[Placed], guard: Guard | None) -> Arrangement:
        """See `Team`."""
        self._judge()
        self._take = take = _Take(number=number)
        large = [one for one in placed if one.offset == 0 and one.image.size_bytes >= SMALL_BYTES]
        if self._is_over or self._rehearsal is not None or guard is None:
            return Arrangement(placed)
        division = self._divide([one.image for one in large], guard)
        if division is None:
            return Arrangement(placed)
        take.serials = tuple(self._serial_of(one.block, file) for file, one in enumerate(large))
        shared = {window.file for windows in self._windows for window in windows}
        if {take.serials[file] for file in shared} <= self._ready:
            take.how = COPY
            self._num_rehearsals = 0
            _log.debug("snapshot %s is copied by %s ranks", number, len(self._channels) + 1)
            parts = {
                id(large[file]): dataclasses.replace(
                    large[file],
                    image=dataclasses.replace(large[file].image, pieces=division.own[file]),
                    is_followed=False,
                )
                for file in shared
            }
            placed = [parts.get(id(one), one) for one in placed]
        else:
            self._num_rehearsals += 1
            if self._num_rehearsals > _MOST_REHEARSALS:
                self._stop("what is saved lies elsewhere at each snapshot")
                return Arrangement(placed)
            take.how = REHEARSE
            self._rehearsal = take
        return Arrangement(placed, summed=division.pieces)

    def _divide(self, images: Sequence[Image], guard: Guard) -> Division | None:
        places = [[(one.offset, one.num_bytes, one.address) for one in image.pieces] for image in images]
        is_known = self._divided is not None and self._divided[1] == places
        guard.refresh(has_new_pieces=not is_known)
        if self._divided is None or not is_known or self._divided[0] != guard.epoch:
            self._divided = guard.epoch, places
            self._division = divide(images, guard, len(self._channels), least_bytes=self._least_bytes)
            self._num_divisions += 1
            self._ready.clear()
            self._windows = list(map(_windows_of, self._division.slices)) if self._division is not None else []
        return self._division

    def _serial_of(self, block: Block, file: int) -> int:
        end = max((one.begin + one.length for of in self._windows for one in of if one.file == file), default=0)
        if block not in self._serials or block.least_bytes < end:
            block.least_bytes = block.length_bytes
            self._serials[block] = next(self._new_serials)
        return self._serials[block]

    # ---- what is said to helpers ------------------------------------------------------------------------------

    def begun(self, number: int) -> None:
        """See `Team`."""
        self._tell(self._take)

    def settle(self, number: int) -> None:
        """See `Team`."""
        if self._told >= number:
            return
        with self._changed:
            if self._take.number == number:
                self._take.is_aborted = True
                if self._rehearsal is self._take:
                    self._rehearsal = None
            self._changed.notify_all()
        self._tell(_Take(number=number))

    def _tell(self, take: _Take) -> None:
        self._told = take.number
        blocks = {serial: block for block, serial in self._serials.items()}
        for index, (rank, channel) in enumerate(self._channels.items()):
            order: Message = {"type": "order", "number": take.number, "how": take.how}
            order["keep"] = [] if self._is_over else sorted(blocks)
            try:
                if take.how != NOTHING and self._division is not None:
                    windows = [(take.serials[one.file], *one) for one in self._windows[index]]
                    for serial, *_ in windows:
                        if serial not in self._sent[rank]:
                            channel.send({"type": "block", "serial": serial}, [blocks[serial].descriptor])
                            self._sent[rank].add(serial)
                    order |= {"windows": windows, "division": self._num_divisions}
                    order["device"] = next((piece.device for piece in self._division.pieces), "cpu")
                    if self._known[rank] != self._num_divisions:
                        order["slices"] = self._division.slices[index]
                        self._known[rank] = self._num_divisions
                channel.send(order)
            except OSError:
                with self._changed:
                    self._gone.add(rank)
                    self._changed.notify_all()

    # ---- what they say ----------------------------------------------------------------------------------------

    def ended(self, number: int, sums: Sequence[int] | None) -> Ending:
        """See `Team`."""
        take = self._take
        with self._changed:
            take.sums, take.has_ended = sums, True
            if take.how != COPY:
                return Ending(sums is not None)
            # Also when its own part is lost: helpers may still be writing into its blocks.
            self._changed.wait_for(lambda: take.is_aborted or self._has_answers(number))
        if take.is_aborted or sums is None:
            return Ending(False)
        problem = self._problem(take)
        if problem is None:
            return Ending(True)
        if problem:
            self._is_over = True  # whoever hears of the ending tells it
        return Ending(False, problem)

    def _has_answers(self, number: int) -> bool:
        return all(rank in self._gone or (number, rank) in self._reports for rank in self._channels)

    def _problem(self, take: _Take) -> str | None:
        """What is wrong with the helpers' parts; None for nothing, empty when it is nobody's fault."""
        assert take.sums is not None
        at = 0
        for rank in self._channels:
            report = self._reports.get((take.number, rank))
            if report is None:
                return ""
            if report["sums"] is None:
                return f"rank {rank}: {report['why']}" if report["why"] else ""
            end = at + len(report["sums"])
            if list(take.sums[at:end]) != report["sums"]:
                return _DIFFERS.format(rank)
            at = end
        return None if at == len(take.sums) else "the ranks hold different numbers of tensors"

    def _judge(self) -> None:
        """Look what became of the rehearsal; forget what was reported before."""
        take = self._rehearsal
        with self._changed:
            if self._gone:
                self._is_over = True
            if take is not None and (not take.has_ended or not self._has_answers(take.number)):
                return
        if take is not None:
            self._rehearsal = None
            problem = "" if take.sums is None else self._problem(take)
            if problem:
                self._stop(problem)
            elif problem is None:
                self._ready.update(take.serials)
        with self._changed:
            self._reports.clear()

    def _stop(self, why: str) -> None:
        if not self._is_over:
            self._is_over = True
            _log.warning("snapshots are copied by the first rank alone: %s", why)

    def close(self) -> None:
        """See `Team`."""
        for channel in self._channels.values():
            channel.close()


def _windows_of(slices: Sequence[Slice]) -> list[_Window]:
    windows: list[_Window] = []
    for file, of_file in itertools.groupby(slices, key=lambda one: one.file):
        here = list(of_file)
        begin = here[0].offset // PAGE_BYTES * PAGE_BYTES
        end = -(-(here[-1].offset + here[-1].num_bytes) // PAGE_BYTES) * PAGE_BYTES
        windows.append(_Window(file, begin, end - begin))
    return windows
