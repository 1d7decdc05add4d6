"""Writes DeepSpeed's universal layout: each whole weight, and each of its whole moments, in a file of its own.

DeepSpeed has a tool that writes this layout, too. The tool writes every byte twice. If the tool converts a checkpoint
of stage 3, other stages cannot load the result. This module writes every byte once, for the stage that will load the
files, and several processes can share the work. The layout includes no buffers and no frozen weights. The module
writes these beside the layout.
"""

import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from safepoint.errors import ConflictError, StorageError
from safepoint.foundation import files
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.units import ByteCounter
from safepoint.foundation.volumes.needed import shortage
from safepoint.training.integrations.deepspeed.partitions import WEIGHT, Partitions

OTHERS = "others"
"""The folder for buffers and frozen weights, which DeepSpeed's universal layout does not include."""
_MODEL_FILE = {True: "zero_pp_rank_0_mp_rank_00_model_states.pt", False: "mp_rank_00_model_states.pt"}
_IN_STAGE_3 = {"exp_avg", "exp_avg_sq"}
_FILE_BYTES = 4096
"""An upper bound of the bytes that a file needs in addition to its tensor."""
_HINT = "use the same number of ranks and the same stage as before, or start from the beginning with --from-scratch"


class Universal:
    """Writes the universal layout of a checkpoint.

    Args:
        partitions: the partitions in the checkpoint.
        folder: the folder to write into.
        stage: the stage of ZeRO that will load the layout.

    Raises:
        ConflictError: that stage cannot load the optimizer's state.
    """

    def __init__(self, partitions: Partitions, folder: Path, *, stage: int) -> None:
        self._partitions = partitions
        self._folder = folder
        self._stage = stage
        self._root = folder / partitions.name
        if stage == 3:
            self._check_stage_3()
        self._weights = {name: partitions.size_bytes(name) for name in partitions.shapes}
        self._others = list(partitions.others())

    @property
    def size_bytes(self) -> int:
        """The size of all tensors that are written."""
        return sum(self._weights.values()) + sum(size for _, size, _ in self._others)

    @property
    def needed_bytes(self) -> int:
        """An upper bound of the size of all files."""
        return sum(size_bytes for _, size_bytes in self._files())

    def _files(self) -> Iterator[tuple[str, int]]:
        """The path of each file, and a size. The sum of these sizes is an upper bound of the size of all files."""
        for name, size_bytes in self._weights.items():
            yield f"zero/{name}/{WEIGHT}.pt", size_bytes + _FILE_BYTES
            yield from ((f"zero/{name}/{state}.pt", _FILE_BYTES) for state in (*self._partitions.moments, "step"))
        yield from ((f"{OTHERS}/{name}.pt", size_bytes + _FILE_BYTES) for name, size_bytes, _ in self._others)
        yield from ((f"common-{number}", _FILE_BYTES) for number in range(3))

    def check_room(self) -> None:
        """Check that the disk has enough space and inodes. No file is written.

        Raises:
            StorageError: there is too little space, or there are too few inodes.
        """
        no_links.make_folders(self._folder)
        why = shortage(self._folder, self._files())
        if why:
            raise StorageError(
                f"{why}; these files are the converted copy of the checkpoint, which this run has to load",
                hint="free some space, or use the same number of ranks and the same stage of ZeRO as before",
            )

    def write(self, index: int, count: int, watch: Callable[[int, int], None] | None = None) -> None:
        """Write one share of the files.

        Args:
            index: the number of this share, from 0.
            count: the number of shares; other processes write the other shares.
            watch: called with the number of bytes of this share that were written, and the size of this share.

        Raises:
            StorageError: a file cannot be written.
        """
        mine = _share({**self._weights, **{f"{OTHERS}/{name}": size for name, size, _ in self._others}}, index, count)
        counter = ByteCounter(watch, sum(mine.values()))
        with _without_checksums():
            for name, size in self._weights.items():
                if name in mine:
                    self._write_weight(name)
                    counter.add(size)
            for name, size, read in self._others:
                if f"{OTHERS}/{name}" in mine:
                    _save(read(), self._folder / OTHERS / f"{name}.pt")
                    counter.add(size)
            if index == 0:
                self._write_common()

    def _write_weight(self, name: str) -> None:
        partitions, folder = self._partitions, self._root / "zero" / name
        for state in (WEIGHT, *partitions.moments):
            _save({"param": partitions.tensor(name, state), "cat_dim": 0}, folder / f"{state}.pt")
        step = partitions.step(name)
        if step is not None and self._stage != 3:
            _save(step, folder / "step.pt")

    def _write_common(self) -> None:
        partitions = self._partitions
        groups = partitions.param_groups
        common = {**partitions.common(), "param_groups": groups}
        if self._stage == 3:
            common["optimizer_state_dict"] = {"state": {0: {"step": partitions.steps()[0]}}, "param_groups": groups}
        _save(common, self._root / "zero" / "optimizer_state.pt")
        _save({**partitions.metadata(), "module": {}}, self._root / _MODEL_FILE[self._stage == 3])
        files.write_atomic(self._folder / "latest_universal", partitions.name.encode(), durable=False)

    def _check_stage_3(self) -> None:
        """Refuse what DeepSpeed cannot load in stage 3: moments other than Adam's, and unequal step counts."""
        kept = set(self._partitions.moments)
        if kept != _IN_STAGE_3:
            raise ConflictError(
                f"the optimizer keeps {', '.join(sorted(kept)) or 'nothing'} for each weight. When the "
                "number of ranks or the stage has changed, stage 3 of DeepSpeed loads only the moments of Adam",
                hint=_HINT,
            )
        steps = self._partitions.steps()
        if any(step is None or float(step) != float(steps[0]) for step in steps):
            raise ConflictError(
                "the optimizer's groups have taken different numbers of steps. When the number of ranks or the stage "
                "has changed, stage 3 of DeepSpeed loads only one number for all groups",
                hint=_HINT,
            )


def _share(sizes: dict[str, int], index: int, count: int) -> dict[str, int]:
    """The files of share `index`, with their sizes.

    The files are assigned in the order of their sizes, the largest first. Each file is assigned to the share that is
    the smallest so far.
    """
    loads = [0] * count
    mine: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name] + _FILE_BYTES
        if least == index:
            mine[name] = sizes[name]
    return mine


@contextmanager
def _without_checksums() -> Generator[None]:
    """While the block runs, `torch.save` leaves out the checksums.

    To compute the checksums takes as long as to write the files, and no reader checks them. In some releases of torch
    the option belongs to the whole process, so only one thread at a time may change it.
    """
    with _CHECKSUMS_LOCK:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


_CHECKSUMS_LOCK = threading.Lock()


def _save(value: Any, path: Path) -> None:
    no_links.make_folders(path.parent)
    try:
        with os.fdopen(no_links.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            torch.save(value, file)
    except (OSError, RuntimeError) as error:  # torch also raises a RuntimeError when the disk is full
        raise StorageError(f"{path} cannot be written: {error}") from error
