"""What the keeper does when a rank sends a message, or when the rank's connection is closed.

The keeper is the process of each node that writes snapshots to disk. A rank sends it blocks: pieces of shared memory
that hold the files of snapshots.
"""

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.channels.channel import close_all
from safepoint.foundation.channels.codec import ProtocolError
from safepoint.snapshot.keeper.earlier_snapshot import EarlierSnapshotLinks
from safepoint.snapshot.keeper.keeper_state import URGENT, KeeperState, Rank, RankGroup
from safepoint.snapshot.keeper.rescue import leave_with_newest, rescue, watch_others
from safepoint.snapshot.keeper.snapshot_registry import Progress
from safepoint.snapshot.memory.block import CONTROL_NUMBER, PAGE_BYTES, Block
from safepoint.snapshot.protocol import messages
from safepoint.snapshot.protocol.messages import Answer, Outcome, decode_rank_message


class MessageHandler:
    """Carries out the messages of ranks.

    For each rank, one thread receives the rank's messages and calls these methods, without holding
    `KeeperState.changed`.

    Args:
        state: the state of the keeper.
        earlier: finds the newest snapshot of earlier ranks.
    """

    def __init__(self, state: KeeperState, earlier: EarlierSnapshotLinks) -> None:
        self._state = state
        self._earlier = earlier

    def handle(self, group: RankGroup, rank: Rank, body: bytes, descriptors: Sequence[int]) -> None:
        """Do what a message requests.

        Args:
            group: the ranks that started together with `rank`.
            rank: the sender.
            body: the message; not the first one, `Hello`.
            descriptors: file descriptors that came with the message; closed here unless the message is `LendBlock`.

        Raises:
            ProtocolError: the message is invalid, or the rank may not send it now.
            OSError: memory cannot be mapped.
        """
        try:
            message = decode_rank_message(body)
            if len(descriptors) != (1 if isinstance(message, messages.LendBlock) else 0):
                raise ProtocolError(f"{len(descriptors)} descriptors came with {type(message).__name__}")  # noqa: TRY301
        except ProtocolError:
            close_all(descriptors)
            raise
        with self._state.changed:
            if isinstance(message, messages.SnapshotMessage):
                self._handle_snapshot(group, rank, message, descriptors)
            elif isinstance(message, messages.JobMessage):
                self._handle_job(group, rank, message)
            else:
                raise ProtocolError("Hello must be the first message, and is sent only once")
            self._state.notify(group)

    def _handle_snapshot(
        self, group: RankGroup, rank: Rank, message: messages.SnapshotMessage, descriptors: Sequence[int]
    ) -> None:
        match message:
            case messages.LendBlock():
                _map_block(group, rank, message, descriptors[0])
            case messages.BlockPopulated():
                block = rank.blocks.get(message.number)
                if block is None:
                    raise ProtocolError(f"block {message.number} was not lent")
                threading.Thread(target=block.populate, daemon=True).start()
            case messages.ReturnBlock():
                # The block is not closed here, because a write that was given up may still read it. It is unmapped
                # when the last reference to it is gone.
                rank.blocks.pop(message.number, None)
            case messages.OverwriteBlocks():
                group.registry.overwrite(rank.number, set(message.numbers))
            case messages.BeginSnapshot():
                self._begin(group, rank, message)
            case messages.SnapshotStaged():
                group.registry.staged(rank.number, message.step)
            case messages.CancelSnapshot():
                _cancel(group, rank, message)
            case messages.RequestSave():
                _request(group, rank, message)

    def _handle_job(self, group: RankGroup, rank: Rank, message: messages.JobMessage) -> None:
        match message:
            case messages.OpenFolder():
                self._open_folder(group, rank, message)
            case messages.CloseFolder():
                self._close_folder(group)
                rank.send(Answer())
            case messages.FindEarlierSnapshot():
                rank.send(Answer(snapshot=self._earlier.find()))
            case messages.ReleaseEarlierSnapshot():
                self._state.forget_earlier()
            case messages.AbandonStep():
                group.waits_to_leave = True
                # This runs on another thread, because it may wait for a message that only this thread can receive.
                arguments = [self._state, group, message.step, message.reason]
                threading.Thread(target=leave_with_newest, args=arguments, daemon=True).start()
            case messages.RemoveAtExit():
                rank.scratch = message.folder
            case messages.Goodbye():
                rank.has_said_goodbye = True

    def disconnected(self, group: RankGroup, rank: Rank) -> None:
        """Handle the end of a rank's connection. If the rank has not sent `Goodbye`, it has failed."""
        if rank.scratch is not None:
            shutil.rmtree(rank.scratch, ignore_errors=True)
        with self._state.changed:
            rank.is_connected = False
            if not rank.has_said_goodbye:
                group.has_failed = True
                if group.failed_s is None:
                    group.failed_s = clock.monotonic_s()
            if group.is_over:
                group.registry.cancel_incomplete()
            if group.has_failed:
                rescue(self._state, group)
            self._state.notify(group)

    # ---- the folder ---------------------------------------------------------------------------------------------

    def _open_folder(self, group: RankGroup, rank: Rank, message: messages.OpenFolder) -> None:
        """Open and lock the folder, and answer. If a snapshot is being written, a thread does so after the write."""
        if self._state.folder.path == Path(message.folder):
            rank.send(Answer())
            return
        # A training that ended with an error did not close its folder. Its snapshots must not be written to the new
        # folder.
        group.registry.clear()
        if self._state.is_idle(group):
            self._open_idle(rank, message)
        else:
            # This thread must not wait: it receives the message that the snapshot which is being written is staged.
            threading.Thread(
                target=self._open_after_write, args=[group, rank, message], name="safepoint-open", daemon=True
            ).start()

    def _open_after_write(self, group: RankGroup, rank: Rank, message: messages.OpenFolder) -> None:
        """On a thread: keep the lock on the old folder until the write has ended, then open the new folder. Without
        the lock, another keeper could write to the old folder at the same time."""
        state = self._state
        with state.changed:
            group.left_s = clock.monotonic_s()
            self._wait_for_writes(group)
            group.left_s = None
            group.registry.clear()  # the previous training may have cancelled snapshots meanwhile
            self._open_idle(rank, message)
            state.notify(group)

    def _open_idle(self, rank: Rank, message: messages.OpenFolder) -> None:
        error = ""
        try:
            self._state.folder.open(Path(message.folder), is_committer=message.is_committer)
        except OSError as failure:
            error = f"the keeper cannot hold {message.folder}: {failure}"
        rank.send(Answer(error=error))

    def _close_folder(self, group: RankGroup) -> None:
        state = self._state
        self._wait_for_writes(group)
        state.folder.close()
        group.registry.clear()
        # This call may send `BlocksFree`. If it were made after the answer, the next training would receive that
        # message.
        state.notify(group)

    def _wait_for_writes(self, group: RankGroup) -> None:
        """Wait until nothing is being written, and no snapshot of these ranks waits to be written."""
        state = self._state
        state.is_closing = True
        state.priority.restore()
        state.changed.wait_for(lambda: state.is_idle(group))
        state.is_closing = False

    # ---- snapshots ----------------------------------------------------------------------------------------------

    def _begin(self, group: RankGroup, rank: Rank, message: messages.BeginSnapshot) -> None:
        for file in message.files:
            block = rank.blocks.get(file.block)
            # Check the size, because reading memory beyond the end of the block would kill this process.
            if block is None or file.offset + file.size_bytes > _readable_bytes(block):
                raise ProtocolError(f"{file.path} does not fit into block {file.block}, or the block was not lent")
        rank.requests[message.step] = message.request
        if message.step not in group.begun_s:  # this rank is the first to begin the step
            group.begun_s[message.step] = clock.monotonic_s()
        snapshot = group.registry.begin(
            rank.number,
            message.step,
            message.files,
            trigger=message.trigger,
            is_requested=message.is_requested,
            facts=message.facts,
            number=message.number,
        )
        if snapshot.facts is not None and snapshot.facts.num_nodes > 1 and not group.is_watching:
            group.is_watching = True
            arguments = [self._state, group, snapshot.facts]
            threading.Thread(target=watch_others, args=arguments, daemon=True).start()
        if not snapshot.is_intact:
            rank.send_outcome(Outcome(step=snapshot.step, error="another rank could not stage its part"))


