"""What a rank says to the keeper, and what follows from it."""

import shutil
import threading
from pathlib import Path

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation import clock
from safepoint.snapshot.keeper.ledger import Progress, StagedFile
from safepoint.snapshot.keeper.persist.snapshot_commit import Facts, excuse
from safepoint.snapshot.keeper.rank_starts import Rank, Start
from safepoint.snapshot.keeper.recall import Recall
from safepoint.snapshot.keeper.rescue import leave_with_newest, rescue, watch_others
from safepoint.snapshot.keeper.shared_state import URGENT, SharedState
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.protocol.channel import Message

_ABOUT_SNAPSHOTS = {"block", "populated", "drop", "use", "begin", "staged", "give_up", "want"}


class MessageHandler:
    """Called by the thread that listens to each rank; takes `Kept.changed` itself.

    Args:
        kept: what is kept.
        recall: what an earlier start has left.
    """

    def __init__(self, kept: SharedState, recall: Recall) -> None:
        self._kept = kept
        self._recall = recall

    def hear(self, start: Start, rank: Rank, message: Message, descriptors: list[int]) -> None:
        """Do what a message asks for.

        Args:
            start: the rank's.
            rank: who says it.
            message: what it says.
            descriptors: of files that came with it.

        Raises:
            Exception: it is no message of ours, or the rank does not hear the answer.
        """
        kind = message["type"]
        kept = self._kept
        with kept.changed:
            if kind in _ABOUT_SNAPSHOTS:
                self._hear_of_snapshot(start, rank, message, descriptors)
            elif kind == "folder":
                rank.channel.send({"type": "answer", "error": self._open_folder(start, message)})
            elif kind == "close_folder":
                self._close_folder(start)
                rank.channel.send({"type": "answer"})
            elif kind == "recall":
                rank.channel.send(self._recall.answer())
            elif kind == "restored":
                kept.forget_earlier()
            elif kind == "rescue":
                start.is_hurried = True
                # On a thread of its own: what it waits for may be this rank's next message.
                threading.Thread(
                    target=leave_with_newest, args=[kept, start, message["step"], message["why"]], daemon=True
                ).start()
            elif kind == "entrust":
                rank.scratch = message["folder"]
            elif kind == "bye":
                rank.has_said_bye = True
            kept.settle(start)

    def gone(self, start: Start, rank: Rank) -> None:
        """The rank has hung up; where it has not said goodbye, it has failed."""
        if rank.scratch is not None:
            shutil.rmtree(rank.scratch, ignore_errors=True)
        with self._kept.changed:
            rank.is_connected = False
            if not rank.has_said_bye and start.failed_s is None:
                start.failed_s = clock.monotonic_s()
            start.has_failed |= not rank.has_said_bye
            if start.is_over:
                start.ledger.give_up_unfinished()
            if start.has_failed:
                rescue(self._kept, start)
            self._kept.settle(start)

    # ---- the folder ---------------------------------------------------------------------------------------------

    def _open_folder(self, start: Start, message: Message) -> str:
        """Why it cannot be held; empty when it is."""
        path = Path(message["folder"])
        if self._kept.folder.path == path:
            return ""
        start.ledger.forget()  # what is left of a training that ended by an error belongs elsewhere
        try:
            self._kept.folder.open(path, is_committer=message["is_committer"])
        except OSError as error:
            return f"the keeper cannot hold {path}: {error}"
        return ""

    def _close_folder(self, start: Start) -> None:
        kept = self._kept
        kept.is_closing = True
        kept.priority.restore()
        kept.changed.wait_for(lambda: kept.is_idle(start))
        kept.is_closing = False
        kept.folder.close()
        start.ledger.forget()
        kept.settle(start)  # first what is free: the next training would hear of it in the middle of its own

    # ---- snapshots ----------------------------------------------------------------------------------------------

    def _hear_of_snapshot(self, start: Start, rank: Rank, message: Message, descriptors: list[int]) -> None:
        kind = message["type"]
        if kind == "block":
            [descriptor] = descriptors
            rank.blocks[message["number"]] = Block(message["number"], descriptor, message["capacity"])
            start.ledger.lend(rank.rank, message["number"])
        elif kind == "populated":  # not before: the limits on memory are looked at by who takes it
            threading.Thread(target=rank.blocks[message["number"]].populate, daemon=True).start()
        elif kind == "drop":
            # Unmapped when nothing refers to it: it may be in the middle of a write that is being given up.
            rank.blocks.pop(message["number"], None)
        elif kind == "use":
            start.ledger.use(rank.rank, set(message["blocks"]))
        elif kind == "begin":
            self._begin(start, rank, message)
        elif kind == "staged":
            start.ledger.staged(rank.rank, message["step"])
        elif kind == "give_up":
            self._give_up(start, rank, message["step"], message["number"])
        else:
            self._want(start, rank, message)

    def _begin(self, start: Start, rank: Rank, message: Message) -> None:
        staged = tuple(StagedFile.of(file) for file in message["files"])
        missing = {file.block for file in staged} - set(rank.blocks)
        if missing:
            raise ValueError(f"block {min(missing)} was never lent")
        rank.asked[message["step"]] = message["asked"]
        if message["step"] not in start.begun_s:  # by another rank
            start.begun_s[message["step"]] = clock.monotonic_s()
        snapshot = start.ledger.begin(
            rank.rank,
            message["step"],
            staged,
            trigger=Trigger(message["trigger"]),
            is_wanted=message["wanted"],
            facts=message["facts"],
            number=message["number"],
        )
        if snapshot.facts and snapshot.facts.get("num_nodes", 1) > 1 and not start.is_watching:
            start.is_watching = True
            facts = Facts(**snapshot.facts)
            threading.Thread(target=watch_others, args=[self._kept, start, facts], daemon=True).start()
        if not snapshot.is_intact:
            rank.tell_outcome({"step": snapshot.step, "error": "another rank could not stage its part"})

    def _give_up(self, start: Start, rank: Rank, step: int, number: int) -> None:
        snapshot = start.ledger.find(step)
        start.ledger.give_up(step, number)
        if (
            snapshot is not None
            and snapshot.number == number
            and snapshot.is_wanted
            and snapshot.progress != Progress.WRITING
        ):
            error = f"rank {rank.rank} could not stage its part"
            excuse(snapshot, error)
            start.tell_outcome({"step": step, "error": error})

    def _want(self, start: Start, rank: Rank, message: Message) -> None:
        step = message["step"]
        rank.asked[step] = message["asked"]
        start.begun_s[step] = clock.monotonic_s()
        snapshot = start.ledger.find(step)
        start.is_hurried |= Trigger(message["trigger"]) in URGENT
        if not start.ledger.want(step, Trigger(message["trigger"])):
            rank.tell_outcome({"step": step, "error": "the snapshot is gone"})
        elif snapshot is not None and snapshot.progress == Progress.DURABLE:
            rank.tell_outcome(start.outcomes.get(step, {"step": step, "error": ""}))
