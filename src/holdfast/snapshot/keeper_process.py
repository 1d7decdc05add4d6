"""The keeper's process: `python -m holdfast.snapshot.keeper_process PLAN`.

One thread listens to each rank, one writes, the main thread watches over the end: the keeper goes when its owner is
gone, no rank is connected, and nothing is left to write. It ignores the signals that end ranks. It imports no torch.
"""

import contextlib
import dataclasses
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.commit import RankPart
from holdfast.checkpoint.manifest import MANIFEST_NAME, Manifest, Trigger
from holdfast.checkpoint.output_folder import OutputFolder
from holdfast.errors import HoldfastError
from holdfast.foundation import clock, console, files
from holdfast.foundation.environment import host_name
from holdfast.foundation.events import Event, EventLog, Saved, SaveFailed, SaveSuperseded
from holdfast.foundation.files import FolderLock
from holdfast.foundation.priority import Priority
from holdfast.snapshot.block import Block
from holdfast.snapshot.committing import Facts, commit_snapshot, link_files, merge
from holdfast.snapshot.ledger import Progress, Snapshot, StagedFile
from holdfast.snapshot.messages import Channel, Message, check_same_user, listen
from holdfast.snapshot.starts import OTHERS_S, Rank, Start
from holdfast.snapshot.writing import GivenUpError