def _map_block(group: RankGroup, rank: Rank, message: messages.LendBlock, descriptor: int) -> None:
    block = Block(message.number, descriptor, message.capacity_bytes)
    if message.number == CONTROL_NUMBER and _readable_bytes(block) < PAGE_BYTES:
        raise ProtocolError("the block with the watermarks is smaller than a page")
    rank.blocks[message.number] = block
    group.registry.add_block(rank.number, message.number)


def _readable_bytes(block: Block) -> int:
    """How many bytes of a block can be read: the rank may have made the file shorter than the stated capacity."""
    return min(block.capacity_bytes, os.fstat(block.descriptor).st_size)


def _cancel(group: RankGroup, rank: Rank, message: messages.CancelSnapshot) -> None:
    snapshot = group.registry.find(message.step)
    group.registry.cancel(message.step, message.number)
    if (
        snapshot is not None
        and snapshot.number == message.number
        and snapshot.is_requested
        and snapshot.progress != Progress.WRITING
    ):
        group.give_up(snapshot, f"rank {rank.number} could not stage its part")


def _request(group: RankGroup, rank: Rank, message: messages.RequestSave) -> None:
    step = message.step
    rank.requests[step] = message.request
    group.begun_s[step] = clock.monotonic_s()
    group.waits_to_leave |= message.trigger in URGENT
    snapshot = group.registry.find(step)
    if not group.registry.request(step, message.trigger):
        rank.send_outcome(Outcome(step=step, error="the snapshot is no longer in memory"))
    elif snapshot is not None and snapshot.progress == Progress.DURABLE:
        last = group.last_outcome
        rank.send_outcome(last if last is not None and last.step == step else Outcome(step=step, error=""))
