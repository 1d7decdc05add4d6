"""`holdfast.session`: a hand-written loop that survives what happens to it.

The loop tells where a step ends; everything else follows from that: the vote of the ranks, snapshots, saves, leaving.
"""

import contextlib
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from holdfast.checkpoint.manifest import Trigger
from holdfast.checkpoint.output_folder import OutputFolder
from holdfast.errors import Interrupted, PeerError, UsageError
from holdfast.foundation.environment import Place
from holdfast.foundation.events import Finished, StopRequested
from holdfast.training.engine.agreement import Agreement
from holdfast.training.engine.cadence import Cadence
from holdfast.training.engine.deadline import Deadline
from holdfast.training.engine.saver import RunFacts, Saver
from holdfast.training.engine.saves import Saves
from holdfast.training.engine.snapshots import Snapshots
from holdfast.training.integrations.accelerate import AcceleratedParts
from holdfast.training.output_place import place_output
from holdfast.training.peers import Peers
from holdfast.training.plain.data import Data
from holdfast.training.plain.framework import PlainFramework
from holdfast.training.plain.moving import moved
from holdfast.training.plain.parts import NamedParts, Parts
from holdfast.training.progress import ProgressFile
from holdfast.training.resume import lease
from holdfast.training.session import Session, current_session, start_session
from holdfast.training.start import Start, agree_on_start, announce
from holdfast.training.strategy import check_strategy


