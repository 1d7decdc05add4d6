"""A rank's connection to its node's keeper: lends memory to the keeper, describes snapshots, receives the outcomes of
saves.

The keeper is the process of a node that writes snapshots to disk. A rank *lends* a block of shared memory to the
keeper by sending the descriptor of the block, so that the keeper can read the block.
"""

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Sequence

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation import clock
from safepoint.foundation.channels.channel import Channel, ChannelError, close_all
from safepoint.foundation.channels.codec import ProtocolError, encode
from safepoint.snapshot.memory.block import CONTROL_NUMBER, NUM_MARKS, PAGE_BYTES, Block
from safepoint.snapshot.protocol import messages
from safepoint.snapshot.protocol.bounded_dict import BoundedDict
from safepoint.snapshot.protocol.channel import connect
from safepoint.snapshot.protocol.messages import Answer, CheckpointFacts, EarlierSnapshot, Outcome, StagedFile

_log = logging.getLogger("safepoint")


class KeeperClient:
    """One rank's connection to its node's keeper.

    Args:
        channel: the connection.
        rank: the number of this rank in the job.
        num_ranks: how many ranks this node has.
        restart: how many times the ranks have been restarted; 0 for the first start.
        on_leave: called on the receiving thread when the keeper sends `Leave`. The function has to end this rank.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int,
        num_ranks: int,
        restart: int = 0,
        on_leave: Callable[[messages.Leave], None] | None = None,
    ) -> None:
        self.is_alive = True
        self.pid = 0
        """The pid of the keeper; 0 until the keeper has answered."""
        self.identity = ""
        """Identifies the keeper; see `HeldFolder`. Empty until the keeper has answered."""
        self.write_bytes_per_s: float | None = None
        """How fast the last successful save was written; None before the first successful save."""
        self._channel = channel
        self._on_leave = on_leave
        self._changed = threading.Condition()
        self._free: set[int] = set()
        self._outcomes: BoundedDict[int, Outcome] = BoundedDict()
        self._answer: Answer | None = None
        self._is_asking = False
        self._block_numbers = itertools.count(CONTROL_NUMBER + 1)
        self._request_numbers = itertools.count(1)
        self._requests: BoundedDict[int, int] = BoundedDict()
        """Step → the number of this rank's last request to save this step. Outcomes of earlier requests are
        ignored."""
        self._control = Block.allocate(CONTROL_NUMBER, PAGE_BYTES)
        self._marks = (ctypes.c_uint64 * NUM_MARKS).from_address(self._control.address)
        self.send(messages.Hello(rank=rank, num_ranks=num_ranks, restart=restart))
        self.lend(self._control)
        threading.Thread(target=self._receive, name="safepoint-keeper", daemon=True).start()

    @classmethod
    def connect(
        cls,
        key: str,
        *,
        wait_s: float = 0.0,
        rank: int,
        num_ranks: int,
        restart: int = 0,
        on_leave: Callable[[messages.Leave], None] | None = None,
    ) -> "KeeperClient | None":
        """Connect to the keeper with this key. Return None if no keeper with this key answers.

        Args:
            key: see `KeeperPlan`.
            wait_s: how long the keeper may take to start.
            rank: see `KeeperClient`.
            num_ranks: see `KeeperClient`.
            restart: see `KeeperClient`.
            on_leave: see `KeeperClient`.
        """
        deadline_s = clock.monotonic_s() + wait_s
        while True:
            try:
                return cls(connect(key), rank=rank, num_ranks=num_ranks, restart=restart, on_leave=on_leave)
            except OSError:
                if clock.monotonic_s() >= deadline_s:
                    return None
                clock.sleep(0.01)

    def send(self, message: messages.RankMessage, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and do not wait for an answer. If the keeper has ended, nothing is sent."""
        if not self.is_alive:
            return
        try:
            self._channel.send(encode(message), descriptors)
        except OSError:
            self._lose()

    def _lose(self) -> None:
        with self._changed:
            self.is_alive = False
            self._changed.notify_all()

    def _receive(self) -> None:
        try:
            while True:
                body, descriptors = self._channel.receive()
                close_all(descriptors)
                message = messages.decode_keeper_message(body)
                with self._changed:
                    self._handle(message)
                    self._changed.notify_all()
                if isinstance(message, messages.Leave) and self._on_leave is not None:
                    self._on_leave(message)
        except ChannelError:
            pass  # the keeper has ended
        except ProtocolError as error:
            _log.warning("the keeper sent an invalid message, and is not used any more: %.300s", error)
        self._lose()

    def _handle(self, message: messages.KeeperMessage) -> None:
        match message:
            case messages.Welcome():
                self.pid, self.identity = message.pid, message.identity
            case messages.Refused():
                _log.warning("the keeper refused this rank: %s", message.reason)
            case messages.BlocksFree():
                self._free.update(message.numbers)
            case messages.SaveEnded():
                outcome = message.outcome
                if self._requests.get(outcome.step, 0) == message.request:
                    self._outcomes[outcome.step] = outcome
                if outcome.is_durable and outcome.write_s > 0:
                    self.write_bytes_per_s = outcome.size_bytes / outcome.write_s
            case messages.Answer():
                self._answer = message
            case messages.Leave():
                pass

    def _new_request(self, step: int) -> int:
        with self._changed:
            self._outcomes.pop(step, None)
            self._requests[step] = request = next(self._request_numbers)
        return request

    # ---- memory -----------------------------------------------------------------------------------------------

    def new_block_number(self) -> int:
        """A number that no other block of this connection has."""
        return next(self._block_numbers)

    def lend(self, block: Block) -> None:
        """Send the descriptor of a block to the keeper, which maps the block."""
        message = messages.LendBlock(number=block.number, capacity_bytes=block.capacity_bytes)
        self.send(message, [block.descriptor])

    def is_free(self, block: Block) -> bool:
        """Whether the block may be overwritten."""
        return block.number in self._free

    def overwrite(self, blocks: Sequence[Block]) -> None:
        """Notify the keeper that these blocks are about to be overwritten."""
        with self._changed:
            self._free -= {block.number for block in blocks}
        # The message is sent before the first byte is overwritten, because the keeper must not write a snapshot that
        # is partly overwritten.
        self.send(messages.OverwriteBlocks(numbers=tuple(block.number for block in blocks)))

    def mark_free(self, blocks: Sequence[Block]) -> None:
        """Record that these blocks may be overwritten: they are new, or belong to a snapshot that did not begin."""
        with self._changed:
            self._free |= {block.number for block in blocks}

    def set_num_copied(self, block: Block, num_bytes: int) -> None:
        """Set how many bytes of a block have been copied; the keeper may write these bytes to disk."""
        self._marks[block.number % NUM_MARKS] = num_bytes

    # ---- snapshots --------------------------------------------------------------------------------------------

    def begin_snapshot(
        self,
        step: int,
        files: tuple[StagedFile, ...],
        *,
        trigger: Trigger,
        is_requested: bool,
        facts: CheckpointFacts | None,
        number: int,
    ) -> None:
        """Announce to the keeper which files are being staged; see `BeginSnapshot`."""
        message = messages.BeginSnapshot(
            step=step,
            number=number,
            request=self._new_request(step),
            files=files,
            trigger=trigger,
            is_requested=is_requested,
            facts=facts,
        )
        self.send(message)

    def request_save(self, step: int, trigger: Trigger) -> None:
        """Request a checkpoint of a snapshot that is in memory."""
        self.send(messages.RequestSave(step=step, trigger=trigger, request=self._new_request(step)))

    def outcome(self, step: int) -> Outcome | None:
        """How the save of `step` ended; None while it is not known."""
        return self._outcomes.get(step)

    def wait(self, step: int, deadline_s: float | None = None) -> Outcome:
        """Wait until the save of `step` has ended.

        Args:
            step: the step whose save was requested.
            deadline_s: when the wait ends, by the monotonic clock; None for no limit.

        Returns:
            How the save ended. If that is not known after the wait, the `error` of the result says why.
        """
        with self._changed:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - clock.monotonic_s())
            self._changed.wait_for(
                lambda: step in self._outcomes or step not in self._requests or not self.is_alive, timeout_s
            )
            outcome = self._outcomes.get(step)
        if outcome is not None:
            return outcome
        if step not in self._requests:
            return Outcome(step=step, error="its save was not requested, or was requested too long ago")
        return Outcome(
            step=step, error="the keeper ended" if not self.is_alive else "the save takes longer than the wait"
        )

    # ---- the job ----------------------------------------------------------------------------------------------

    def open_folder(self, folder: str, *, is_committer: bool = True) -> str:
        """Make the keeper write checkpoints into a folder that this job has claimed (locked for itself).

        Args:
            folder: the absolute path.
            is_committer: see `OpenFolder`.

        Returns:
            Why the keeper cannot hold the folder; empty if it holds the folder.
        """
        self.request_folder(folder, is_committer=is_committer)
        return self.folder_error()

    def request_folder(self, folder: str, *, is_committer: bool = True) -> None:
        """Like `open_folder`, but return before the keeper has answered; the keeper may still be starting."""
        self._request(messages.OpenFolder(folder=folder, is_committer=is_committer))

    def folder_error(self) -> str:
        """Wait for the answer to the last `request_folder`; see `open_folder`."""
        return self._wait_for_answer().error

    def close_folder(self) -> None:
        """Wait until the keeper has written all requested snapshots and has released the folder."""
        self._ask(messages.CloseFolder())

    def find_earlier_snapshot(self) -> EarlierSnapshot | None:
        """Wait until all saves requested before the restart are written; then find the newest snapshot in memory.

        Returns:
            The newest snapshot that the ranks completed before the restart. None if there is no such snapshot, if it
            cannot be used, or if the job has several nodes.
        """
        return self._ask(messages.FindEarlierSnapshot()).snapshot

    def _ask(self, message: messages.RankMessage) -> Answer:
        """Send a message and wait for its answer."""
        self._request(message)
        return self._wait_for_answer()

    def _request(self, message: messages.RankMessage) -> None:
        """Send a message that the keeper answers. Waits first for the answer to the last request."""
        if self._is_asking:
            self._wait_for_answer()
        with self._changed:
            self._answer, self._is_asking = None, True
        self.send(message)

    def _wait_for_answer(self) -> Answer:
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or not self.is_alive)
            self._is_asking = False
            return self._answer or Answer(error="the keeper ended")

    def close(self) -> None:
        """Close the connection."""
        self._lose()
        self._channel.close()
        # The control block stays mapped: a copying thread may still write to it.
