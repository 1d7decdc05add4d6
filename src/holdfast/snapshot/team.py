"""The ranks of a node that hold the same model copy its snapshots together.

One rank, the lead, captures the state and has its files in its blocks, as if it were alone. It tells the others, its
helpers, which bytes of which tensor belong where in these blocks; each copies its part from its own device, beside
its own next step. The snapshot is staged when all have reported.

Nothing depends on the belief that all ranks hold the same bytes: each helper sums up what it copies, the lead sums up
the same bytes of its own tensors, and a snapshot whose sums differ is given up. The first snapshot into any block is
a rehearsal: the lead copies everything, helpers take sums and map their part of the block. So ranks that never hold
the same bytes, or cannot reach the memory, cost no snapshot. Whatever goes wrong ends the sharing for good.

A block is not used again before every helper has reported on its last use, or is gone.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from holdfast.snapshot.block import PAGE_BYTES, Block
from holdfast.snapshot.device_copy import pin
from holdfast.snapshot.guard import Guard
from holdfast.snapshot.image import Image, Piece
from holdfast.snapshot.messages import Channel, Message
from holdfast.snapshot.replicas import CannotHelpError, Division, Slice, TensorKey, divide, resolve
from holdfast.snapshot.staging import Placed
from holdfast.snapshot.writing import SMALL_BYTES

_log = logging.getLogger("holdfast")
_NOTHING, _REHEARSE, _COPY = "nothing", "rehearse", "copy"
_MOST_REHEARSALS = 16
"""So many in a row mean that tensors or blocks are others at each snapshot."""
_DIFFERS = "rank {} holds other parameters or optimizer states than the first rank, whose are saved"


class Arrangement(NamedTuple):
    """What a rank stages of a snapshot.

    Args:
        placed: its own files; of those that are shared, its part.
        windows: its parts of another rank's files.
        summed: of what sums are taken.
    """

    placed: Sequence[Placed]
    windows: Sequence[Placed] = ()
    summed: Sequence[Piece] = ()


class Ending(NamedTuple):
    """What became of a snapshot over all ranks that copy it.

    Args:
        is_whole: whether everything is there.
        why: what is wrong with it, where somebody should be told.
    """

    is_whole: bool
    why: str = ""


class Team(Protocol):
    """This rank among those that copy snapshots together; one snapshot at a time, on all of them."""

    def arrange(self, number: int, placed: Sequence[Placed], guard: Guard | None) -> Arrangement:
        """Decide, or hear, who copies what.

        Args:
            number: of the snapshot, the same on all ranks.
            placed: this rank's files.
            guard: knows what only optimizers change.

        Raises:
            CannotHelpError: this rank was to copy what it does not have.
        """
        ...

    def begun(self, number: int) -> None:
        """What was arranged is being staged."""
        ...

    def settle(self, number: int) -> None:
        """If this snapshot has not begun here, it will not: nobody is to wait for it."""
        ...

    def ended(self, number: int, sums: Sequence[int] | None) -> Ending:
        """This rank's part is staged; called on the copying thread, and may wait for others there.

        Args:
            number: of the snapshot.
            sums: of `Arrangement.summed`; None when this rank's part is not whole.
        """
        ...

    def close(self) -> None:
        """Nothing is copied any more."""
        ...


@dataclass(slots=True, kw_only=True)
class _Take:
    """One snapshot of the lead's."""

    number: int
    how: str = _NOTHING
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
            threading.Thread(target=self._listen, args=[rank, channel], name="holdfast-team", daemon=True).start()

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
            take.how = _COPY
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
            take.how = _REHEARSE
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
                if take.how != _NOTHING and self._division is not None:
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
            if take.how != _COPY:
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


