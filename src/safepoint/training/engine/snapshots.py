"""Saves through snapshots, which the keeper (the process of each node that writes snapshots to disk) makes durable.

A snapshot is captured at a boundary, the point between two steps, and its tensors are copied during the next step.
The ranks agree by small all-reduces: either all ranks take a snapshot, or no rank does. If no rank takes a snapshot,
the save waits for a later boundary, or `SynchronousSave` saves the state at once.
"""

import enum
import functools
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation import clock
from safepoint.foundation.events.run_events import SaveFailed, SnapshotTaken
from safepoint.snapshot.keeper.persist.snapshot_commit import publish_no_part
from safepoint.snapshot.keeper_client.arena import NoRoomError
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.snapshotter import Snapshotter
from safepoint.snapshot.protocol.messages import AbandonStep, CheckpointFacts, Outcome, ReleaseEarlierSnapshot
from safepoint.training.collective.peers import NUM_VALUES
from safepoint.training.engine.loop import Write
from safepoint.training.engine.scratch import Scratch
from safepoint.training.engine.setup import TrainingSetup
from safepoint.training.start.claim import open_in_keeper

_REPORT_EVERY_S = 10.0
_FILE_SLACK_BYTES = 1 << 20
_SLOW_BYTES_PER_S = 200e6
"""The assumed speed of a disk before the first save."""
_LEAST_SHARE = 0.01
_COMMIT_S = 0.1


class TakeResult(enum.IntEnum):
    """The result of trying to take a snapshot. The ranks agree on the highest of their values."""

    TAKEN = 0
    BUSY = 1
    """The keeper is still writing the snapshots that fill the memory: the save can start at a later boundary."""
    IMPOSSIBLE = 2
    """The save must be synchronous."""


