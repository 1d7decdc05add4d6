"""`save` and `load` for a plain PyTorch loop of one process. The loop continues during a save.

Each value of the state becomes one file, `<key>.pt`, as `torch.save` writes it. Every save is a snapshot. A second
process, the keeper, writes the snapshot to disk, commits it, and prunes older checkpoints. If there is no memory for
a snapshot, `save` fails. `safepoint.session` saves synchronously in that case. It also handles several ranks, signals
and object stores.
"""

import io
import os
import platform
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch

from safepoint._version import __version__
from safepoint.checkpoint.format.catalog import checkpoint_name, newest_valid
from safepoint.checkpoint.format.manifest import Manifest, ManifestFacts, Trigger
from safepoint.checkpoint.format.scheduler_steps import most_scheduler_steps
from safepoint.checkpoint.format.verify import Fault
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies
from safepoint.checkpoint.pickles.loading import check_memory, refusal, states_of
from safepoint.checkpoint.pickles.module_states import checked_modules
from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.checkpoint.pickles.restricted_load import restricted_load
from safepoint.checkpoint.pickles.scaler_states import checked_scalers
from safepoint.checkpoint.pickles.scheduler_states import checked_schedulers, tried_schedulers
from safepoint.errors import CheckpointError, ConflictError, SaveError
from safepoint.foundation import clock
from safepoint.foundation.environment import Place
from safepoint.foundation.events import console
from safepoint.foundation.events.run_events import SaveFailed
from safepoint.foundation.events.start_events import ResumedFromOtherRun
from safepoint.foundation.events.stream import EventLog
from safepoint.snapshot.images.image import Image
from safepoint.snapshot.images.module_state import ModuleState, OptimizerState
from safepoint.snapshot.images.torch_image import TorchImages, UncomposableError
from safepoint.snapshot.keeper_client.arena import NoRoomError
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.keeper_client.snapshotter import Snapshotter
from safepoint.snapshot.protocol.channel import new_keeper_key
from safepoint.snapshot.protocol.messages import CheckpointFacts, Goodbye, KeeperPlan, Outcome

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_CLAIM_WAIT_S, _KEEPER_START_S = 30.0, 20.0
_FILE_SLACK_BYTES = 1 << 20
_SPARE = 1 << 15
"""A script may call `save` with a number of epochs. A scheduler may have counted the batches of these epochs."""
_TORN = "parameters were changed outside optimizer.step while they were copied"