class Run:
    """One training; made by `session`, used in a `with` statement."""

    def __init__(
        self,
        session: Session,
        *,
        parts: Parts,
        data: Iterable[Any] | None,
        output_dir: str,
        save_steps: int | None,
    ) -> None:
        self._session = session
        self._save_steps = save_steps
        place = place_output(output_dir, local_dir=session.settings.local_dir)
        self._output, self._location = OutputFolder(place.folder), place.remote
        self._output.check_usable()
        self._data = Data(data, session.log.info)
        self._framework = PlainFramework(parts, self._data, session.place)
        self._batches_before = 0
        self._epochs = 0
        self._has_voted = False
        self._is_inside = False
        self._loss: Any = None
        self._hooks: list[Any] = []

    # ---- the call -----------------------------------------------------------------------------------------------

    def __enter__(self) -> "Run":
        session = self._session
        if self._output.root in session.output_folders:
            raise UsageError(
                f"a second session in {self._output.root} would resume from the checkpoints of the first",
                hint="give each session an output_dir of its own",
            )
        session.output_folders.add(self._output.root)
        self._peers = session.peers or Peers(session.place, timeout_s=session.settings.peer_timeout_s)
        session.peers = self._peers
        self._agreement = Agreement(session, self._peers)
        self._start: Start | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._release, is_orderly=False)
            self._start = agree_on_start(session, self._peers, self._output, self._location)
            self._prepare(self._start)
            undo.pop_all()
        self._is_inside = True
        return self

    def _prepare(self, start: Start) -> None:
        session, place, framework = self._session, self._session.place, self._framework
        if start.point is not None:
            self._load(start)
        facts = RunFacts(
            run_id=start.attempt.run_id, attempt=start.attempt.attempt, attempt_id=start.attempt.attempt_id
        )
        self._saver = Saver(session, self._peers, framework, self._output, start.folders, facts)
        self._snapshots = Snapshots(
            session, self._peers, framework, self._saver, self._output, start.folders, start.attempt.attempt_id
        )
        self._snapshots.prepare()
        self._saves = Saves(session, framework, self._agreement, self._snapshots, self._saver, self._output.root)
        self._saves.is_postponed = start.point is not None and not start.point.is_durable
        self._deadline = Deadline(session, self._agreement, self._snapshots)
        self._cadence = Cadence(session.settings.snapshot_steps)
        self._progress = ProgressFile(self._output.progress if place.is_first else None)
        announce(session, self._peers, start.attempt, global_batch=self._data.batch_size * place.world_size)
        self._hooks = [one.register_step_pre_hook(self._before_optimizer) for one in framework.optimizers()]
        self._snapshots.begin_loop()
        session.step = framework.step
        session.look_at_time = self._deadline.look
        session.termination.enter_training()
        self._agreement.boundary_ends()
        self._agreement.step_begins(framework.step)

    def _load(self, start: Start) -> None:
        assert start.point is not None
        manifest, session = start.point.manifest, self._session
        check_strategy(manifest, self._framework.strategy, session.place.world_size)
        with lease(start.point):
            position, rng = self._framework.load(start.point.path, ranks_before=manifest.world_size)
        position = moved(
            position,
            manifest,
            self._data,
            session.place.world_size,
            allow_change=session.settings.allow_batch_change,
        )
        self._framework.step = manifest.step
        self._framework.batches_per_step = manifest.gradient_accumulation
        self._data.resume(position, rng)
        self._batches_before = position.batches
        session.step = manifest.step
        session.saved_step = manifest.step if start.point.is_durable else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_inside = False
        is_orderly = error is None
        try:
            if error is None:
                self._finish()
        except Interrupted:
            is_orderly = True
            raise
        finally:
            self._release(is_orderly=is_orderly or self._session.interrupted is not None)
        if self._session.interrupted is not None and error is None:
            raise self._session.interrupted

    def _finish(self) -> None:
        """The loop has come to its end: what is not saved yet is."""
        session, step = self._session, self._framework.step
        self._agreement.settle(step)
        self._saves.finish()
        if 0 < step != session.saved_step:
            stops = self._agreement.decision.stop
            self._saves.save(Trigger.JIT if stops else Trigger.PERIODIC, self._framework.write_again(), is_last=True)
            self._saves.finish()
        if self._agreement.decision.stop:
            raise self._leave()
        session.termination.leave_training()
        self._tell_progress(force=True)
        session.report(Finished(step=step))
        if self._location is not None:
            self._saver.save_final()

    def _release(self, *, is_orderly: bool) -> None:
        session = self._session
        session.termination.leave_training()
        for hook in self._hooks:
            hook.remove()
        if hasattr(self, "_snapshots"):
            self._snapshots.close(is_orderly=is_orderly)
        is_kept = not is_orderly and session.keeping.is_connected
        self._output.release(self._start.attempt.attempt_id if self._start and not is_kept else None)

    # ---- the loop -----------------------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """Optimizer steps done, over all attempts."""
        return self._framework.step

    @property
    def epoch(self) -> int:
        """The running epoch, from 0."""
        return self._data.epoch

    def epochs(self, count: int) -> Iterator[Iterator[Any]]:
        """The batches of each epoch that is left of `count`, for loops that do something between epochs.

        Raises:
            UsageError: the session has no data.
        """
        if not self._is_inside:
            raise UsageError("the session is used outside its `with` statement")
        self._epochs = count
        yield from self._data.epochs(count)

    def batches(self, epochs: int = 1) -> Iterator[Any]:
        """The batches of `epochs` epochs, from where the run stands."""
        for batches in self.epochs(epochs):
            yield from batches

    def step(self, *, loss: Any = None) -> None:
        """Tell that the optimizer has stepped. This may save, and when somebody asked the job to stop, it leaves.

        Args:
            loss: of the step, for whoever looks how far the run is; a number or a tensor of one.

        Raises:
            Interrupted: all ranks agreed to stop; a `SystemExit`, which ends the program with the right code.
            PeerError: a rank is gone.
        """
        if not self._is_inside:
            raise UsageError("step() was called outside the session's `with` statement")
        if self._session.interrupted is not None:
            raise self._session.interrupted
        framework, session, agreement = self._framework, self._session, self._agreement
        self._before_optimizer()
        self._has_voted = False
        framework.step += 1
        session.step = framework.step
        session.record.stepped()
        if self._data.batches > self._batches_before:
            framework.batches_per_step = self._data.batches - self._batches_before
        self._batches_before = self._data.batches
        self._loss = loss
        agreement.step_ends()
        session.watch_uploads()
        self._saves.watch()
        self._save_if_due()
        self._tell_progress()
        agreement.boundary_ends()
        agreement.step_begins(framework.step)

    def _before_optimizer(self, *_: Any) -> None:
        """Gradients are complete; once in each step, however many optimizers there are."""
        if not self._has_voted:
            self._has_voted = True
            self._agreement.gradients_complete(self._framework.step)

    def _save_if_due(self) -> None:
        agreement, step = self._agreement, self._framework.step
        stops = agreement.decision.stop
        is_periodic = self._save_steps is not None and step % self._save_steps == 0
        if stops or agreement.decision.save or is_periodic or self._saves.is_postponed:
            trigger = Trigger.JIT if stops else Trigger.ON_DEMAND if agreement.decision.save else Trigger.PERIODIC
            if stops:
                self._announce_stop()
            waited = self._saves.save(trigger, self._framework.write_again(), is_last=stops)
            agreement.save_done()
            if waited and not stops:
                agreement.settle(step)
            if agreement.decision.stop:
                raise self._leave()
        elif self._cadence.is_due(
            step=step,
            last=self._snapshots.taken_step,
            cost_s=self._snapshots.cost_s,
            step_s=agreement.decision.step_ms / 1000,
        ):
            self._snapshots.take(Trigger.PERIODIC, self._framework.write_again(), is_wanted=False)

    def _leave(self) -> Interrupted:
        session, step = self._session, self._framework.step
        self._announce_stop()
        self._saves.finish()
        saved = session.saved_step is not None and session.saved_step == step
        self._tell_progress(force=True)
        with contextlib.suppress(PeerError):
            failures = [failure for failure in self._peers.gather(session.upload_failure) if failure]
            session.upload_failure = failures[0] if failures else None
        interrupted = session.interrupt(saved=saved, reason="" if saved else "the save failed")
        session.finish_uploads(newest_only=True)
        return interrupted

    def _announce_stop(self) -> None:
        if not self._deadline.is_met:
            self._deadline.is_met = True
            decision = self._agreement.decision
            name = signal.Signals(decision.stop_signal).name
            self._session.report(StopRequested(signal=name, rank=decision.stop_rank, step=self._framework.step))

    # ---- figures ------------------------------------------------------------------------------------------------

    def _tell_progress(self, *, force: bool = False) -> None:
        in_epoch = self._data.num_batches
        steps = self._epochs * in_epoch // self._framework.batches_per_step if in_epoch else 0
        epoch = self._data.epoch + (self._data.batches / in_epoch if in_epoch else 0.0)
        # Reading a device's number waits for the device: at the end only.
        loss = self._loss.item() if force and hasattr(self._loss, "item") else self._loss
        self._progress.update(
            step=self._framework.step,
            max_steps=steps,
            epoch=epoch,
            loss=float(loss) if isinstance(loss, int | float) else None,
            force=force,
        )