_LOOK_EVERY_S = 0.5
_TELL_EVERY_S = 60.0
_COPYING_S = 2.0
"""How long a copy into memory may still take when time is short."""
_URGENT = {Trigger.JIT, Trigger.FAILURE}
_PATIENCE_S = 5.0
_USUAL_BYTES_PER_S = 300e6
_SMALL_BYTES = 64 << 20
_ABOUT_SNAPSHOTS = {"block", "populated", "drop", "use", "begin", "staged", "give_up", "want"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlan:
    """What a keeper needs to begin.

    Args:
        name: under which ranks reach it.
        owner_pid: the process for which it lives on, or None for the one at the other end of its stdin.
        verbosity: of the console.
        scratch: a folder of the owner's, for this process too; removed here when the owner dies without a word.
        events: a stream of the job's for what happens, besides the one in the output folder.
    """

    name: str
    owner_pid: int | None = None
    verbosity: int = 0
    scratch: str | None = None
    events: str | None = None


class _Keeper:
    def __init__(self, plan: KeeperPlan) -> None:
        self._plan = plan
        self._log = console.set_up(plan.verbosity)
        self._events = self._log_to(None)
        self._server = listen(plan.name)
        self._changed = threading.Condition()
        self._start: Start | None = None
        self._past: Start | None = None
        self._is_writing = False
        self._owner_is_gone = False
        self._owner_is_dead = False
        self._lock: FolderLock | None = None
        self._folder: Path | None = None
        self._links: Path | None = None
        self._told_superseded_s = float("-inf")
        self._priority = Priority()
        self._is_closing = False

    # ---- the life of the process --------------------------------------------------------------------------------

    def run(self) -> int:
        for body, name in ((self._accept, "accept"), (self._write, "write")):
            threading.Thread(target=body, name=f"holdfast-{name}", daemon=True).start()
        self._watch_owner()
        with self._changed:
            self._owner_is_gone = True
            self._changed.wait_for(self._may_end)
        for folder in (self._links, self._plan.scratch if self._owner_is_dead else None):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return 0

    def _may_end(self) -> bool:
        return not self._is_writing and all(
            self._is_done(start) for start in (self._start, self._past) if start is not None
        )

    def _watch_owner(self) -> None:
        if self._plan.owner_pid is None:
            self._owner_is_dead = True
            while os.read(0, 4096):
                self._owner_is_dead = False  # it says goodbye
            return
        try:
            descriptor = os.pidfd_open(self._plan.owner_pid)
        except OSError:  # not every sandbox has it
            while Path(f"/proc/{self._plan.owner_pid}").exists():
                clock.sleep(_LOOK_EVERY_S)
            return
        select.select([descriptor], [], [])

    def _log_to(self, stream: Path | None) -> EventLog:
        return EventLog(stream, Path(self._plan.events) if self._plan.events else None, actor="keeper")

    def report(self, event: Event) -> None:
        self._events.write(event)
        (self._log.warning if event.is_warning else self._log.info)("%s", event.line)

    def _report_superseded(self, event: Event) -> None:
        """Into the stream each time; a console is told once a minute, or it would say nothing else."""
        self._events.write(event)
        now_s = clock.monotonic_s()
        is_due = now_s - self._told_superseded_s > _TELL_EVERY_S
        self._log.log(logging.WARNING if is_due else logging.DEBUG, "%s", event.line)
        if is_due:
            self._told_superseded_s = now_s

    # ---- ranks --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            connected, _ = self._server.accept()
            try:
                check_same_user(connected)
            except OSError:
                connected.close()
                continue
            threading.Thread(target=self._serve, args=[connected], daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        channel = Channel(connected)
        received = channel.receive()
        try:
            hello = received[0] if received is not None else {}
            start, rank = self._admit(channel, hello["rank"], hello["num_ranks"], hello["restart"])
        except KeyError:  # whoever it is does not speak to keepers
            channel.close()
            return
        try:
            channel.send({"type": "welcome", "pid": os.getpid()})
            while (received := channel.receive()) is not None:
                self._hear(start, rank, *received)
        except Exception as error:  # noqa: BLE001  the rank must be known to be gone, whatever it has said
            self._log.warning(
                "the keeper does not understand rank %s: %s: %s", rank.rank, type(error).__name__, error
            )
        self._disconnected(start, rank)
        channel.close()

    def _admit(self, channel: Channel, number: int, num_ranks: int, restart: int) -> tuple[Start, Rank]:
        with self._changed:
            while (start := self._start) is None or restart > start.restart or start.is_over:
                self._forget_past()
                if self._start is start:  # otherwise another rank was faster
                    self._past, self._start = start, Start(restart, num_ranks)
                    start = self._start
                    break
            assert start is not None
            before = start.ranks.get(number)
            if before is not None:  # it has lost its connection, and lends its memory anew
                start.ledger.disown(before.rank)
            rank = start.ranks[number] = Rank(number, channel)
            return start, rank

    def _forget_past(self) -> None:
        """Give the memory of an earlier start back, when all that is wanted of it is written."""
        while (past := self._past) is not None:
            self._changed.wait_for(lambda past=past: self._past is not past or self._is_done(past))
            if self._past is past:
                for rank in past.ranks.values():
                    rank.close()
                self._past = None

    def _is_done(self, start: Start) -> bool:
        """Whether a start is over, and nothing of it is left to be written."""
        return start.is_over and not start.is_rescuing and self._is_idle(start)

    def _hear(self, start: Start, rank: Rank, message: Message, descriptors: list[int]) -> None:
        kind = message["type"]
        with self._changed:
            if kind in _ABOUT_SNAPSHOTS:
                self._hear_of_snapshot(start, rank, message, descriptors)
            elif kind == "folder":
                rank.channel.send({"type": "answer", "error": self._open_folder(start, message)})
            elif kind == "close_folder":
                self._is_closing = True
                self._priority.hurry()
                self._changed.wait_for(lambda: self._is_idle(start))
                self._is_closing = False
                self._close_folder()
                start.ledger.forget()
                self._settle(start)  # first what is free: the next training would hear of it in the middle of its own
                rank.channel.send({"type": "answer"})
            elif kind == "recall":
                rank.channel.send(self._recall())
            elif kind == "restored":
                self._forget_past()
            elif kind == "rescue":
                start.is_hurried = True
                # On a thread of its own: what it waits for may be this rank's next message.
                threading.Thread(
                    target=self._leave_with_newest, args=[start, message["step"], message["why"]], daemon=True
                ).start()
            elif kind == "entrust":
                rank.scratch = message["folder"]
            elif kind == "bye":
                rank.has_said_bye = True
            self._settle(start)

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
            threading.Thread(target=self._watch_others, args=[start, Facts(**snapshot.facts)], daemon=True).start()
        if not snapshot.is_intact:
            error = "another rank could not stage its part"
            self._tell_outcome([rank], {"step": snapshot.step, "error": error})

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
            self._excuse(snapshot, error)
            self._tell_outcome(list(start.ranks.values()), {"step": step, "error": error})

    def _excuse(self, snapshot: Snapshot, error: str) -> None:
        """Other nodes must not wait for this one's part."""
        facts = Facts(**snapshot.facts) if snapshot.facts else None
        if facts is not None and facts.num_nodes > 1:
            with contextlib.suppress(OSError):
                facts.nodes.publish(facts.save, RankPart(rank=facts.node, error=error))

    def _want(self, start: Start, rank: Rank, message: Message) -> None:
        step = message["step"]
        rank.asked[step] = message["asked"]
        start.begun_s[step] = clock.monotonic_s()
        snapshot = start.ledger.find(step)
        start.is_hurried |= Trigger(message["trigger"]) in _URGENT
        if not start.ledger.want(step, Trigger(message["trigger"])):
            self._tell_outcome([rank], {"step": step, "error": "the snapshot is gone"})
        elif snapshot is not None and snapshot.progress == Progress.DURABLE:
            self._tell_outcome([rank], start.outcomes.get(step, {"step": step, "error": ""}))

    def _disconnected(self, start: Start, rank: Rank) -> None:
        if rank.scratch is not None:
            shutil.rmtree(rank.scratch, ignore_errors=True)
        with self._changed:
            rank.is_connected = False
            if not rank.has_said_bye and start.failed_s is None:
                start.failed_s = clock.monotonic_s()
            start.has_failed |= not rank.has_said_bye
            if start.is_over:
                start.ledger.give_up_unfinished()
            if start.has_failed:
                self._rescue(start)
            self._settle(start)

    def _rescue(self, start: Start) -> Snapshot | None:
        """Make the newest complete snapshot durable; with several nodes, the newest that all of them have."""
        facts = start.facts
        if facts is not None and facts.num_nodes > 1:
            if not start.is_rescuing and not start.is_rescued:
                start.is_rescuing = True
                threading.Thread(target=self._rescue_with_others, args=[start, facts], daemon=True).start()
            return None
        newest = start.ledger.newest_complete
        if newest is not None and newest.progress != Progress.DURABLE and newest.facts:
            start.ledger.want(newest.step, Trigger.FAILURE)
        return newest

    def _watch_others(self, start: Start, facts: Facts) -> None:
        """Notice that another node's ranks are gone, when this one's do not notice it themselves."""
        while not start.is_over and not start.is_rescued:
            if facts.nodes.is_called():
                with self._changed:
                    self._rescue(start)
                return
            clock.sleep(_LOOK_EVERY_S)

    def _rescue_with_others(self, start: Start, facts: Facts) -> None:
        step: int | None = None
        try:
            with self._changed:
                # Ranks that are still there may be about to end a copy; their peers are gone, and so are they soon.
                self._changed.wait_for(lambda: start.is_over, OTHERS_S / 3 if start.has_failed else 0)
                steps = [one.step for one in start.ledger.snapshots if one.is_complete]
                start.failed_s = start.failed_s or clock.monotonic_s()
            facts.nodes.offer(steps)
            step = facts.nodes.newest_of_all(start.is_hopeless)
        except OSError as error:
            self._log.warning("the newest snapshot of all nodes cannot be found: %s", error)
        finally:
            with self._changed:
                snapshot = start.ledger.find(step) if step is not None else None
                if snapshot is not None and snapshot.progress != Progress.DURABLE:
                    start.ledger.want(snapshot.step, Trigger.FAILURE)
                start.rescued_step = step
                start.is_rescuing, start.is_rescued = False, True
                self._settle(start)

    def _settle(self, start: Start) -> None:
        """After every change: say what is superseded and what may be overwritten, wake whoever waits."""
        for snapshot in start.ledger.take_superseded():
            newest = start.ledger.newest_complete
            by = newest.step if newest is not None else snapshot.step
            self._report_superseded(SaveSuperseded(step=snapshot.step, trigger=str(snapshot.trigger), by=by))
            error = f"superseded by step {by} before its writing began"
            self._excuse(snapshot, error)
            self._tell_outcome(list(start.ranks.values()), {"step": snapshot.step, "error": error})
        for rank in start.ranks.values():
            free = start.ledger.newly_free(rank.rank, rank.lent)
            if free and rank.is_connected:
                self._tell(rank, {"type": "free", "blocks": free})
        if self._is_urgent(start):
            self._priority.hurry()
        self._changed.notify_all()

    def _is_urgent(self, start: Start) -> bool:
        """Whether somebody waits for what is being written, or about to be."""
        return (
            self._is_closing
            or start.has_failed
            or start.is_hurried
            or any(one.is_wanted and one.trigger in _URGENT and one.is_open for one in start.ledger.snapshots)
        )

    def _tell(self, rank: Rank, message: Message) -> None:
        if rank.is_connected:
            try:
                rank.channel.send(message)
            except OSError:
                return  # its own thread notices

    def _tell_outcome(self, ranks: list[Rank], outcome: dict[str, Any]) -> None:
        for rank in ranks:
            self._tell(rank, {"type": "outcome", "outcome": outcome, "asked": rank.asked.get(outcome["step"], 0)})

    # ---- the folder ---------------------------------------------------------------------------------------------

    def _is_idle(self, start: Start) -> bool:
        return not self._is_writing and start.ledger.next_to_write() is None

    def _open_folder(self, start: Start, message: Message) -> str:
        folder = Path(message["folder"])
        if self._folder == folder:
            return ""
        self._close_folder()
        start.ledger.forget()  # what is left of a training that ended by an error belongs elsewhere
        output = OutputFolder(folder)
        owner = {"pid": os.getpid(), "host": host_name(), "since": clock.utc_now()}
        try:
            self._lock = FolderLock.acquire(output.keeper_lock, owner) if message["is_committer"] else None
        except OSError as error:
            return f"the keeper cannot hold {folder}: {error}"
        if message["is_committer"]:
            for left in output.work.glob("*/*"):  # what a keeper that died was writing
                if left.name.isdecimal():
                    files.delete_tree(left)
        self._folder = folder
        self._events = self._log_to(output.events)
        return ""

    def _close_folder(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = self._folder = None
        self._events = self._log_to(None)

    # ---- writing ------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() is not None)
                found = self._next()
                assert found is not None
                start, snapshot = found
                snapshot.progress = Progress.WRITING
                self._is_writing = True
                # What is small takes no time that anybody would miss, and would wait long for a processor.
                if self._is_urgent(start) or snapshot.num_bytes < _SMALL_BYTES:
                    self._priority.hurry()
                else:
                    self._priority.give_way()
            try:
                outcome = self._commit(start, snapshot)
            except Exception as error:  # noqa: BLE001  without this thread nothing would ever be written again
                self._log.exception("writing step %s failed", snapshot.step)
                outcome = {"step": snapshot.step, "error": f"{type(error).__name__}: {error}"}
            with self._changed:
                self._is_writing = False
                is_current = start.ledger.written(snapshot, is_durable=not outcome["error"])
                self._settle(start)  # what is free, before the outcome: whoever waits for that goes on at once
                if is_current:
                    start.outcomes = {snapshot.step: outcome}
                    self._tell_outcome(list(start.ranks.values()), outcome)
                if start.has_failed:
                    self._rescue_another(start, outcome)
                self._settle(start)

    def _rescue_another(self, start: Start, outcome: dict[str, Any]) -> None:
        newest = start.ledger.newest_complete
        if newest is not None and newest.step > outcome["step"] and newest.progress == Progress.WAITING:
            self._rescue(start)

    def _next(self) -> tuple[Start, Snapshot] | None:
        for start in (self._past, self._start):
            snapshot = start.ledger.next_to_write() if start is not None else None
            if start is not None and snapshot is not None and snapshot.facts:
                return start, snapshot
        return None

    def _commit(self, start: Start, snapshot: Snapshot) -> dict[str, Any]:
        """Make a checkpoint of it; the message with the outcome."""
        began_s = clock.monotonic_s()
        try:
            if self._folder is None:
                raise GivenUpError("the keeper holds no folder")  # noqa: TRY301
            with self._changed:
                sources = start.sources(snapshot)
            size_bytes = sum(source.size_bytes for of_rank in sources.values() for source in of_rank)
            # Processors that are never free must not keep a snapshot from becoming durable.
            hurrying = threading.Timer(_PATIENCE_S + size_bytes / _USUAL_BYTES_PER_S, self._priority.hurry)
            hurrying.daemon = True
            hurrying.start()
            try:
                manifest = commit_snapshot(snapshot, sources, self.report, lambda: start.is_hopeless(size_bytes))
            finally:
                hurrying.cancel()
        except GivenUpError as error:
            return {"step": snapshot.step, "error": str(error)}
        except (HoldfastError, OSError, ValueError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            consequence = "it stays in memory until the next one; an older checkpoint stands"
            self.report(
                SaveFailed(step=snapshot.step, trigger=snapshot.trigger, reason=str(error), consequence=consequence)
            )
            return {"step": snapshot.step, "error": reason}
        now_s = clock.monotonic_s()
        path = str(Path(snapshot.facts["folder"]) / f"checkpoint-{snapshot.step}")
        if snapshot.facts.get("node", 0) == 0:
            self._report_saved(start, snapshot, manifest, path, now_s - start.begun_s.get(snapshot.step, began_s))
        return {
            "step": snapshot.step,
            "error": "",
            "path": path,
            "size_bytes": manifest.size_bytes,
            "write_s": now_s - began_s,
        }

    def _report_saved(
        self, start: Start, snapshot: Snapshot, manifest: Manifest, path: str, duration_s: float
    ) -> None:
        event = Saved(
            step=snapshot.step,
            trigger=snapshot.trigger,
            path=path,
            num_files=len(manifest.files),
            size_bytes=manifest.size_bytes,
            duration_s=round(duration_s, 3),
        )
        self.report(event)

    # ---- the end of a start, and the next one ---------------------------------------------------------------------

    def _leave_with_newest(self, start: Start, given_up: int, why: str) -> None:
        """Make the newest complete snapshot durable, then tell every rank to leave with it."""
        with self._changed:
            ledger = start.ledger
            # One that is just being copied is the better one, and there in a moment.
            self._changed.wait_for(lambda: all(one.is_complete for one in ledger.snapshots), _COPYING_S)
            newest = self._rescue(start)
            if start.is_rescuing or start.is_rescued:
                self._changed.wait_for(lambda: start.is_rescued)
                newest = ledger.find(start.rescued_step) if start.rescued_step is not None else None
            if newest is not None:
                self._settle(start)
                self._changed.wait_for(
                    lambda: (
                        newest.progress in {Progress.DURABLE, Progress.FAILED}
                        or ledger.find(newest.step) is not newest
                    )
                )
            step = newest.step if newest is not None and newest.progress == Progress.DURABLE else None
            for rank in start.ranks.values():
                self._tell(rank, {"type": "leave", "step": step, "given_up": given_up, "why": why})

    def _recall(self) -> Message:
        """What the last start of the ranks has left, as a folder of links."""
        nothing: Message = {"type": "answer", "folder": "", "manifest": ""}
        past = self._past
        if past is None:
            return nothing
        # Also where nothing is recalled: whoever asks is going to clean the folder that is being written to.
        self._changed.wait_for(lambda: self._is_done(past))
        if past.facts is None or past.facts.num_nodes > 1:
            return nothing  # on several nodes, each has only its own ranks' files in memory
        newest = past.ledger.newest_complete
        if newest is None or not newest.facts:
            return nothing
        try:
            sources = merge(past.sources(newest))
            self._links = self._links or Path(tempfile.mkdtemp(prefix="holdfast-recalled-", dir=self._plan.scratch))
            folder = self._links / f"checkpoint-{newest.step}"
            manifest = link_files(newest, sources, folder, pid=os.getpid(), known=self._manifest_of(newest))
            files.write_atomic(folder / MANIFEST_NAME, manifest.to_bytes(), durable=False)
        except (OSError, HoldfastError, ValueError) as error:
            self._log.warning("the snapshot of step %s in memory cannot be used: %s", newest.step, error)
            return nothing
        is_durable = newest.progress == Progress.DURABLE
        text = manifest.to_bytes().decode()
        return {"type": "answer", "folder": str(folder), "manifest": text, "is_durable": is_durable}

    def _manifest_of(self, snapshot: Snapshot) -> Manifest | None:
        """The manifest of the checkpoint that it has become."""
        if snapshot.progress != Progress.DURABLE:
            return None
        path = Path(snapshot.facts["folder"]) / f"checkpoint-{snapshot.step}" / MANIFEST_NAME
        try:
            return Manifest.from_bytes(path.read_bytes())
        except (OSError, ValueError, HoldfastError):
            return None


def main(arguments: list[str]) -> int:
    """Run the keeper that `arguments[0]`, a `KeeperPlan` as JSON, describes."""
    # Platforms signal every process of a job; this one ends after those whose snapshots it keeps.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    return _Keeper(KeeperPlan(**json.loads(arguments[0]))).run()


def plan_text(plan: KeeperPlan) -> str:
    """`plan` as `main` reads it."""
    return json.dumps(dataclasses.asdict(plan))


__all__ = ["KeeperPlan", "main", "plan_text"]

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
