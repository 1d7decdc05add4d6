"""Examines a checkpoint that another program wrote, in a folder or an object store.

Promises: nothing is changed, nothing is run, no name in a file leads outside of the checkpoint, and the memory and
time that a file costs are bounded. A checkpoint without faults has all files that the Trainer needs, and each has the
form and the size that it states.

Not promised: that the values of tensors are right. The checkpoint has no digests with which they could be compared.
"""

import contextlib
import math
import os
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.foreign import layout
from safepoint.checkpoint.foreign.contents import check_dcp, check_index, check_pickles, read_json, tensors_of
from safepoint.checkpoint.foreign.layout import Strategy
from safepoint.checkpoint.foreign.names import AllowedNames
from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import (
    MANIFEST_NAME,
    PART_NAME,
    UNKNOWN_DIGEST,
    ManifestFacts,
    path_fault,
)
from safepoint.checkpoint.format.read_ranges import ReadRanges
from safepoint.checkpoint.format.verify import Fault, list_files
from safepoint.checkpoint.remote.refusals import Refusals
from safepoint.checkpoint.weights.budget import Budget
from safepoint.checkpoint.weights.torch_file import Inert, read_torch_file
from safepoint.checkpoint.weights.zero_weights import zero_files, zero_folder
from safepoint.errors import CheckpointError, ObjectNotFoundError, SafepointError, TransientError, without_credentials
from safepoint.storage.browsing import StorePath, browse
from safepoint.storage.store import Store

