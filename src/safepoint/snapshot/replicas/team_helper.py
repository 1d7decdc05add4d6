"""A helper of a team: a rank that copies a part of the lead's files (see `team`)."""

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from safepoint.snapshot.images.image import Image, Piece
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.protocol.channel import Channel, Message
from safepoint.snapshot.replicas.replicas import CannotHelpError, Slice, TensorKey, resolve
from safepoint.snapshot.replicas.team import COPY, NOTHING, REHEARSE, Arrangement, Ending
from safepoint.snapshot.staging.device_copy import pin
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Placed


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
        self._order: Message = {"number": 0, "how": NOTHING}
        self._answered = self._begun = 0
        self._division = 0
        self._slices: list[Slice] = []
        self._pieces: tuple[Piece, ...] = ()
        self._epoch = 0
        self._windows: dict[tuple[int, int, int], Block] = {}
        """By serial, begin and length."""
        self._placed: tuple[Any, list[Placed]] = None, []
        self._preparing: threading.Thread | None = None
        threading.Thread(target=self._listen, name="safepoint-team", daemon=True).start()

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
                self._order = self._orders.pop(number, {"number": number, "how": NOTHING})
        return self._order

    # ---- copying ----------------------------------------------------------------------------------------------

    def arrange(self, number: int, placed: Sequence[Placed], guard: Guard | None) -> Arrangement:
        """See `Team`."""
        order = self._hear(number)
        self._forget(set(order.get("keep", ())))
        if order["how"] == NOTHING:
            return Arrangement(placed)
        try:
            self._resolve(order, guard)
            windows = self._open(order)
        except (CannotHelpError, OSError) as error:
            self._answer(number, None, str(error))
            if order["how"] == REHEARSE:
                return Arrangement(placed)
            raise CannotHelpError(str(error)) from error
        return Arrangement(placed, windows if order["how"] == COPY else (), self._pieces)

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
        if self._begun < number and self._hear(number)["how"] != NOTHING:
            self._answer(number, None, "")

    def ended(self, number: int, sums: Sequence[int] | None) -> Ending:
        """See `Team`."""
        why = "" if sums is not None else "parameters were changed outside optimizer.step"
        if self._answered < number and self._order["how"] == COPY:
            self._answer(number, sums, why)
        elif self._answered < number and self._order["how"] == REHEARSE:
            windows = [one.block for one in self._placed[1]]
            self._preparing = threading.Thread(
                target=self._prepare, args=[number, sums, why, windows], name="safepoint-team", daemon=True
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