class Helper:
    """A rank that copies a part of the lead's files.

    Args:
        channel: to the lead.
        timeout_s: how long the lead may take to say what is to be done.
    """

    def __init__(self, channel: Channel, *, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._is_alone = False
        self._orders: dict[int, Message] = {}
        self._descriptors: dict[int, int] = {}
        self._order: Message = {"number": 0, "how": _NOTHING}
        self._answered = self._begun = 0
        self._division = 0
        self._slices: list[Slice] = []
        self._pieces: tuple[Piece, ...] = ()
        self._epoch = 0
        self._windows: dict[tuple[int, int, int], Block] = {}
        """By serial, begin and length."""
        self._placed: tuple[Any, list[Placed]] = None, []
        self._preparing: threading.Thread | None = None
        threading.Thread(target=self._listen, name="holdfast-team", daemon=True).start()

    def _listen(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, descriptors = received
            with self._changed:
                if message["type"] == "block":
                    self._descriptors.update((message["serial"], descriptor) for descriptor in descriptors)
                else:
                    self._orders[message["number"]] = message
                    self._changed.notify_all()
        with self._changed:
            self._is_alone = True
            self._changed.notify_all()

    def _hear(self, number: int) -> Message:
        """What is to be done with a snapshot."""
        if self._order["number"] != number:
            with self._changed:
                self._changed.wait_for(lambda: number in self._orders or self._is_alone, self._timeout_s)
                self._order = self._orders.pop(number, {"number": number, "how": _NOTHING})
        return self._order

    # ---- copying ----------------------------------------------------------------------------------------------

    def arrange(self, number: int, placed: Sequence[Placed], guard: Guard | None) -> Arrangement:
        """See `Team`."""
        order = self._hear(number)
        self._forget(set(order.get("keep", ())))
        if order["how"] == _NOTHING:
            return Arrangement(placed)
        try:
            self._resolve(order, guard)
            windows = self._open(order)
        except (CannotHelpError, OSError) as error:
            self._answer(number, None, str(error))
            if order["how"] == _REHEARSE:
                return Arrangement(placed)
            raise CannotHelpError(str(error)) from error
        return Arrangement(placed, windows if order["how"] == _COPY else (), self._pieces)

    def _resolve(self, order: Message, guard: Guard | None) -> None:
        if "slices" in order:
            self._close_windows(list(self._windows))
            self._division, self._epoch = order["division"], 0
            self._slices = [Slice(f, o, n, TensorKey(*key), start) for f, o, n, key, start in order["slices"]]
        if guard is None or order["division"] != self._division:
            raise CannotHelpError("its parameters change outside of optimizers, or it has missed what to copy")
        guard.refresh()  # what optimizers have put in another's place has no new piece here that would show it
        if guard.epoch != self._epoch:
            self._pieces = resolve(self._slices, guard, order["device"])
            self._epoch = guard.epoch

    def _open(self, order: Message) -> list[Placed]:
        """Map the parts of the lead's blocks; those that are new have no pages of this process's yet."""
        key = self._division, self._epoch, order["windows"]
        if self._placed[0] == key:
            return self._placed[1]
        placed: list[Placed] = []
        for serial, file, begin, length in order["windows"]:
            window = self._windows.get((serial, begin, length))
            if window is None:
                if serial not in self._descriptors:  # a process has a limited number of them
                    raise CannotHelpError("it cannot open the memory")
                descriptor = os.dup(self._descriptors[serial])
                window = self._windows[serial, begin, length] = Block.window(-serial, descriptor, begin, length)
            pieces = tuple(
                piece._replace(offset=piece.offset - begin)
                for one, piece in zip(self._slices, self._pieces, strict=True)
                if one.file == file
            )
            image = Image(path=f"{file} of the lead", size_bytes=length, literals=(), pieces=pieces)
            placed.append(Placed(image=image, block=window, offset=0, is_followed=False))
        self._placed = key, placed
        return placed

    def _forget(self, kept: set[int]) -> None:
        """Give back the memory that the lead has given back."""
        self._close_windows([key for key in self._windows if key[0] not in kept])
        for serial in [serial for serial in self._descriptors if serial not in kept]:
            os.close(self._descriptors.pop(serial))

    def _close_windows(self, keys: Sequence[tuple[int, int, int]]) -> None:
        if keys:
            self._wait_prepared()
            self._placed = None, []
        for key in keys:
            self._windows.pop(key).close()

    # ---- answering --------------------------------------------------------------------------------------------

    def begun(self, number: int) -> None:
        """See `Team`."""
        self._begun = number

    def settle(self, number: int) -> None:
        """See `Team`."""
        if self._begun < number and self._hear(number)["how"] != _NOTHING:
            self._answer(number, None, "")

    def ended(self, number: int, sums: Sequence[int] | None) -> Ending:
        """See `Team`."""
        why = "" if sums is not None else "parameters were changed outside optimizer.step"
        if self._answered < number and self._order["how"] == _COPY:
            self._answer(number, sums, why)
        elif self._answered < number and self._order["how"] == _REHEARSE:
            windows = [one.block for one in self._placed[1]]
            self._preparing = threading.Thread(
                target=self._prepare, args=[number, sums, why, windows], name="holdfast-team", daemon=True
            )
            self._preparing.start()
        return Ending(sums is not None)

    def _prepare(self, number: int, sums: Sequence[int] | None, why: str, windows: Sequence[Block]) -> None:
        """Make the parts of the blocks ready for copies as fast as the lead's, then report."""
        device = next((piece.owner.device for piece in self._pieces if piece.device == "cuda"), None)
        for window in windows:
            window.populate()
            if device is not None and not pin(window, device.index):
                sums, why = None, "its device cannot reach the memory"
        self._answer(number, sums, why)

    def _wait_prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()

    def _answer(self, number: int, sums: Sequence[int] | None, why: str) -> None:
        if self._answered >= number:
            return
        self._answered = number
        with contextlib.suppress(OSError):  # the lead is gone: nobody waits
            self._channel.send({"type": "report", "number": number, "sums": sums, "why": why})

    def close(self) -> None:
        """See `Team`."""
        self._wait_prepared()
        self._channel.close()
        self._forget(set())


__all__ = ["Arrangement", "Ending", "Helper", "Lead", "Team"]