class Saving:
    """A save that is in progress. `Checkpointer.save` makes this object.

    Args:
        step: the step of the checkpoint.
        path: the folder of the checkpoint after its commit.
        snapshotter: copies the state, and passes the snapshot to the keeper.
        torn: steps whose snapshots were discarded, because parameters changed during the copy. The checkpointer adds
            steps to this set.
    """

    def __init__(self, step: int, path: Path, snapshotter: Snapshotter, torn: set[int]) -> None:
        self.step, self.path = step, path
        self._snapshotter, self._torn = snapshotter, torn
        self._outcome: Outcome | None = None

    def wait_staged(self) -> None:
        """Wait until the state has been copied. Afterwards any code may change the state."""
        self._snapshotter.wait_staged()

    @property
    def is_durable(self) -> bool:
        """Whether the checkpoint is committed."""
        self._outcome = self._outcome or self._snapshotter.keeper.outcome(self.step)
        return self._outcome is not None and self._outcome.is_durable

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is committed.

        Returns:
            The folder of the checkpoint.

        Raises:
            SaveError: the save failed, or is not finished after `timeout_s`.
        """
        self.wait_staged()
        if self.step in self._torn:
            raise SaveError(f"step {self.step} is not saved: {_TORN}")
        if not self.is_durable:
            deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
            outcome = self._snapshotter.keeper.wait(self.step, deadline_s)
            if not outcome.is_durable:
                raise SaveError(f"step {self.step} is not saved: {outcome.error}")
            self._outcome = outcome
        return self.path


class Checkpointer:
    """Checkpoints of one process.

    The state of models and optimizers is copied during the next forward and backward. An optimizer's step waits for
    the end of the copy. Before any other code changes parameters, call `Saving.wait_staged`.

    The keeper's process starts in the background. The first save waits until it has started.

    Args:
        folder: where checkpoints go; claimed for this process until `close`.
        keep: which checkpoints stay, such as `newest=3,every=1000`; None keeps all.
        slots: how many snapshots may be in memory; None for one, or three if the state is small.

    Raises:
        ConflictError: another run writes to `folder`, or this process is one of several ranks.
        OSError: the keeper's process cannot be started.
        SaveError: the keeper's process does not answer.
        StorageError: the folder cannot be used.
        ValueError: `keep` is invalid.
    """

    def __init__(self, folder: Path | str, *, keep: str | None = None, slots: int | None = None) -> None:
        parse_policies(keep)
        self._output, self._keep, self._slots = OutputFolder(Path(folder).absolute()), keep, slots
        place = Place.from_environment()
        if place.world_size > 1:
            raise ConflictError(
                f"a Checkpointer saves one process, and this is one of {place.world_size} ranks",
                hint="use safepoint.session",
            )
        self._log = console.set_up(0)
        self._images = StateImages()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._torn: set[int] = set()
        self._num_taken = 0
        self._pid = os.getpid()
        self._is_closed = False
        self._claim()
        try:
            self._host = KeeperProcess(KeeperPlan(key=new_keeper_key()))
            self._snapshotter = self._connect()
        except (OSError, SaveError):
            self._output.release(self._attempt_id)
            raise

    def _claim(self) -> None:
        output = self._output
        output.prepare()
        self._events = EventLog(output.events, actor="rank 0")
        if output.claim(
            wait_s=_CLAIM_WAIT_S,
            waiting=lambda who: self._log.info("waiting until an earlier run leaves %s (%s)", output.root, who),
        ):
            output.clean()
        self._last_run = output.last_run()
        newest = next((manifest for _, manifest in output.manifests()), None)
        run_id = newest.run_id if newest else uuid.uuid4().hex
        attempt = output.next_attempt(run_id, after=newest.attempt if newest else 0)
        self._attempt_id = f"{run_id[:8]}-{attempt}-{uuid.uuid4().hex[:8]}"
        output.open_attempt(self._attempt_id)
        torch_version = str(torch.__version__)
        self._facts = ManifestFacts(
            run_id=run_id,
            attempt=attempt,
            step=0,
            epoch=0.0,
            world_size=1,
            global_batch=1,
            gradient_accumulation=1,
            samples_seen=0,
            strategy="single",
            libraries={"safepoint": __version__, "python": platform.python_version(), "torch": torch_version},
        )

    def _connect(self) -> Snapshotter:
        keeper = KeeperClient.connect(self._host.key, wait_s=_KEEPER_START_S, rank=0, num_ranks=1)
        if keeper is None:
            raise SaveError("the keeper cannot be used: it does not answer")
        keeper.request_folder(str(self._output.root))
        self._has_answered = False
        return Snapshotter(keeper, optimizers=self._optimizers, slots=self._slots, on_torn=self._note_torn)

    def _ensure_keeper(self) -> None:
        """Wait until the keeper has started; replace it if it has died."""
        error = "" if self._has_answered else self._snapshotter.keeper.folder_error()
        if not self._snapshotter.keeper.is_alive:
            self._replace_keeper()
            error = self._snapshotter.keeper.folder_error()
        if error:
            raise SaveError(f"the keeper cannot be used: {error}")
        self._has_answered = True

    def _note_torn(self, step: int) -> None:
        self._torn.add(step)
        consequence = "from now on saves wait for the copy"
        event = SaveFailed(step=step, trigger=Trigger.ON_DEMAND, reason=_TORN, consequence=consequence)
        self._events.write(event)
        self._log.warning("%s", event.line)

    # ---- saving -----------------------------------------------------------------------------------------------

    def prepare(self, state: Mapping[str, Any], *, is_waiting: bool = False) -> None:
        """Allocate the memory for snapshots of `state`, in the background.

        Args:
            state: as for `save`. For an optimizer, two tensors of the parameter's size are counted for each
                parameter, even if the optimizer's first step has not created them yet.
            is_waiting: whether to wait until the memory is allocated.

        Raises:
            SaveError: there is not enough memory.
        """
        self._watch(state)
        tensors = {key: list(tensors_of(value)) for key, value in state.items()}
        sizes = [sum(one.nbytes for one in of_file) for of_file in tensors.values()]
        devices = [one.device.index for of_file in tensors.values() for one in of_file if one.device.type == "cuda"]
        try:
            self._snapshotter.arena.prepare(
                [size + _FILE_SLACK_BYTES for size in sizes if size > _FILE_SLACK_BYTES],
                device=devices[0] if devices else None,
            )
        except NoRoomError as error:
            raise SaveError(str(error)) from error
        if is_waiting:
            self._snapshotter.arena.wait_prepared()

    def _watch(self, state: Mapping[str, Any]) -> None:
        optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
        if [id(one) for one in optimizers] != [id(one) for one in self._optimizers]:
            self._optimizers = optimizers
            self._snapshotter.watch(optimizers)

    def save(self, state: Mapping[str, Any], step: int, *, trigger: Trigger = Trigger.ON_DEMAND) -> Saving:
        """Save `state` as the checkpoint of `step`. This call waits while earlier saves occupy all the memory.

        Args:
            state: name → module, optimizer, any object with `state_dict`, or plain values and tensors.
            step: how many optimizer steps are done.
            trigger: why the checkpoint is saved.

        Raises:
            ValueError: a name is not valid as a file's name.
            SaveError: there is no memory for a snapshot, or no keeper.
        """
        bad = next((key for key in state if not _KEY.fullmatch(key)), None)
        if bad is not None:
            raise ValueError(f"the key {bad!r} is not a valid file name; use letters, digits, `_`, `.`, `-`")
        self._ensure_keeper()
        self._watch(state)
        self._torn.discard(step)
        images = [self._images.compose(key, value) for key, value in state.items()]
        self._num_taken += 1
        options: dict[str, Any] = {"trigger": trigger, "is_requested": True, "number": self._num_taken}
        try:
            while not self._snapshotter.take(step, images, facts=self._keeper_facts(step), **options):
                if not self._snapshotter.keeper.is_alive:
                    raise SaveError(f"step {step} is not saved: the keeper died")
                clock.sleep(0.001)
        except NoRoomError as error:
            raise SaveError(f"step {step} is not saved: {error}") from error
        self._images.forget(self._snapshotter.passing)
        return Saving(step, self._output.root / checkpoint_name(step), self._snapshotter, self._torn)

    def _replace_keeper(self) -> None:
        self._log.warning(
            "the keeper died, and the snapshots that it had not written are lost; a new keeper is started"
        )
        self._snapshotter.close()
        self._snapshotter.keeper.close()
        self._host.ensure()
        self._snapshotter = self._connect()

    def _keeper_facts(self, step: int) -> CheckpointFacts:
        return CheckpointFacts(
            manifest=self._facts.at(step=step, samples_seen=step),
            folder=str(self._output.root),
            attempt_id=self._attempt_id,
            keep=self._keep,
        )

    def wait_staged(self) -> None:
        """Wait until the state of the last save has been copied."""
        self._snapshotter.wait_staged()

    # ---- loading, closing -------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any]) -> int | None:
        """Load the newest valid checkpoint into `state`.

        Args:
            state: as for `save`. Objects with `load_state_dict` load the saved value; dictionaries are updated.

        Returns:
            The step, or None when the folder holds no checkpoint.

        Raises:
            CheckpointError: a file of the checkpoint contains something that is not allowed.
            KeyError: the checkpoint has no file for one of the names.
            NothingValidError: there are checkpoints, and none of them is valid.
            TypeError: a value is not a dictionary and has no `load_state_dict`.
        """
        rejected: list[Path] = []

        def reject(path: Path, fault: Fault) -> None:
            rejected.append(path)
            self._log.warning("%s is not used: %s", path, fault)

        found = newest_valid(self._output.root, rejected=reject)
        if found is None:
            return None
        if rejected:
            # Without this call, retention would count the rejected checkpoints as the newest, because their steps are
            # later than the step of the loaded checkpoint.
            self._output.pass_over(rejected)
        # Files that the manifest does not list were not verified, and another person may have added them.
        listed = {entry.path for entry in found[1].files}
        missing = next((key for key in state if f"{key}.pt" not in listed), None)
        if missing is not None:
            raise KeyError(f"{found[0]} has no {missing}.pt")
        load_state(found[0], state)
        self._continue_run(*found)
        return found[1].step

    def _continue_run(self, path: Path, manifest: Manifest) -> None:
        """Make later saves belong to the run of the loaded checkpoint. Report an event if the last load or save
        belonged to another run."""
        run_id = manifest.run_id
        if self._last_run not in {None, run_id}:
            event = ResumedFromOtherRun(
                step=manifest.step, path=str(path), run_id=run_id, last_run_id=str(self._last_run)
            )
            self._events.write(event)
            self._log.warning("%s", event.line)
        if run_id != self._facts.run_id:
            attempt = self._output.next_attempt(run_id, after=manifest.attempt)
            self._facts = replace(self._facts, run_id=run_id, attempt=attempt)
        self._last_run = run_id

    def close(self) -> None:
        """Wait until everything is durable, and release the folder."""
        if os.getpid() != self._pid or self._is_closed:  # a forked child must not end its parent's keeper
            return
        self._is_closed = True
        keeper = self._snapshotter.keeper
        self._snapshotter.wait_staged()
        keeper.close_folder()
        keeper.send(Goodbye())
        self._snapshotter.close()
        keeper.close()
        self._host.finish()
        self._output.release(self._attempt_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- the values of a state --------------------------------------------------------------------------------------


class StateImages:
    """Composes an image (the bytes that a file will have) for each name at each save.

    It remembers the layout of each value.
    """

    def __init__(self) -> None:
        self._images: dict[str, TorchImages] = {}
        self._states: dict[str, tuple[Any, ModuleState | OptimizerState]] = {}

    def compose(self, name: str, value: Any) -> Image:
        """The image of a value as it is now.

        Args:
            name: the name of the value.
            value: a module, an optimizer, any object with `state_dict`, or plain values and tensors.

        Raises:
            Exception: any error of pickling.
        """
        images = self._images.setdefault(name, TorchImages(f"{name}.pt"))
        state, is_sure = self._state_of(name, value)
        try:
            return images.compose(state, trusts=is_sure)
        except UncomposableError:
            content = io.BytesIO()
            torch.save(state, content)
            return Image.of_bytes(images.path, content.getvalue())

    def _state_of(self, name: str, value: Any) -> tuple[Any, bool]:
        """The object to save for a value, and whether it certainly holds the same tensors as at the last call."""
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            known, state = self._states.get(name, (None, None))
            if state is None or known is not value:
                state = ModuleState(value) if isinstance(value, torch.nn.Module) else OptimizerState(value)
                self._states[name] = value, state
            return state.state_dict(), state.is_sure
        return (value.state_dict() if hasattr(value, "state_dict") else value), False

    def forget(self, paths: Iterable[str]) -> None:
        """Release the layouts of these files. The layouts hold tensors that may have been created for one save
        only."""
        for path in paths:
            self._images.pop(path.removesuffix(".pt"), None)


def load_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Load the files of a verified checkpoint into `state`.

    Args:
        folder: the folder of the checkpoint.
        state: name → an object with `load_state_dict`, or a dictionary, which is updated.

    Raises:
        CheckpointError: a file is damaged, or it contains something that is not allowed.
        KeyError: the checkpoint has no file for one of the names.
        TypeError: a value is not a dictionary and has no `load_state_dict`.
    """
    with tried_schedulers(folder, *state.values()):
        _load_values(folder, state)


