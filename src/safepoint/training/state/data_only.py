"""Loads the pickles of a checkpoint without running anything that they name.

A pickle can name any function, and loading the pickle calls that function. A checkpoint may come from an attacker,
even if its digests are right. So the pickles of a checkpoint may contain only tensors, plain values, objects of the
few classes that are listed here, and objects that the script has allowed with `torch.serialization.add_safe_globals`.
A file that contains anything else is refused.

`load_data` is for files that Safepoint reads itself. `only_data` is for files that a framework reads: DeepSpeed,
Accelerate and DCP (torch.distributed.checkpoint) load some of them without any restriction. `check_descriptions` is
for the time before a checkpoint is chosen: it checks the small files that describe the checkpoint.
"""

import contextlib
import dataclasses
import errno
import inspect
import os
import pickle
import random
import re
import sys
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata

from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES, path_fault
from safepoint.checkpoint.format.scheduler_steps import most_scheduler_steps
from safepoint.checkpoint.pickles.archive_records import ArchiveError
from safepoint.checkpoint.pickles.bounded_pickle import BoundedUnpickler, KeyLimits, size_of
from safepoint.checkpoint.pickles.loading import ForbiddenNameError, refusal, states_of
from safepoint.checkpoint.pickles.module_states import checked_modules
from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.checkpoint.pickles.restricted_load import OldFormatError, restricted_load
from safepoint.checkpoint.pickles.scaler_states import checked_scalers
from safepoint.checkpoint.pickles.scheduler_states import checked_schedulers
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.checkpoint.weights.dcp_weights import METADATA
from safepoint.errors import CheckpointError, printable
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.shared_folders.opening import open_regular, read_regular
from safepoint.training.compatibility.accelerate_releases import innermost
from safepoint.training.compatibility.transformers_releases import loadable
from safepoint.training.state.dcp_parts import check_parts, check_places
from safepoint.training.state.engine_states import checked_engine, is_engine
from safepoint.training.state.rng import set_numpy_state, set_python_state

_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
"""The classes that the files of ZeRO name, by module. They only hold data: creating an instance does nothing else."""
_NAME_A_FOLDER = ("latest", "latest_universal")
"""DeepSpeed's files that contain the name of a folder in the checkpoint."""
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""The files that list, for each weight, in which file of the checkpoint the weight is."""
_CONFIGURATIONS = ("config.json", "generation_config.json")
_VERSION = "transformers_version"
_MAX_NAME_BYTES = 4096
_MOST_PLACES = 50_000_000
_ELSEWHERE = (
    "while a checkpoint is loaded, torch.load loads only data, even from other files: load this file before training "
    "starts, or call torch.serialization.add_safe_globals([CLASS]) in the script"
)
_PATH: Any = (str, os.PathLike)
_NAME = re.compile(r"GLOBAL (\S+) w")
"""Finds, in the message of torch's error, the name of the function or class that was refused."""


def load_data(file: Any, *, mmap: bool = False) -> Any:
    """Read a file of `torch.save` into host memory.

    Args:
        file: the path of the file, or the open file.
        mmap: whether tensors stay in the file until they are used.

    Raises:
        CheckpointError: the file names something that is not allowed, or is not a file of `torch.save`.
        OSError: the file cannot be read.
    """
    return _load(torch.load, file, _place_of(file, "a file of the checkpoint"), map_location="cpu", mmap=mmap)