_ADAPTED = "base_model.model."
"""The prefix that PEFT gives to the names of weights. A checkpoint of FSDP's shards has no `adapter_config.json`, so
only this prefix shows that it holds adapters."""
_MAX_FILES = 100_000
_MAX_RECORDS = 100_000
_MAX_VERSION = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The result of an examination.

    Args:
        name: `checkpoint-<step>`.
        files: path → size in bytes.
        faults: why no run can resume from the checkpoint; empty if a run can.
        facts: what the files state; None if there is a fault. `run_id` is "unknown".
        is_batch_known: whether the files state how many samples a step has. If not, `global_batch` is 1, and
            `gradient_accumulation` is 1 unless the files or the caller state it.
        writer: the library that wrote the checkpoint, for messages.
        modified_s: when a file was last written, seconds since 1970.
        read: the ranges of the files that were read.
    """

    name: str
    files: Mapping[str, int] = field(default_factory=dict[str, int])
    faults: tuple[Fault, ...] = ()
    facts: ManifestFacts | None = None
    is_batch_known: bool = False
    writer: str = "another program"
    modified_s: float = 0.0
    read: ReadRanges = field(default_factory=ReadRanges, compare=False)


def is_foreign(folder: Path) -> bool:
    """Whether `folder` has the name of a checkpoint, and Safepoint has not written its files."""
    if step_of(folder) is None or os.path.islink(folder):
        return False
    try:
        names = set(os.listdir(folder))
    except OSError:
        return False
    return not names & {MANIFEST_NAME, PART_NAME} and not layout.is_own(names)


def examine(
    store: Store, name: str, *, allowed: Collection[str] = (), accumulation: int | None = None
) -> Examination:
    """Examine a checkpoint.

    Args:
        store: the output folder or the object store that contains the checkpoint.
        name: `checkpoint-<step>`.
        allowed: functions and classes that its pickles may name, in addition to the names that are always allowed.
        accumulation: the number of micro-batches per step and rank, used if the files do not state it; None if it is
            not known.

    Raises:
        StorageError: the object store cannot be read. In a folder, an unreadable file is a fault.
    """
    return _Examiner(store, name, AllowedNames(allowed), accumulation).examine()


def faults_of_names(store: Store, name: str) -> tuple[Fault, ...]:
    """The faults of a checkpoint that a list of its files shows, such as a missing file or a save that has not ended.

    No file is opened, so the call takes as long as one listing, and the content of the files does not matter.

    Args:
        store: the output folder or the object store that contains the checkpoint.
        name: `checkpoint-<step>`.

    Raises:
        StorageError: the object store cannot be listed.
    """
    return _Examiner(store, name, AllowedNames(), None).name_faults()


class _Examiner:
    def __init__(self, store: Store, name: str, names: AllowedNames, accumulation: int | None) -> None:
        self._accumulation = accumulation
        self._store = store
        self._name = name
        self._names = names
        self._has_adapters = False
        self._faults: list[Fault] = []
        self._sizes: dict[str, int] = {}
        self._modified_s = 0.0
        self._read = ReadRanges()
        self._refusals = Refusals(store)

    def name_faults(self) -> tuple[Fault, ...]:
        self._check_names()
        return tuple(self._faults)

    def examine(self) -> Examination:
        facts, is_batch_known = None, False
        with self._noting("."):  # hostile content may cause an exception anywhere
            facts, is_batch_known = self._examine()
        return self._result(facts, is_batch_known=is_batch_known)

    def _examine(self) -> tuple[ManifestFacts | None, bool]:
        strategy = self._check_names()
        if strategy is None:
            return None, False
        self._folder: StorePath = browse(self._store, self._name, on_read=self._read.note)
        self._budget = Budget(sum(self._sizes.values()))
        self._arguments = self._read_arguments()
        for path in sorted(self._sizes):
            with self._noting(path):
                self._check_file(path)
        num_ranks = self._check_strategy(strategy)
        for path in layout.missing_rng(self._sizes, num_ranks):
            if Fault(file=path, reason="it is missing") not in self._faults:
                self._faults.append(Fault(file=path, reason="it is missing"))
        with self._noting(layout.STATE):
            if not self._faults:
                return self._facts(strategy)
        return None, False

    def _result(self, facts: ManifestFacts | None, *, is_batch_known: bool) -> Examination:
        version = facts.libraries.get("transformers") if facts is not None else None
        return Examination(
            name=self._name,
            files=self._sizes,
            faults=tuple(self._faults),
            facts=facts if not self._faults else None,
            is_batch_known=is_batch_known,
            writer=f"transformers {version}" if version else "another program",
            modified_s=self._modified_s,
            read=self._read,
        )

    @contextlib.contextmanager
    def _noting(self, path: str) -> Generator[None]:
        """Turn the errors of the block into a fault of the file `path`."""
        try:
            with self._refusals.as_fault(f"{self._name}/{path}"):
                yield
        except (CheckpointError, ObjectNotFoundError) as error:
            self._faults.append(Fault(file=path, reason=error.message))
        except SafepointError as error:
            if not self._store.location.is_folder:
                raise
            self._faults.append(Fault(file=path, reason=f"it cannot be read: {error}"))
        except OSError as error:
            self._faults.append(Fault(file=path, reason=f"it cannot be read: {error}"))
        except Exception as error:  # noqa: BLE001  hostile content may raise anything
            self._faults.append(Fault(file=path, reason=f"it is damaged: {type(error).__name__}: {error}"))

    # ---- names --------------------------------------------------------------------------------------------------

    def _check_names(self) -> Strategy | None:
        """Check the names of the files. Returns the strategy that they show; None if no file may be opened."""
        with self._noting("."):
            self._list()
        if self._faults:
            return None
        strategy = layout.strategy_of(self._sizes)
        self._faults += [Fault(file=path, reason="it is missing") for path in layout.missing(self._sizes, strategy)]
        return strategy

    def _list(self) -> None:
        listed: dict[str, int | None] = {}
        if self._store.location.is_folder:
            folder = self._store.location.folder / self._name
            if folder.is_symlink():
                raise CheckpointError("the folder is a link")
            listed = list_files(folder)
        for item in self._store.list(self._name):
            self._modified_s = max(self._modified_s, item.modified_s)
            listed.setdefault(item.key.removeprefix(f"{self._name}/"), item.size_bytes)
        if len(listed) > _MAX_FILES:
            raise CheckpointError(f"it has more than {_MAX_FILES} files")
        for path, size_bytes in listed.items():
            fault = path_fault(path)
            if size_bytes is None:
                self._faults.append(Fault(file=path, reason="it is a link or a special file"))
            elif fault:
                self._faults.append(Fault(file=path, reason=f"its name {fault}"))
            else:
                self._sizes[path] = size_bytes
        if layout.is_own(self._sizes):
            raise CheckpointError("Safepoint wrote it, and its manifest is missing, so nothing in it can be verified")
        for path in layout.markers(self._sizes):
            self._faults.append(Fault(file=path, reason="the program that wrote the checkpoint did not finish it"))

    # ---- contents -----------------------------------------------------------------------------------------------

    def _check_file(self, path: str) -> None:
        place = self._folder / path
        if path in {layout.SAFETENSORS_INDEX, layout.BIN_INDEX}:
            check_index(self._folder, path, self._sizes)
        elif layout.is_tensors(path):
            tensors_of(place)
        elif layout.is_pickle(path):
            check_pickles(place, self._names, self._budget)
        elif layout.is_config(path):
            read_json(place)
        elif path.endswith(".distcp") and not self._sizes[path]:
            raise CheckpointError("it is empty")

    def _check_strategy(self, strategy: Strategy) -> int:
        """Check the files that several ranks have written. Returns a lower bound of the number of ranks."""
        least = _num_processes(self._arguments)
        if strategy is Strategy.SHARDS:
            for name in (layout.MODEL_SHARDS, layout.OPTIMIZER_SHARDS):
                if f"{name}/.metadata" in self._sizes:
                    with self._noting(f"{name}/.metadata"):
                        found = check_dcp(self._folder / name, self._names, self._budget)
                        least = max(least, found.num_ranks)
                        self._has_adapters |= any(_ADAPTED in key for key in found.keys)
        elif strategy is Strategy.ZERO and "latest" in self._sizes:
            with self._noting("latest"):
                num_partitions = len(self._partitions())
                num_ranks = max(least, layout.num_ranks(self._sizes))
                if num_partitions < num_ranks:
                    raise CheckpointError(
                        f"the folder that it names has the optimizer partitions of only {num_partitions} of "
                        f"{num_ranks} ranks"
                    )
                least = num_partitions
        return least

    def _partitions(self) -> list[StorePath]:
        folder = zero_folder(self._folder)
        if folder is None or folder == self._folder:
            raise CheckpointError("it names no folder that has the optimizer's partitions")
        partitions, models = zero_files(folder)
        # Below stage 3 only one rank writes the model.
        if len(models) != (len(partitions) if models[0].name.startswith("zero_pp_rank_") else 1):
            raise CheckpointError(f"{folder.name} lacks the file of a rank")
        return partitions

    # ---- facts --------------------------------------------------------------------------------------------------

    def _facts(self, strategy: Strategy) -> tuple[ManifestFacts, bool]:
        state = read_json(self._folder / layout.STATE)
        step, epoch = state.get("global_step"), state.get("epoch")
        if step != step_of(Path(self._name)):
            raise CheckpointError(f"it is of step {step!r}, and the folder's name is {self._name}")
        world_size = len(self._partitions()) if strategy is Strategy.ZERO else layout.num_ranks(self._sizes)
        samples, accumulation = (_count(self._arguments.get(name)) for name in _GEOMETRY)
        samples, accumulation = _count(state.get("train_batch_size")) or samples, accumulation or self._accumulation
        is_known = samples is not None and accumulation is not None
        global_batch = (samples or 1) * (accumulation or 1) * world_size if is_known else 1
        facts = ManifestFacts(
            run_id="unknown",
            attempt=1,
            step=cast("int", step),
            epoch=float(epoch) if isinstance(epoch, int | float) else 0.0,
            world_size=world_size,
            global_batch=global_batch,
            gradient_accumulation=accumulation or 1,
            samples_seen=cast("int", step) * global_batch,
            strategy={Strategy.ZERO: "deepspeed", Strategy.WHOLE: "ddp" if world_size > 1 else "single"}.get(
                strategy, "fsdp"
            ),
            libraries=self._libraries(),
            metrics=_metrics(state.get("log_history"), step),
            base=self._base(),
        )
        return facts, is_known

    def _read_arguments(self) -> dict[str, Any]:
        """The attributes of the TrainingArguments; empty if their file cannot be read. That is not a fault, because
        the Trainer does not load this file."""
        try:
            found: Any = read_torch_file(self._folder / layout.ARGUMENTS, budget=self._budget)
            state: Any = found.state if isinstance(found, Inert) else None
        except TransientError:
            raise
        except Exception:  # noqa: BLE001  if the file has to be read, `_check_file` or `describe` reports the error
            return {}
        return cast("dict[str, Any]", state) if isinstance(state, dict) else {}

    def _libraries(self) -> dict[str, str]:
        """The version of transformers in `config.json` or `generation_config.json`; empty if neither states it."""
        version: Any = None
        for name in ("config.json", "generation_config.json"):
            if name in self._sizes and version is None:
                version = read_json(self._folder / name).get("transformers_version")
        is_version = isinstance(version, str) and version.isprintable() and len(version) <= _MAX_VERSION
        return {"transformers": version} if is_version else {}

    def _base(self) -> dict[str, str] | None:
        name: Any = None
        if "adapter_config.json" in self._sizes:
            name = read_json(self._folder / "adapter_config.json").get("base_model_name_or_path")
        elif not self._has_adapters:
            return None
        text = without_credentials(name) if isinstance(name, str) and name.isprintable() else ""
        return {"name": text, "revision": "", "digest": UNKNOWN_DIGEST}


_GEOMETRY = ("per_device_train_batch_size", "gradient_accumulation_steps")


def _num_processes(arguments: dict[str, Any]) -> int:
    """The number of ranks in Accelerate's state, which TrainingArguments keep; 1 if there is no number."""
    state: Any = getattr(arguments.get("distributed_state"), "state", None)
    return _count(cast("dict[str, Any]", state).get("num_processes")) or 1 if isinstance(state, dict) else 1


def _count(value: Any) -> int | None:
    """A number of samples or micro-batches; None for anything else."""
    return value if type(value) is int and 0 < value < 1 << 31 else None


def _metrics(history: Any, step: Any) -> dict[str, float]:
    """The results of the evaluations at `step`."""
    found: dict[str, float] = {}
    records = cast("list[Any]", history)[-_MAX_RECORDS:] if isinstance(history, list) else []
    for record in records:
        if not isinstance(record, dict) or cast("dict[str, Any]", record).get("step") != step:
            continue
        for name, value in cast("dict[str, Any]", record).items():
            if name.startswith("eval_") and isinstance(value, int | float) and math.isfinite(value):
                found[name] = float(value)
    return found
