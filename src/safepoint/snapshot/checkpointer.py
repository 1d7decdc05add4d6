"""Saves that do not hold up a plain PyTorch loop: one object, `save`, `load`.

Each value of the state becomes one file, `<key>.pt`, as `torch.save` writes it. Models, optimizers and whatever else
has `state_dict` and `load_state_dict` are saved by what these give; other values as they are.
"""

import dataclasses
import logging
import os
import platform
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from safepoint._version import __version__
from safepoint.checkpoint.format.catalog import checkpoint_name, newest_valid
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, ManifestFacts, Trigger
from safepoint.checkpoint.local.commit import WorkingCheckpoint
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import KeepNewest, parse_policies
from safepoint.errors import ConflictError, SafepointError, SaveError
from safepoint.foundation import clock
from safepoint.foundation.environment import Place
from safepoint.foundation.events import console
from safepoint.foundation.events.run_events import Saved, SaveFailed
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.snapshot.images.image import Image
from safepoint.snapshot.images.module_state import ModuleState, OptimizerState
from safepoint.snapshot.images.torch_image import TorchImages
from safepoint.snapshot.keeper_client.arena import NoRoomError
from safepoint.snapshot.keeper_client.client import KeeperClient, Outcome
from safepoint.snapshot.keeper_client.host import KeeperHost
from safepoint.snapshot.keeper_client.snapshotter import Snapshotter
from safepoint.snapshot.memory import block
from safepoint.snapshot.protocol.channel import new_name
from safepoint.snapshot.protocol.plan import KeeperPlan

_log = logging.getLogger("safepoint")
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_CLAIM_WAIT_S = 30.0
_KEEPER_START_S = 20.0