@contextlib.contextmanager
def only_data(folder: str | os.PathLike[str], *parts: Any) -> Generator[None]:
    """While the block runs, frameworks read the files of a checkpoint with the restrictions of `load_data`.

    Args:
        folder: the folder of the checkpoint. In this thread, and in threads that start while the block runs, the
            restrictions also apply to files outside of the folder, because a path can change between a check and its
            use. In all other threads, the restrictions apply only to files in the folder.
        parts: the objects whose states are loaded: optimizers and schedulers, also in wrappers (see
            `checked_optimizers` and `checked_schedulers`), and engines of DeepSpeed (see `checked_engine`). Other
            objects are ignored.

    Raises:
        CheckpointError: a file was refused, even if the framework caught this error or raised another error; or the
            framework raised an error that invalid states cause (see `states_of`).
    """
    for name in _NAME_A_FOLDER:
        named_folder(folder, name)
    _check_named_files(folder)
    original: Callable[..., Any] = torch.load
    refused: list[CheckpointError] = []
    place = _Place(folder)
    engines = [one for one in parts if is_engine(one)]
    parts = (*parts, *(getattr(one, "lr_scheduler", None) for one in engines))
    found: list[Any] = [innermost(one) for one in parts]
    optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer)]
    this_thread = threading.current_thread()
    others = set(threading.enumerate()) - {this_thread}

    def load(f: Any, map_location: Any = None, pickle_module: Any = None, **options: Any) -> Any:
        if _is_from_rank() or (threading.current_thread() in others and not _is_in(folder, f)):
            return original(f, map_location, pickle_module, **options)
        named = _place_of(f, folder)
        if threading.current_thread() is this_thread:
            place.path = named
        try:
            return _load(original, f, named, map_location=loadable(map_location), **{**options, "weights_only": True})
        except CheckpointError as error:
            if not _is_in(folder, f):
                error.hint = _ELSEWHERE
            refused.append(error)
            raise

    def load_metadata(file: BinaryIO) -> Any:
        try:
            return _Metadata(file, folder).load_checked()
        except CheckpointError as error:
            refused.append(error)
            raise

    restricted = SimpleNamespace(**{**vars(pickle), "load": load_metadata})
    with (
        temporarily(torch, load=load),
        temporarily(filesystem, pickle=restricted),
        temporarily(np.random, set_state=set_numpy_state),
        temporarily(random, setstate=set_python_state),
        checked_optimizers(place, *optimizers),
        checked_schedulers(place, *parts, most_steps=most_scheduler_steps(Path(folder))),
        checked_scalers(place),
        checked_modules(place),
        contextlib.ExitStack() as stack,
    ):
        for engine in engines:
            stack.enter_context(checked_engine(engine, folder))
        try:
            with states_of(place):
                yield
        except BaseException as error:
            # DCP raises an error of its own on all ranks, which contains the errors of the ranks.
            failures: Mapping[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
            refused += [cause for cause, _ in failures.values() if isinstance(cause, CheckpointError)]
            if refused and error is not refused[0]:
                raise refused[0] from error
            raise
    if refused:
        raise refused[0]


def check_descriptions(folder: Path, files: Collection[str]) -> None:
    """Check the files of a checkpoint that name and describe its other files. No tensor is read.

    These files are the metadata of DCP, DeepSpeed's names of folders, the lists of weights, and the configurations of
    the model. The metadata of DCP are also compared with the sizes of the files that they name. `only_data` makes all
    other checks again.

    Args:
        folder: the folder of the checkpoint.
        files: the paths of its files.

    Raises:
        ForbiddenNameError: metadata name a class or function that is not allowed.
        CheckpointError: a file is invalid.
    """
    for name in _NAME_A_FOLDER:
        named_folder(folder, name)
    _check_named_files(folder)
    for inner in sorted({Path(path).parent for path in files if path.endswith(".distcp")}):
        path = folder / inner / METADATA
        if not path.is_file():
            continue
        with open_regular(path) as file:
            found = _Metadata(file, path).load_checked()
        try:
            check_places(found, path.parent)
        except CheckpointError as error:
            raise refusal(path, error.message) from error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # hostile content may raise anything
            raise _not_data(path, "") from error


def _is_from_rank() -> bool:
    """Whether the running `torch.load` reads a tensor of an object that another rank has sent.

    Such a tensor has the old format, which `load_data` refuses. A checkpoint cannot exploit this: its pickles may not
    name the function of torch that reads such a tensor.
    """
    frame = inspect.currentframe()
    replacement = frame.f_back if frame is not None else None
    caller = replacement.f_back if replacement is not None else None
    of_storage: Any = torch.storage
    return caller is not None and caller.f_code is of_storage._load_from_bytes.__code__


class _Place:
    """The file that was read last, for messages."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)


def named_folder(folder: str | os.PathLike[str], name: str) -> str | None:
    """The folder in a checkpoint whose name is in one of DeepSpeed's files.

    Args:
        folder: the folder of the checkpoint.
        name: the name of the file: `latest` or `latest_universal`.

    Returns:
        The name of the folder; None if there is no such file. If DeepSpeed receives the name, it does not read the
        file.

    Raises:
        CheckpointError: the file names a folder that is not in the checkpoint.
    """
    path = Path(folder) / name
    if not path.is_file():
        return None
    named = read_regular(path, _MAX_NAME_BYTES).decode(errors="replace").strip()
    if named in {".", ".."} or not re.fullmatch(r"[\w.-]+", named):
        raise _not_data(path, named)
    return named


def _check_named_files(folder: str | os.PathLike[str]) -> None:
    """Refuse a checkpoint whose index names weights outside of the checkpoint, for example another model's weights.

    This function also checks the configurations of the model.

    Raises:
        CheckpointError: an index names a file outside of the checkpoint; or an index or a configuration is invalid.
    """
    for name in _CONFIGURATIONS:
        _check_configuration(Path(folder) / name)
    for path in (Path(folder) / name for name in _INDICES):
        if path.is_file():
            try:
                named: Any = read_object(path, max_bytes=MAX_MANIFEST_BYTES).get("weight_map")
                names = set(cast("dict[str, Any]", named).values())
            except (ValueError, TypeError, AttributeError) as error:
                raise _not_data(path, "") from error
            for name in names:
                _check_path(path, name)


def _check_configuration(path: Path) -> None:
    """Check a configuration of the model. Transformers reads the whole file, and shows the version in it.

    Raises:
        CheckpointError: the file is not a JSON object of at most 64 MiB, or its version cannot be printed.
    """
    if not path.is_file():
        return
    try:
        version: Any = read_object(path, max_bytes=MAX_MANIFEST_BYTES, constant=float).get(_VERSION)
    except ValueError as error:
        raise refusal(path, str(error)) from error
    if version is not None and not (isinstance(version, str) and version.isprintable()):
        raise refusal(path, f"its {_VERSION} cannot be printed")


def _check_path(where: str | os.PathLike[str], name: Any) -> None:
    """Refuse a file name that leads out of the checkpoint."""
    fault = path_fault(name) if isinstance(name, str) else "is not a string"
    if fault:
        raise refusal(where, f"it names the file {name!r}, which {fault}")


def _is_in(folder: str | os.PathLike[str], file: Any) -> bool:
    """Whether the file is in the folder, before or after links in its path are followed.

    An open file counts as inside, because its path is not known. A path that changes during the check counts as
    inside, too.
    """
    if not isinstance(file, _PATH):
        return True
    paths = (os.path.abspath(file), os.path.realpath(file), Path(file).absolute())  # the last path may contain `..`
    parents = {parent for path in paths for parent in Path(path).parents}
    try:
        return any(os.path.exists(parent) and os.path.samefile(parent, folder) for parent in parents)
    except OSError:
        return True


def _place_of(file: Any, otherwise: Any) -> Any:
    """How messages name a file: its path, or `otherwise` for an open file without a path."""
    place = file if isinstance(file, _PATH) else getattr(file, "name", None)
    return place if isinstance(place, _PATH) else otherwise


def _load(load: Callable[..., Any], file: Any, where: Any, **options: Any) -> Any:
    try:
        return restricted_load(file, load=load, also=_classes(), **options)
    except MemoryError:
        raise
    except IsADirectoryError as error:
        raise refusal(where, "it is damaged: it is a folder and not a file") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL comes from a seek to a position that a hostile file names
            raise
        raise _not_data(where, "") from error
    except ArchiveError as error:
        raise refusal(where, f"{printable(str(error))}, and torch.save writes no such file") from error
    except OldFormatError as error:
        raise refusal(
            where,
            "it is damaged, or it has the format of torch before 1.6, whose loading could run code",
            "a file of your own can be loaded with torch.load, and saved again with torch.save",
        ) from error
    except Exception as error:  # hostile content may raise anything
        name = _NAME.search(str(error))
        raise (_forbidden(where, name[1]) if name else _not_data(where, "")) from error


def _classes() -> list[Any]:
    """The classes of loaded libraries that are allowed besides torch's own classes."""
    return [
        getattr(sys.modules[module], name)
        for module, names in _DEEPSPEED.items()
        for name in names
        if module in sys.modules and hasattr(sys.modules[module], name)
    ]


def _not_data(where: str | os.PathLike[str], name: str) -> CheckpointError:
    """The error for a file that was refused.

    Args:
        where: the path of the file, or the path of the checkpoint if the file's path is not known.
        name: the function, class or folder that the file names and that is not allowed; empty if it is not known.
    """
    not_data = "it is damaged, or it contains objects of classes that Safepoint does not load"
    what = f"it names {printable(name)}" if name else not_data
    return refusal(
        where,
        f"{what}, and loading it could run code",
        "if your script saves objects of its own classes, call torch.serialization.add_safe_globals([CLASS]) in the "
        "script",
    )


def _forbidden(where: str | os.PathLike[str], name: str) -> CheckpointError:
    error = _not_data(where, name)
    return ForbiddenNameError(error.message, hint=error.hint)


class _Metadata(BoundedUnpickler):
    """Reads DCP's `.metadata`, which `torch.load` cannot read.

    Args:
        file: the open `.metadata`.
        otherwise: what errors name if `file` has no path.
    """

    def __init__(self, file: BinaryIO, otherwise: str | os.PathLike[str]) -> None:
        keys = KeyLimits(
            most_tuples=_MOST_PLACES,
            most_parts=64,
            number_bits=63,
            is_plain=_is_plain,
            parts_of=_parts_of,
            size_bytes=size_of(file),
        )
        super().__init__(file, keys=keys, has_state=_has_state)
        self._path = _place_of(file, otherwise)

    def load_checked(self) -> Any:
        """Return the metadata, after a check that all files named there are in the checkpoint.

        Raises:
            CheckpointError: the metadata name a file outside of the checkpoint, or a class or function that is not
                allowed, or list parts that do not make the tensors (`check_parts`).
        """
        try:
            loaded: Any = self.load()
            check_parts(loaded)
        except CheckpointError as error:
            raise error if error.hint else refusal(self._path, error.message) from error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # hostile content may raise anything
            raise _not_data(self._path, "") from error
        places: Any = getattr(loaded, "storage_data", None)
        for place in cast("dict[Any, Any]", places).values() if isinstance(places, dict) else ():
            _check_path(self._path, getattr(place, "relative_path", None))
            if getattr(place, "transform_descriptors", None):
                # A few compressed bytes could expand until they fill the memory.
                raise refusal(self._path, "it names compressed parts")
        return loaded

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = _IN_METADATA.get((module_name, global_name))
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            found = getattr(torch, global_name)
        if found is None:
            raise _forbidden(self._path, f"{module_name}.{global_name}")
        return found


def _parts_of(key: Any) -> tuple[Any, ...] | None:
    """Return the values that are hashed for a key of `.metadata`; None if the key is not of the type that DCP writes.

    These values are the name of a tensor, the offset at which a part of the tensor begins, and the number of the
    part.
    """
    return (key.fqn, key.offset, key.index) if type(key) is metadata.MetadataIndex else None


def _is_plain(key: Any) -> bool:
    return False


def _has_state(target: Any, state: Any) -> bool:
    """Whether a pickle of DCP may set this state on an object of this type."""
    kind = cast("Any", type(target))
    if kind is metadata.TensorProperties:  # its own method checks the state
        return type(state) is tuple
    names = {field.name for field in dataclasses.fields(kind)} if kind in _RECORDS else set[str]()
    return bool(names) and type(state) is dict and names >= set(cast("dict[Any, Any]", state))


def _path_of(*parts: str) -> str:
    """This function is called in place of `PosixPath` when `.metadata` is read.

    `.metadata` has one such path: the path of the checkpoint at the time of the save. No reader uses it.
    """
    return "/".join(parts)


_RECORDS: set[Any] = {
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    cast("Any", filesystem)._StorageInfo,
}
"""The dataclasses of `.metadata`. Only their own fields are set."""
_NAMED_IN_METADATA: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (metadata, ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
    (metadata, ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    (filesystem, ("_StorageInfo",)),
    (torch.serialization, ("_get_layout",)),
    (torch, ("Size",)),
)
_IN_METADATA: dict[tuple[str, str], Any] = {
    **{(module.__name__, name): getattr(module, name) for module, names in _NAMED_IN_METADATA for name in names},
    ("pathlib", "PosixPath"): _path_of,
    ("pathlib._local", "PosixPath"): _path_of,
}