def session(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    accelerator: Any = None,
    data: Iterable[Any] | None = None,
    output_dir: str | Path | None = None,
    save_steps: int | None = None,
    **others: Any,
) -> Run:
    """A training that survives preemption, crashes and lost nodes.

    Under `holdfast run` its options count; under plain `python` or `torchrun` the HOLDFAST_* variables and what is
    given here.

    Args:
        model: a module, in DistributedDataParallel or not; on its device, with its first weights.
        optimizer: over the model's parameters.
        scheduler: of the learning rate; anything with `state_dict` and `load_state_dict`, or None.
        accelerator: an `accelerate.Accelerator` that has prepared model, optimizer and scheduler, which are then not
            named: what its `save_state` saves is the state.
        data: a DataLoader, torchdata's StatefulDataLoader, or anything that can be iterated for each epoch.
        output_dir: where checkpoints go: a folder, or an object store; `--output-dir` counts more.
        save_steps: optimizer steps between checkpoints; `--save-steps` counts more. None saves when the training is
            asked to stop, and at its end.
        others: by name, whatever else belongs to the state: a gradient scaler, a second optimizer, an average of the
            weights. All have `state_dict` and `load_state_dict`.

    Returns:
        The run, to be used in a `with` statement: entering it resumes from the newest valid checkpoint.

    Raises:
        UsageError: something that was given cannot be saved, or there is no place to save to.
    """
    current = current_session() or start_session()
    if current.interrupted is not None:
        raise current.interrupted
    settings = current.settings
    folder = settings.output_dir or output_dir
    if folder is None:
        raise UsageError("there is no place for checkpoints", hint="give session() an output_dir")
    if current.place.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"this is one of {current.place.world_size} ranks, and they have not found each other",
            hint="call torch.distributed.init_process_group() before session()",
        )
    named: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **others}
    parts = _parts_of({name: part for name, part in named.items() if part is not None}, accelerator, current.place)
    steps = settings.save_steps or save_steps
    if steps is not None and steps < 1:
        raise UsageError(f"save_steps {steps} must be at least 1")
    return Run(current, parts=parts, data=data, output_dir=str(folder), save_steps=steps)


def _parts_of(named: dict[str, Any], accelerator: Any, place: Place) -> Parts:
    if accelerator is not None:
        if named:
            raise UsageError(
                f"{next(iter(named))} is given beside an accelerator, which saves what it has prepared",
                hint="prepare it, or tell the accelerator of it with register_for_checkpointing",
            )
        return AcceleratedParts(accelerator, place)
    for name in ("model", "optimizer"):
        if name not in named:
            raise UsageError(f"there is no {name} to save", hint="give session() a model and an optimizer")
    for name, part in named.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(f"{name} cannot be saved: {type(part).__name__} has no state_dict and load_state_dict")
    return NamedParts(named, place)


__all__ = ["Run", "session"]
