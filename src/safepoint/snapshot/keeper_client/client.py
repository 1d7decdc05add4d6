"""The keeper as a rank sees it: a connection that lends it memory, says what lies there, hears what became of it."""

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation import clock
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from safepoint.snapshot.protocol.channel import Channel, Message, connect
from safepoint.snapshot.protocol.layout import CONTROL_NUMBER, NUM_MARKS
from safepoint.snapshot.protocol.recent import Recent

_log = logging.getLogger("safepoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a snapshot that was to be made durable.

    Args:
        step: of the snapshot.
        error: why it is not durable; empty when it is.
        path: the checkpoint's folder.
        size_bytes: of its files.
        write_s: seconds that writing and committing took.
        heard_s: when this process heard of it, by the monotonic clock.
    """

    step: int
    error: str
    path: str = ""
    size_bytes: int = 0
    write_s: float = 0.0
    heard_s: float = 0.0

    @property
    def is_durable(self) -> bool:
        """Whether it is committed."""
        return not self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A snapshot that an earlier start of the ranks has left in memory.

    Args:
        folder: its files, as links into the keeper's memory.
        manifest: the manifest's text.
        is_durable: whether it is a checkpoint too.
    """

    folder: str
    manifest: str
    is_durable: bool


class KeeperClient:
    """One rank's connection to its node's keeper.

    Args:
        channel: connected.
        rank: of the job.
        num_ranks: of this node.
        restart: how often the ranks have been started anew.
        on_leave: called on the receiving thread when the keeper decides that the ranks leave now, with its message.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int,
        num_ranks: int,
        restart: int = 0,
        on_leave: Callable[[Message], None] | None = None,
    ) -> None:
        self.is_alive = True
        self.pid = 0
        self.write_bytes_per_s: float | None = None
        """What writing has reached so far."""
        self._channel = channel
        self._on_leave = on_leave
        self._changed = threading.Condition()
        self._free: set[int] = set()
        self._outcomes: Recent[int, Outcome] = Recent()
        self._answers: list[Message] = []
        self._numbers = itertools.count(CONTROL_NUMBER + 1)
        self._asked = itertools.count(1)
        self._last_asked: Recent[int, int] = Recent()
        """Which of this rank's requests was the last one about a step: what became of others of it is no answer."""
        self._control = Block.allocate(CONTROL_NUMBER, PAGE_BYTES)
        self._marks = (ctypes.c_uint64 * NUM_MARKS).from_address(self._control.address)
        self._send({"type": "hello", "rank": rank, "num_ranks": num_ranks, "restart": restart})
        self.lend(self._control)
        threading.Thread(target=self._listen, name="safepoint-keeper", daemon=True).start()

    @classmethod
    def reach(cls, name: str, *, wait_s: float = 0.0, **identity: Any) -> "KeeperClient | None":
        """Connect to the keeper called `name`; None when there is none.

        Args:
            name: see `messages.new_name`.
            wait_s: how long it may take to start.
            identity: see `Keeper`.
        """
        deadline_s = clock.monotonic_s() + wait_s
        while True:
            try:
                return cls(connect(name), **identity)
            except OSError:
                if clock.monotonic_s() >= deadline_s:
                    return None
                clock.sleep(0.01)

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        if not self.is_alive:
            return
        try:
            self._channel.send(message, descriptors)
        except OSError:
            self._lost()

    def _lost(self) -> None:
        with self._changed:
            self.is_alive = False
            self._changed.notify_all()

    def _listen(self) -> None:
        while True:
            received = self._channel.receive()
            if received is None:
                self._lost()
                return
            message, _ = received
            kind = message["type"]
            with self._changed:
                if kind == "free":
                    self._free.update(message["blocks"])
                elif kind == "outcome":
                    self._note(Outcome(**message["outcome"], heard_s=clock.monotonic_s()), message["asked"])
                elif kind == "welcome":
                    self.pid = message["pid"]
                elif kind == "answer":
                    self._answers.append(message)
                self._changed.notify_all()
            if kind == "leave" and self._on_leave is not None:
                self._on_leave(message)

    def _note(self, outcome: Outcome, asked: int) -> None:
        if self._last_asked.get(outcome.step, 0) == asked:
            self._outcomes[outcome.step] = outcome
        if outcome.is_durable and outcome.write_s > 0:
            self.write_bytes_per_s = outcome.size_bytes / outcome.write_s

    def _ask_about(self, step: int) -> int:
        with self._changed:
            self._outcomes.pop(step, None)
            self._last_asked[step] = asked = next(self._asked)
        return asked

    # ---- memory -----------------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """For a block; no other one that this connection has lent, or will lend, has it."""
        return next(self._numbers)

    def lend(self, block: Block) -> None:
        """Let the keeper map a block."""
        self._send({"type": "block", "number": block.number, "capacity": block.capacity_bytes}, [block.descriptor])

    def populated(self, block: Block) -> None:
        """All pages of the block are there: the keeper may map them."""
        self._send({"type": "populated", "number": block.number})

    def take_back(self, block: Block) -> None:
        """The block is closed next."""
        self._send({"type": "drop", "number": block.number})

    def is_free(self, block: Block) -> bool:
        """Whether the block may be overwritten."""
        return block.number in self._free

    def use(self, blocks: Sequence[Block]) -> None:
        """The blocks are going to be overwritten."""
        with self._changed:
            self._free -= {block.number for block in blocks}
        # Before the first byte: a snapshot that is partly overwritten must not be taken for whole.
        self._send({"type": "use", "blocks": [block.number for block in blocks]})

    def release(self, blocks: Sequence[Block]) -> None:
        """New blocks, or those of a snapshot that never began, may be used."""
        with self._changed:
            self._free |= {block.number for block in blocks}

    def set_mark(self, block: Block, num_bytes: int) -> None:
        """How much of a block is there."""
        self._marks[block.number % NUM_MARKS] = num_bytes

    # ---- snapshots --------------------------------------------------------------------------------------------

    def begin(
        self,
        step: int,
        files: Sequence[Mapping[str, Any]],
        *,
        trigger: Trigger,
        is_wanted: bool,
        facts: Mapping[str, Any] | None,
        number: int,
    ) -> None:
        """Say what is being staged; see `ledger.Ledger.begin`, `ledger.StagedFile` and `committing.Facts`."""
        message = {"step": step, "files": list(files), "trigger": trigger, "wanted": is_wanted, "facts": facts}
        self._send({"type": "begin", "asked": self._ask_about(step), "number": number, **message})

    def staged(self, step: int) -> None:
        """All of it is there."""
        self._send({"type": "staged", "step": step})

    def give_up(self, step: int, number: int) -> None:
        """It will not be."""
        self._send({"type": "give_up", "step": step, "number": number})

    def want(self, step: int, trigger: Trigger) -> None:
        """Make a staged snapshot durable."""
        self._send({"type": "want", "asked": self._ask_about(step), "step": step, "trigger": trigger})

    def outcome(self, step: int) -> Outcome | None:
        """What became of the snapshot of `step`; None while nobody knows."""
        return self._outcomes.get(step)

    def wait(self, step: int, deadline_s: float | None = None) -> Outcome:
        """Wait until the snapshot of `step` is durable, or will not be.

        Args:
            step: which was wanted.
            deadline_s: by the monotonic clock.
        """
        with self._changed:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - clock.monotonic_s())
            self._changed.wait_for(
                lambda: step in self._outcomes or step not in self._last_asked or not self.is_alive, timeout_s
            )
            outcome = self._outcomes.get(step)
        if outcome is not None:
            return outcome
        if step not in self._last_asked:
            return Outcome(step=step, error="it was not asked for, or so long ago that it is forgotten")
        return Outcome(step=step, error="the keeper ended" if not self.is_alive else "the time was not enough")

    # ---- the job ----------------------------------------------------------------------------------------------

    def open_folder(self, folder: str, *, is_committer: bool = True) -> str:
        """Where checkpoints go from now on; a rank says so when the folder is claimed.

        Args:
            folder: absolute.
            is_committer: whether this keeper commits and prunes, as one of all nodes does.

        Returns:
            Why the keeper cannot hold it too; empty when it does.
        """
        answer = self._ask({"type": "folder", "folder": folder, "is_committer": is_committer})
        return "the keeper ended" if answer is None else answer["error"]

    def close_folder(self) -> None:
        """Wait until everything is written; the folder is somebody else's then."""
        self._ask({"type": "close_folder"})

    def recall(self) -> Recalled | None:
        """The newest complete snapshot of the ranks' last start, once the keeper has made it durable."""
        answer = self._ask({"type": "recall"})
        if answer is None or not answer["folder"]:
            return None
        return Recalled(folder=answer["folder"], manifest=answer["manifest"], is_durable=answer["is_durable"])

    def restored(self) -> None:
        """The recalled snapshot is no longer needed."""
        self._send({"type": "restored"})

    def rescue(self, step: int, why: str) -> None:
        """Make the newest complete snapshot durable and let all ranks leave; the answer comes to `on_leave`.

        Args:
            step: the one that is given up.
            why: the reason.
        """
        self._send({"type": "rescue", "step": step, "why": why})

    def entrust(self, folder: str) -> None:
        """Have a temporary folder of this rank removed when the rank is gone, however it ends."""
        self._send({"type": "entrust", "folder": folder})

    def leave(self) -> None:
        """This rank ends as it should."""
        self._send({"type": "bye"})

    def _ask(self, message: Message) -> Message | None:
        with self._changed:
            self._answers.clear()
        self._send(message)
        with self._changed:
            self._changed.wait_for(lambda: bool(self._answers) or not self.is_alive)
            return self._answers.pop() if self._answers else None

    def close(self) -> None:
        """Hang up."""
        self._lost()
        self._channel.close()
        # The marks stay mapped: a copying thread may still be about to set one.