class Snapshots:
    """The snapshots of one training.

    Args:
        setup: the facts of the training.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._context = context = setup.context
        self._peers = setup.peers
        self._loop = setup.loop
        self._snapshotter: Snapshotter | None = None
        self._scratch = Scratch(context.settings.record_folder)
        self._warned: set[str] = set()
        self._sizes: list[int] = []
        self._is_shared = setup.start.folders.is_shared
        self._optimizers: list[Any] = []
        self.pending: int | None = None
        """The step that the keeper has to save; None if there is no such step, or if this rank has recorded the
        outcome."""
        self.taken_step: int | None = None
        """The newest step with a snapshot in memory."""
        self._costs_s: deque[float] = deque(maxlen=3)
        self.expected_bytes = 0
        """The estimated size of a checkpoint's files in this node's folder; 0 if it is not known."""
        self.save_s: float | None = None
        """Seconds from the start of the last save until the save was durable."""
        self._handed_s = self._taken_stall_s = 0.0
        self._taken_time = self._pending_time = ""
        self._pending_stall_s = 0.0
        self._num_unreported, self._report_again_s = 0, 0.0
        self._most_bytes: int | None = None
        self._num_taken = 0
        self._postponed: Callable[[], None] | None = None
        """Allocates the memory for snapshots after the first step."""
        self._taken_facts: CheckpointFacts | None = None
        self._pending_facts: CheckpointFacts | None = None

    def _use(self, keeper: KeeperClient) -> None:
        settings = self._context.settings
        slots = settings.snapshot_slots
        if slots is None and settings.snapshot_steps is not None:
            slots = 2  # one snapshot stays in memory while the other is written
        self._snapshotter = Snapshotter(keeper, optimizers=self._optimizers, slots=slots, on_torn=self._note_torn)
        self._snapshotter.arena.most_bytes = self._most_bytes
        self._scratch.let_keeper_remove(keeper)

    def _note_torn(self, step: int) -> None:
        self._context.reporter.report(
            SaveFailed(
                step=step,
                trigger=Trigger.PERIODIC,
                reason="parameters were changed outside optimizer.step while they were being copied",
                consequence="from now on saves wait for the copy",
            )
        )

    def _warn_once(self, text: str, about: str | None = None) -> None:
        """Log a warning, once for each `about`, or for each text if `about` is None.

        A text that contains numbers needs an `about`, because the text differs each time.
        """
        if (about or text) not in self._warned:
            self._warned.add(about or text)
            self._context.log.warning("%s", text)

    @property
    def are_in_keeper(self) -> bool:
        """Whether snapshots go to the keeper, which keeps them when this process dies."""
        return self._snapshotter is not None and self._context.keeper.is_connected

    # ---- before the loop --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Allocate the memory for snapshots. A thread touches the memory's pages while the model is loaded.

        After a restart on CPUs, the memory is allocated only after the first step, because the thread would slow the
        load down.
        """
        if self._is_shared:
            self._most_bytes = self._share_of_memory()
            if self._context.keeper.client is not None:
                self._use(self._context.keeper.client)
        loop = self._loop
        share = loop.written_fraction
        if not share:
            return
        parameters = list(loop.parameters())
        moments = loop.moments_per_parameter()
        trainable = sum(one.nbytes for one in parameters if one.requires_grad)
        model = sum(one.nbytes for one in parameters)
        on_host = sum(one.nbytes for one in parameters if one.requires_grad and one.device.type == "cpu")
        of_node = 1.0 if share == 1 else 1 / self._context.place.num_nodes
        written = model + moments * trainable
        self.expected_bytes = round(written if self._is_shared else of_node * written)
        self._context.progress.expect_save(round(of_node * written))
        if self._snapshotter is None:
            return
        wholes = [size for size in (model, moments * trainable) if size > _FILE_SLACK_BYTES]
        sizes = [round(share * size) + _FILE_SLACK_BYTES for size in wholes]
        # On a CPU, the gradients, DDP's copy of them and the optimizer's moments will take host memory too.
        gradients = 2 if dist.is_available() and dist.is_initialized() else 1
        device = next((one.device.index for one in parameters if one.device.type == "cuda"), None)
        reserve = functools.partial(self._reserve, sizes, device)
        if self._context.place.restart == 0 or device is not None:
            reserve(still_to_come=(gradients + moments) * on_host)
        else:
            # The state is being loaded from the snapshot that earlier ranks have left in memory. The memory of this
            # snapshot becomes free when the state is loaded. The processors are busy until the first step is done.
            self._postponed = functools.partial(reserve, still_to_come=0)

    def _reserve(self, sizes: Sequence[int], device: int | None, *, still_to_come: int) -> None:
        if self._snapshotter is None or self._snapshotter.arena.num_bytes:  # a snapshot has allocated memory
            return
        try:
            self._snapshotter.arena.prepare(sizes, still_to_come=still_to_come, device=device)
        except NoRoomError as error:
            self._warn_once(f"no memory could be reserved for snapshots; training may wait for saves: {error}")

    def step_ends(self) -> None:
        """After the first step of a restart, allocate the memory for snapshots."""
        if self._postponed is not None:
            self._postponed()
            self._postponed = None

    def _share_of_memory(self) -> int | None:
        """This rank's share of the node's memory for snapshots, in bytes; None for no limit.

        A rank that writes more of the state has a larger share.
        """
        bound_bytes = self._context.settings.snapshot_bytes
        if bound_bytes is None:
            return None
        place = self._context.place
        # Every rank writes something, at least the state of its random numbers.
        mine = self._loop.written_fraction + _LEAST_SHARE
        here = sum(share for node, share in self._peers.gather((place.node, mine)) if node == place.node)
        return int(bound_bytes * mine / here)

    def begin_loop(self) -> None:
        """From now on, make each optimizer step wait until the tensors of the last snapshot are copied.

        Call this method when the model is loaded and the optimizers exist.
        """
        self._optimizers = self._loop.optimizers()
        if self._snapshotter is not None:
            self._scratch.capture.prepare()
            self._snapshotter.watch(self._optimizers)
        if self._context.place.restart > 0:
            # Wait for slower ranks, which may still read the snapshot from before the restart.
            self._peers.gather(None)
            if self._snapshotter is not None and self._context.place.local_rank == 0:
                self._snapshotter.keeper.send(ReleaseEarlierSnapshot())

    # ---- taking a snapshot ------------------------------------------------------------------------------------

    def take(self, trigger: Trigger, write: Write, *, is_requested: bool) -> TakeResult:
        """Begin a snapshot of this boundary, on all ranks together.

        Args:
            trigger: why the snapshot is taken.
            write: writes this rank's files; it runs at once, and its tensors are copied later.
            is_requested: whether the snapshot is to become a checkpoint.

        Returns:
            The result that the ranks agreed on.

        Raises:
            PeerError: a rank is gone.
        """
        started_s, time = clock.monotonic_s(), clock.utc_now()
        step = self._loop.step
        more_slots = 1 if trigger == Trigger.JIT else 0
        ready = self._agree(self._readiness(more_slots))
        if ready != TakeResult.TAKEN or self._snapshotter is None:
            return ready
        self._num_taken += 1  # on all ranks, even if one of them cannot take the snapshot
        waited_s = self._snapshotter.waited_s  # how long the optimizer waited for the copy of the previous snapshot
        mine = self._take_here(step, trigger, write, is_requested=is_requested, more_slots=more_slots)
        cost_s = clock.monotonic_s() - started_s + waited_s
        agreed = self._agree(mine, round(1e6 * cost_s))
        if agreed != TakeResult.TAKEN:
            if mine == TakeResult.TAKEN:
                self._snapshotter.cancel(step, self._num_taken)
            return agreed
        self.taken_step, self._taken_time = step, time
        self._taken_stall_s = clock.monotonic_s() - started_s
        if is_requested:
            self._save_begins(step, started_s)
        self._report_taken(trigger, is_requested=is_requested)
        return agreed

    def _save_begins(self, step: int, started_s: float) -> None:
        """Record that the keeper has received the request to save `step`, and that the outcome is pending."""
        self.pending, self._handed_s = step, started_s
        self._pending_time, self._pending_stall_s = self._taken_time, self._taken_stall_s
        self._pending_facts = self._taken_facts

    def _report_taken(self, trigger: Trigger, *, is_requested: bool) -> None:
        assert self.taken_step is not None
        self._context.progress.snapshot_taken(self.taken_step)
        self._num_unreported += 1
        now_s = clock.monotonic_s()
        if not is_requested and now_s < self._report_again_s:
            return
        event = SnapshotTaken(
            step=self.taken_step,
            trigger=trigger,
            is_wanted=is_requested,
            stall_s=round(self._taken_stall_s, 6),
            size_bytes=sum(self._sizes),
            count=self._num_unreported,
        )
        self._context.reporter.report(event)
        self._num_unreported, self._report_again_s = 0, now_s + _REPORT_EVERY_S

    def _readiness(self, more_slots: int) -> TakeResult:
        if not self._is_shared:
            return TakeResult.IMPOSSIBLE
        keeper = self._context.keeper.client
        if self._snapshotter is None or keeper is None or not keeper.is_alive:
            self._find_keeper()
            return TakeResult.IMPOSSIBLE
        self._snapshotter.wait_staged()
        try:
            self._scratch.ensure(keeper)
        except OSError as error:
            # This is checked before the ranks agree, because a rank that fails afterwards makes all ranks cancel the
            # snapshot.
            self._warn_once(
                f"saves are synchronous: there is no room for their small files: {error}", about="scratch"
            )
            return TakeResult.IMPOSSIBLE
        could = self._snapshotter.arena.could_take(self._sizes, more_slots=more_slots)
        return TakeResult.TAKEN if could else TakeResult.BUSY

    def _find_keeper(self) -> None:
        """Connect to a keeper, for example to the new keeper after an earlier keeper has died.

        The keeper is used from the next save on. The save that is due now is synchronous.
        """
        context = self._context
        if self._snapshotter is not None:
            self.poll()
            self._snapshotter.close()
            self._snapshotter = None
            context.log.warning("the keeper died: this save is synchronous, and a new keeper gets the next save")
        keeper = context.keeper.reopen()
        if keeper is None:
            return
        error = open_in_keeper(keeper, context.place, self._setup.output)
        if error:
            self._warn_once(f"{error}: saves are synchronous")
        else:
            self._use(keeper)

    def _take_here(
        self, step: int, trigger: Trigger, write: Write, *, is_requested: bool, more_slots: int
    ) -> TakeResult:
        assert self._snapshotter is not None
        try:
            images = self._scratch.images(step, write)
            self._taken_facts = self._facts() if self._context.place.local_rank == 0 else None
            taken = self._snapshotter.take(
                step,
                images,
                trigger=trigger,
                is_requested=is_requested,
                facts=self._taken_facts,
                number=self._num_taken,
                more_slots=more_slots,
            )
        except NoRoomError as error:
            self._warn_once(f"saves are synchronous, training waits for them: {error}", about="room")
            return TakeResult.IMPOSSIBLE
        except Exception as error:  # if the synchronous save fails too, it reports the errors of all ranks
            self._warn_once(f"saves are synchronous: the state cannot be captured: {error}")
            self._context.log.debug("the snapshot of step %s failed", step, exc_info=True)
            return TakeResult.IMPOSSIBLE
        self._sizes = [image.size_bytes for image in images]
        self._scratch.capture.forget(self._snapshotter.passing)
        return TakeResult.TAKEN if taken else TakeResult.BUSY

    def _facts(self) -> CheckpointFacts:
        limit, protected = self._loop.retention()
        return CheckpointFacts(
            manifest=self._setup.manifest_facts(),
            folder=str(self._setup.output.root.absolute()),
            attempt_id=self._setup.start.attempt.attempt_id,
            keep=self._context.settings.keep,
            limit=limit,
            protected=tuple(sorted(protected)),
            save=self._num_taken,
            node=self._context.place.node,
            num_nodes=self._context.place.num_nodes,
        )

    def _agree(self, mine: TakeResult, cost_us: int = 0) -> TakeResult:
        values = [int(mine), cost_us] + [0] * (NUM_VALUES - 2)
        state, cost_us, *_ = self._peers.start_maximum(values).wait()
        if cost_us:
            self._costs_s.append(cost_us / 1e6)
        return TakeResult(state)

    @property
    def cost_s(self) -> float | None:
        """Seconds by which a snapshot delays the training on the slowest rank, at the boundary and in the optimizer.

        The median of the last three snapshots; None before the second snapshot, because the first snapshot takes
        longer.
        """
        return statistics.median(self._costs_s) if len(self._costs_s) > 1 else None

    # ---- the outcome of a save ---------------------------------------------------------------------------------

    def poll(self) -> Outcome | None:
        """Return the outcome of the pending save, without waiting.

        Return None if the keeper is still writing, or if no save is pending.
        """
        if self.pending is None or self._snapshotter is None:
            return None
        keeper = self._snapshotter.keeper
        outcome = keeper.outcome(self.pending)
        if outcome is None and keeper.is_alive:
            return None
        if outcome is None:
            # Publish that this node has no part of the checkpoint. If this is not published, the keepers of other
            # nodes wait for the part.
            publish_no_part(self._pending_facts, "its keeper died")
            outcome = Outcome(step=self.pending, error="the keeper died while it was writing the snapshot")
            self._context.reporter.report(
                SaveFailed(
                    step=self.pending,
                    trigger=Trigger.PERIODIC,
                    reason=outcome.error,
                    consequence="earlier checkpoints remain",
                )
            )
        return self._note(outcome)

    def _note(self, outcome: Outcome) -> Outcome:
        self.pending = None
        if outcome.is_durable:
            self._context.outcome.saved(outcome.step)
            self.save_s = clock.monotonic_s() - self._handed_s
            is_last = self._snapshotter is not None and self.taken_step == outcome.step
            waited_s = self._snapshotter.waited_s if is_last and self._snapshotter is not None else 0.0
            self._context.progress.saved(
                outcome.step,
                time=self._pending_time,
                stall_s=self._pending_stall_s + waited_s,
                durable_s=(outcome.ended_s or clock.monotonic_s()) - self._handed_s,
                size_bytes=outcome.size_bytes,
            )
        else:
            self._context.progress.not_saved()
        return outcome

    def finish(self, step: int) -> bool:
        """Wait for the save of `step`, at most until the deadline.

        Return whether all ranks have recorded that the save is durable.

        Raises:
            PeerError: a rank is gone.
        """
        if self.pending == step and self._snapshotter is not None:
            self._snapshotter.wait_staged()
            available_s = self._context.termination.available_s
            deadline_s = None if available_s == float("inf") else clock.monotonic_s() + available_s
            self._note(self._snapshotter.keeper.wait(step, deadline_s))
        return all(self._peers.gather(self._context.outcome.saved_step == step))

    def wait_until_free(self) -> None:
        """Wait until a snapshot fits into the memory again, at most until the deadline."""
        while self._snapshotter is not None and self._snapshotter.keeper.is_alive:
            self._snapshotter.wait_staged()
            if self._snapshotter.arena.could_take(self._sizes) or self._context.termination.available_s <= 0:
                return
            clock.sleep(0.002)

    def commit_taken(self, step: int, trigger: Trigger) -> bool:
        """Request that the keeper commits the snapshot of `step`.

        Returns:
            Whether the commit was requested; False if there is no such snapshot, or if a rank has no keeper.
        """
        if self.taken_step != step:
            return False
        is_alive = self._snapshotter is not None and self._snapshotter.keeper.is_alive
        agreed = self._agree(TakeResult.TAKEN if is_alive else TakeResult.IMPOSSIBLE)
        if agreed != TakeResult.TAKEN or self._snapshotter is None:
            return False
        self._snapshotter.keeper.request_save(step, trigger)
        self._save_begins(step, clock.monotonic_s())
        return True

    # ---- when time is short -----------------------------------------------------------------------------------

    def can_rescue(self, step: int) -> bool:
        """Whether the running step may be given up, because the keeper can commit the newest snapshot instead.

        The snapshot must be of the last finished step. With `--snapshot-steps` it may be older.

        Args:
            step: the last finished step.
        """
        is_chosen = self._context.settings.snapshot_steps is not None
        keeper = self._context.keeper.client
        is_there = self.taken_step is not None and (is_chosen or self.taken_step == step)
        return is_there and keeper is not None and keeper.is_alive

    def commit_s(self) -> float:
        """Estimated seconds to make the newest snapshot durable; 0 if it is durable already."""
        keeper = self._context.keeper.client
        if self.taken_step == self._context.outcome.saved_step or keeper is None:
            return 0.0
        return sum(self._sizes) / (keeper.write_bytes_per_s or _SLOW_BYTES_PER_S) + _COMMIT_S

    def rescue(self, step: int, why: str) -> None:
        """Request that the keeper commits the newest snapshot and then ends all ranks, in the middle of a step.

        Args:
            step: the step that the ranks do not finish.
            why: the reason, for the log.
        """
        keeper = self._context.keeper.client
        if keeper is not None:
            keeper.send(AbandonStep(step=step, reason=why))

    def close(self, *, is_orderly: bool) -> None:
        """End the snapshots of this training.

        Args:
            is_orderly: whether the training has reached its end, or was interrupted. If so, no further save is
                needed. If not, the keeper commits the newest snapshot when this process ends.
        """
        if self._snapshotter is not None and is_orderly:
            self._snapshotter.wait_staged()
            if self._context.place.local_rank == 0:
                self._snapshotter.keeper.close_folder()
            self._snapshotter.close()
            self._snapshotter = None
        self._scratch.remove()