def _load_values(folder: Path, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        path = folder / f"{key}.pt"
        if not path.exists():
            raise KeyError(f"{folder} has no {key}.pt")
        try:
            # The file is mapped only for a module, because a module copies the loaded tensors, or gets copies
            # (`checked_modules`). Other objects keep the loaded tensors. If these were in a mapped file, another
            # person could change them by a write to the file, or end this process by truncating the file.
            content = restricted_load(path, map_location="cpu", mmap=isinstance(value, torch.nn.Module))
        except IsADirectoryError as error:
            raise refusal(path, "it is damaged: it is a folder and not a file") from error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # hostile content may raise anything
            raise CheckpointError(
                f"{path} was not loaded: it is damaged, or it contains objects of classes that Safepoint does not "
                f"load ({type(error).__name__})",
                hint="if your script saves objects of its own classes, call "
                "torch.serialization.add_safe_globals([CLASS]) in the script",
            ) from error
        if hasattr(value, "load_state_dict"):
            optimizers = [value] if isinstance(value, torch.optim.Optimizer) else []
            if not optimizers and not isinstance(value, torch.nn.Module):
                check_memory(path, content, value.state_dict if hasattr(value, "state_dict") else dict)
            with (
                states_of(path),
                checked_optimizers(path, *optimizers),
                checked_schedulers(path, value, most_steps=most_scheduler_steps(folder, spare=_SPARE)),
                checked_scalers(path),
                checked_modules(path),
            ):
                value.load_state_dict(content)
        elif isinstance(value, dict):
            check_memory(path, content, cast("dict[Any, Any]", value).copy)
            with states_of(path):
                cast("dict[Any, Any]", value).update(content)
        else:
            raise TypeError(
                f"{key} cannot be loaded: {type(value).__name__} is neither a dict nor an object with load_state_dict"
            )


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors with the sizes and devices of the tensors that a save of `value` copies; used to estimate memory."""
    if isinstance(value, torch.nn.Module):
        yield from {id(tensor): tensor for tensor in value.state_dict(keep_vars=True).values()}.values()
    elif isinstance(value, torch.optim.Optimizer):
        parameters: list[torch.Tensor] = [one for group in value.param_groups for one in group["params"]]
        for parameter in parameters:
            if parameter.requires_grad:
                yield from (parameter, parameter)  # the optimizer's two tensors for the parameter
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from tensors_of(item)