@dataclass(frozen=True, slots=True)
class Saving:
    """A save under way.

    Args:
        step: of the checkpoint.
        path: where it will be.
    """

    step: int
    path: Path
    _checkpointer: "Checkpointer"

    def wait_staged(self) -> None:
        """Wait until the state has been copied; it may be changed in any way from then on."""
        self._checkpointer.wait_staged()

    @property
    def is_durable(self) -> bool:
        """Whether the checkpoint is committed by now."""
        outcome = self._checkpointer.outcome(self.step)
        return outcome is not None and outcome.is_durable

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is committed and durable.

        Returns:
            Its folder.

        Raises:
            SaveError: it will not be, or is not yet.
        """
        outcome = self._checkpointer.wait_durable(self.step, timeout_s)
        if not outcome.is_durable:
            raise SaveError(f"step {self.step} is not saved: {outcome.error}")
        return self.path


class Checkpointer:
    """Checkpoints of one process.

    The state of models and optimizers is copied beside the next forward and backward; before an optimizer steps, what
    is left of the copy is waited for. Whoever changes parameters elsewhere calls `Saving.wait_staged` before.

    Args:
        folder: where checkpoints go; claimed for this process until `close`.
        keep: which checkpoints stay, such as `newest=3,every=1000`; None keeps all.
        slots: how many snapshots may be in memory; None for one, and three where the state is small.

    Raises:
        ConflictError: another run writes there.
        StorageError: the folder cannot be used.
        ValueError: `keep` cannot be meant.
    """

    def __init__(self, folder: Path | str, *, keep: str | None = None, slots: int | None = None) -> None:
        parse_policies(keep)
        self._output = OutputFolder(Path(folder).absolute())
        self._keep = keep
        self._slots = slots
        self._place = Place.from_environment()
        if self._place.world_size > 1:
            raise ConflictError(
                f"a Checkpointer saves one process, and this is one of {self._place.world_size} ranks",
                hint="use a folder and an environment of its own for each rank, or `safepoint run`",
            )
        self._log = console.set_up(0)
        self._images: dict[str, TorchImages] = {}
        self._modules: dict[str, ModuleState] = {}
        self._optimizer_states: dict[str, OptimizerState] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._handed: set[int] = set()
        self._num_taken = 0
        self._told: set[str] = set()
        self._pid = os.getpid()
        self._libraries = {
            "safepoint": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        }
        self._snapshotter: Snapshotter | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._host: KeeperHost | None = None
        self._claim()
        self._start_keeper()

    def _claim(self) -> None:
        output = self._output
        output.prepare()
        self._events = EventLog(output.events, actor="rank 0")

        def waiting(who: str) -> None:
            self._log.info("waiting for an earlier run to leave %s (%s)", output.root, who)

        if output.claim(wait_s=_CLAIM_WAIT_S, waiting=waiting):
            output.clean()
        newest = next((manifest for _, manifest in output.manifests()), None)
        self._run_id = newest.run_id if newest else uuid.uuid4().hex
        self._attempt = output.next_attempt(self._run_id, after=newest.attempt if newest else 0)
        self._attempt_id = f"{self._run_id[:8]}-{self._attempt}-{uuid.uuid4().hex[:8]}"
        output.open_attempt(self._attempt_id)

    def _report(self, event: Event) -> None:
        self._events.write(event)
        self._log.log(logging.WARNING if event.is_warning else logging.INFO, "%s", event.line)

    # ---- the keeper -------------------------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        if not block.are_available():
            self._tell_once("this system has no memory that processes share namelessly: saves are synchronous")
            return
        self._host = KeeperHost(KeeperPlan(name=new_name()))
        self._reach_keeper(wait_s=_KEEPER_START_S)

    def _reach_keeper(self, *, wait_s: float) -> None:
        assert self._host is not None
        keeper = KeeperClient.reach(self._host.name, wait_s=wait_s, rank=0, num_ranks=1)
        error = "it does not answer" if keeper is None else keeper.open_folder(str(self._output.root))
        if keeper is None or error:
            self._tell_once(f"the keeper cannot be used, {error}: saves are synchronous")
            return
        self._snapshotter = Snapshotter(
            keeper, optimizers=self._optimizers, slots=self._slots, on_torn=self._note_torn
        )

    def _ensure_keeper(self) -> None:
        """A keeper that died is replaced; what it had not written is not durable, and said so."""
        snapshotter = self._snapshotter
        if snapshotter is not None and not snapshotter.keeper.is_alive:
            _log.warning("the keeper died; a new one is started, and saves are synchronous until it is there")
            self._note_lost(snapshotter.keeper)
            snapshotter.close()
            snapshotter.keeper.close()
            self._snapshotter = None
        if self._snapshotter is None and self._host is not None and not self._host.ensure():
            self._reach_keeper(wait_s=0.0)

    def _note_lost(self, keeper: KeeperClient) -> None:
        """Saves that a dead keeper had not finished."""
        for step in sorted(self._handed):
            known = keeper.outcome(step)
            if known is None:
                known = Outcome(step=step, error="the keeper died while it was being written")
                event = SaveFailed(
                    step=step, trigger=Trigger.ON_DEMAND, reason=known.error, consequence="an older checkpoint stands"
                )
                self._report(event)
            self._outcomes[step] = known
        self._handed.clear()

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._log.warning("%s", text)

    def _note_torn(self, step: int) -> None:
        reason = "parameters were changed outside optimizer.step while they were copied"
        consequence = "from now on saves wait for the copy"
        self._report(SaveFailed(step=step, trigger=Trigger.ON_DEMAND, reason=reason, consequence=consequence))
        self._outcomes[step] = Outcome(step=step, error=reason)

    # ---- saving -----------------------------------------------------------------------------------------------

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Take the memory for snapshots of `state` and fault it in, beside whatever else goes on.

        Args:
            state: as for `save`; an optimizer that has not stepped counts with two moments for each parameter.
        """
        self._watch(state)
        if self._snapshotter is None:
            return
        sizes = [sum(_sizes_of(value)) + (1 << 20) for value in state.values()]
        try:
            device = next((index for value in state.values() for index in _devices_of(value)), None)
            self._snapshotter.arena.prepare([size for size in sizes if size > 2 << 20], device=device)
        except NoRoomError as error:
            self._tell_once(f"saves are synchronous: {error}")

    def wait_prepared(self) -> None:
        """Wait until `prepare` is done."""
        if self._snapshotter is not None:
            self._snapshotter.arena.wait_prepared()

    def _watch(self, state: Mapping[str, Any]) -> None:
        """Optimizers that come later are watched too."""
        optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
        if [id(one) for one in optimizers] != [id(one) for one in self._optimizers]:
            self._optimizers = optimizers
            if self._snapshotter is not None:
                self._snapshotter.watch(optimizers)

    def save(self, state: Mapping[str, Any], step: int, *, trigger: Trigger = Trigger.ON_DEMAND) -> Saving:
        """Save `state` as the checkpoint of `step`.

        While an earlier save still has all the memory, this waits for it; where there is no memory for a snapshot, or
        no keeper, it returns when the checkpoint is durable.

        Args:
            state: name → module, optimizer, anything with `state_dict`, or plain values and tensors.
            step: optimizer steps done.
            trigger: why.

        Raises:
            ValueError: a name cannot be a file's.
            SaveError: a synchronous save failed.
        """
        bad = next((key for key in state if not _KEY.fullmatch(key)), None)
        if bad is not None:
            raise ValueError(f"the key {bad!r} must be letters, digits, `_`, `.` and `-`, to become a file's name")
        self._ensure_keeper()
        self._watch(state)
        self._outcomes.pop(step, None)
        saving = Saving(step, self._output.root / checkpoint_name(step), self)
        if not self._begin(state, step, trigger):
            self._save_now(state, step, trigger)
        return saving

    def _begin(self, state: Mapping[str, Any], step: int, trigger: Trigger) -> bool:
        snapshotter = self._snapshotter
        if snapshotter is None:
            return False
        try:
            images = [self._image(key, value) for key, value in state.items()]
            self._num_taken += 1
            fields: dict[str, Any] = {"is_wanted": True, "facts": self._facts(step), "number": self._num_taken}
            while not snapshotter.take(step, images, trigger=trigger, **fields):
                if not snapshotter.keeper.is_alive:
                    return False
                clock.sleep(0.001)
            for path in snapshotter.passing:
                self._images.pop(path.removesuffix(".pt"), None)
        except Exception as error:  # noqa: BLE001  what cannot be captured, torch.save may know how to write
            self._tell_once(f"saves are synchronous: {error}")
            _log.debug("the snapshot of step %s failed", step, exc_info=True)
            return False
        self._handed = {one for one in self._handed if snapshotter.keeper.outcome(one) is None} | {step}
        return True

    def _image(self, key: str, value: Any) -> Image:
        images = self._images.get(key)
        if images is None:
            images = self._images[key] = TorchImages(f"{key}.pt")
        state, is_sure = self._state_of(key, value)
        return images.compose(state, trusts=is_sure)

    def _state_of(self, key: str, value: Any) -> tuple[Any, bool]:
        """What is saved of a value; whether it surely has the tensors of the last time, if it is the same object."""
        if isinstance(value, torch.nn.Module):
            module = self._modules.get(key)
            if module is None or module.module is not value:
                module = self._modules[key] = ModuleState(value)
            return module.state_dict(), module.is_sure
        if isinstance(value, torch.optim.Optimizer):
            optimizer = self._optimizer_states.get(key)
            if optimizer is None or optimizer.optimizer is not value:
                optimizer = self._optimizer_states[key] = OptimizerState(value)
            return optimizer.state_dict(), optimizer.is_sure
        return (value.state_dict() if hasattr(value, "state_dict") else value), False

    def _facts(self, step: int) -> dict[str, Any]:
        return {
            "folder": str(self._output.root),
            "attempt_id": self._attempt_id,
            "manifest": dataclasses.asdict(self._manifest_facts(step)),
            "keep": self._keep,
        }

    def _manifest_facts(self, step: int) -> ManifestFacts:
        return ManifestFacts(
            run_id=self._run_id,
            attempt=self._attempt,
            step=step,
            epoch=0.0,
            world_size=1,
            global_batch=1,
            gradient_accumulation=1,
            samples_seen=step,
            strategy="single",
            libraries=self._libraries,
        )

    def _save_now(self, state: Mapping[str, Any], step: int, trigger: Trigger) -> None:
        working = WorkingCheckpoint(self._output, attempt_id=self._attempt_id, step=step)
        began_s = clock.monotonic_s()
        try:
            root = working.rank_root(0) / working.name
            for key, value in state.items():
                torch.save(self._state_of(key, value)[0], root / f"{key}.pt")
            manifest = working.commit(
                [working.seal(0)],
                lambda files: self._manifest_facts(step).manifest(trigger=trigger, files=files),
            )
        except (SafepointError, OSError, RuntimeError) as error:
            self._report(
                SaveFailed(step=step, trigger=trigger, reason=str(error), consequence="an older checkpoint stands")
            )
            raise SaveError(f"step {step} is not saved: {error}") from error
        finally:
            working.discard()
        self._outcomes[step] = Outcome(step=step, error="", path=str(working.target))
        event = Saved(
            step=step,
            trigger=trigger,
            path=str(working.target),
            num_files=len(manifest.files),
            size_bytes=manifest.size_bytes,
            duration_s=round(clock.monotonic_s() - began_s, 3),
        )
        self._report(event)
        try:
            self._output.prune(self._output.superseded(parse_policies(self._keep) or [KeepNewest(1 << 30)]))
        except OSError as error:
            self._log.warning("an older checkpoint could not be deleted, and stays until the next save: %s", error)

    # ---- waiting ----------------------------------------------------------------------------------------------

    def wait_staged(self) -> None:
        """Wait until the last save has been copied."""
        if self._snapshotter is not None:
            self._snapshotter.wait_staged()

    def outcome(self, step: int) -> Outcome | None:
        """What became of the save of `step`; None while nobody knows."""
        known = self._outcomes.get(step)
        if known is None and self._snapshotter is not None:
            known = self._snapshotter.keeper.outcome(step)
        return known or self._outcome_in_folder(step)

    def _outcome_in_folder(self, step: int) -> Outcome | None:
        """What became of a save that is so long ago that nobody remembers: whether its checkpoint is there."""
        path = self._output.root / checkpoint_name(step)
        if step in self._handed or not (path / MANIFEST_NAME).exists():
            return None
        return Outcome(step=step, error="", path=str(path))

    def wait_durable(self, step: int, timeout_s: float | None = None) -> Outcome:
        """Wait for the save of `step`."""
        self.wait_staged()
        known = self._outcomes.get(step) or self._outcome_in_folder(step)
        if known is not None:
            return known
        if self._snapshotter is None:
            return Outcome(step=step, error="nothing was saved at this step")
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        return self._snapshotter.keeper.wait(step, deadline_s)

    # ---- loading ----------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any]) -> int | None:
        """Load the newest valid checkpoint into `state`.

        Args:
            state: as for `save`. Values with `load_state_dict` get theirs; of other values dictionaries are updated.

        Returns:
            The step, or None when the folder holds no checkpoint.

        Raises:
            NothingValidError: it holds some, and none of them is valid.
            KeyError: the checkpoint has no such value.
        """

        def rejected(path: Path, fault: object) -> None:
            self._log.warning("%s is not used: %s", path, fault)

        found = newest_valid(self._output.root, rejected=rejected)
        if found is None:
            return None
        path, manifest = found
        load_state(path, state)
        return manifest.step

    def close(self) -> None:
        """Wait until everything is durable, and leave the folder to others."""
        if os.getpid() != self._pid:  # a forked child, whose parent goes on with all of it
            return
        if self._snapshotter is not None:
            self._snapshotter.wait_staged()
            self._snapshotter.keeper.close_folder()
            self._snapshotter.keeper.leave()
            self._snapshotter.close()
            self._snapshotter.keeper.close()
            self._snapshotter = None
        if self._host is not None:
            self._host.finish()
            self._host = None
        self._output.release(self._attempt_id)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Load the files that a `Checkpointer` has written, from a verified folder or from memory.

    Raises:
        KeyError: the checkpoint has no such value.
    """
    for key, value in state.items():
        path = folder / f"{key}.pt"
        if not path.exists():
            raise KeyError(f"{folder} has no {key}.pt")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(content)
        elif isinstance(value, dict):
            cast("dict[Any, Any]", value).update(content)
        else:
            raise TypeError(f"{key} can be saved, and cannot be loaded into: it has no load_state_dict, is no dict")


def _sizes_of(value: Any) -> list[int]:
    """The bytes that saving `value` will take."""
    if isinstance(value, torch.nn.Module):
        return [tensor.nbytes for tensor in {id(t): t for t in value.state_dict(keep_vars=True).values()}.values()]
    if isinstance(value, torch.optim.Optimizer):
        parameters: list[torch.Tensor] = [one for group in value.param_groups for one in group["params"]]
        return [2 * parameter.nbytes for parameter in parameters if parameter.requires_grad]
    if isinstance(value, torch.Tensor):
        return [value.nbytes]
    if isinstance(value, Mapping):
        return [size for item in cast("Mapping[Any, Any]", value).values() for size in _sizes_of(item)]
    return []


def _devices_of(value: Any) -> list[int]:
    """The CUDA devices that hold `value`."""
    if isinstance(value, torch.nn.Module):
        return [index for tensor in value.parameters() for index in _devices_of(tensor)]
    if isinstance(value, torch.optim.Optimizer):
        return [index for group in value.param_groups for one in group["params"] for index in _devices_of(one)]
    if isinstance(value, torch.Tensor):
        return [value.device.index] if value.device.type == "cuda" else []
    if isinstance(value, Mapping):
        return [index for item in cast("Mapping[Any, Any]", value).values() for index in _devices_of(item)]
    return []
