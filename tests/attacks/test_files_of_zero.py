"""Files of ZeRO that another person has written, which a start with another number of ranks converts.

The converted copy must not fill a disk of others, and the start must not end with an error that names no file.
"""

import contextlib
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from safepoint.errors import CheckpointError, StorageError
from safepoint.foundation.volumes import needed
from safepoint.foundation.volumes.room import Room
from safepoint.training.integrations.deepspeed.partitions import Partitions
from safepoint.training.integrations.deepspeed.universal import Universal
from safepoint.training.integrations.transformers.sharding import repartition
from safepoint.training.integrations.transformers.sharding.repartition import Repartition
from tests.support.checkpoints import commit, prepared
from tests.support.zero import random_states, write_zero


def _change(place: Path, pattern: str, change: Callable[[Any], object]) -> None:
    path = next(place.glob(pattern))
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_many_weights_without_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs a folder and some files, and so their inodes."""
    place = write_zero(tmp_path / "saved", random_states(), stage=2, ranks=1)
    empty = {f"w{number}": torch.Size([0]) for number in range(2000)}
    _change(place, "mp_rank*", lambda content: content["param_shapes"].insert(0, empty))
    zeros = torch.zeros(0)

    def add_group(content: Any) -> None:
        state = content["optimizer_state_dict"]
        state["single_partition_of_fp32_groups"].insert(0, zeros)
        state["param_alignment_paddings"].insert(0, [0] * len(empty))
        groups: dict[int, Any] = state["base_optimizer_state"]["state"]
        groups[2], groups[1] = groups[1], groups[0]
        groups[0] = {**groups[1], "exp_avg": zeros, "exp_avg_sq": zeros}

    _change(place, "zero_pp*", add_group)
    universal = Universal(Partitions(tmp_path / "saved", ranks=1), tmp_path / "copy", stage=2)
    status = os.statvfs(tmp_path)
    monkeypatch.setattr(
        os, "statvfs", lambda folder: os.statvfs_result((*status[:5], 90_000, 9000, 9000, *status[8:]))
    )
    with pytest.raises(StorageError, match=r"9000 free inodes, and the files need 1\d{4}"):
        universal.check_room()
    assert list((tmp_path / "copy").iterdir()) == []


@pytest.mark.parametrize("shape", [(-(10**15),), (-3, -1), 5, None, ("a",), (1 << 63,)])
@pytest.mark.parametrize("place", ["frozen", "trained"])
def test_sizes_that_are_none(place: str, shape: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a negative one, the sizes of all files would add up to nothing."""
    frozen = {"frozen.weight": torch.ones(3)}
    stage = 3 if place == "frozen" else 2
    written = write_zero(
        tmp_path / "saved", random_states(), stage=stage, ranks=1, frozen=frozen if stage == 3 else None
    )

    def change(content: Any) -> None:
        of = content["frozen_param_shapes"] if place == "frozen" else content["param_shapes"][0]
        of["frozen.weight" if place == "frozen" else "embed.weight"] = shape

    _change(written, "*model_states*", change)
    monkeypatch.setattr(needed, "room_of", lambda folder, **_: Room(free_bytes=1))
    with pytest.raises((CheckpointError, TypeError)):
        Universal(Partitions(tmp_path / "saved", ranks=1), tmp_path / "copy", stage=2).check_room()


def _base(content: Any) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]


_MODEL, _OPTIMIZER = "*model_states*", "*optim_states*"


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        (_MODEL, lambda content: content.pop("dp_world_size")),
        (_MODEL, lambda content: content.update(dp_world_size="x")),
        (_MODEL, lambda content: content.pop("param_shapes")),
        (_MODEL, lambda content: content.update(param_shapes=5)),
        (_MODEL, lambda content: content["param_shapes"][0].update({"embed.weight": None})),
        (_OPTIMIZER, lambda content: content.update(optimizer_state_dict=5)),
        (_OPTIMIZER, lambda content: content["optimizer_state_dict"].pop("partition_count")),
        (
            _OPTIMIZER,
            lambda content: content["optimizer_state_dict"].update(single_partition_of_fp32_groups=["a", "b"]),
        ),
        (_OPTIMIZER, lambda content: content["optimizer_state_dict"].update(single_partition_of_fp32_groups=[])),
        (_OPTIMIZER, lambda content: _base(content).update(state=5)),
        (_OPTIMIZER, lambda content: _base(content).update(param_groups=5)),
        (_OPTIMIZER, lambda content: _base(content)["state"][0].update(step="x")),
    ],
)
def test_values_of_other_kinds(
    pattern: str, change: Callable[[Any], object], tmp_path: Path, monkeypatch: Any
) -> None:
    """The error names the checkpoint; as any other invalid state, it ends the run with exit code 14."""
    saved = tmp_path / "checkpoint-5"
    _change(write_zero(saved, random_states(), stage=2, ranks=1), pattern, change)
    monkeypatch.setattr(repartition, "zero_stage_of", lambda accelerator: 2)
    monkeypatch.setattr(repartition, "on_all_ranks", lambda peers, work: [work()])
    monkeypatch.setattr(repartition, "long_on_all_ranks", lambda peers, work: [work()])
    one: Any = object.__new__(Repartition)
    one._context = SimpleNamespace(place=SimpleNamespace(rank=0, is_first=True))
    one._trainer, one._output = SimpleNamespace(accelerator=None), SimpleNamespace(work=tmp_path)
    one._folders, one._peers, one._copying = SimpleNamespace(is_owner=True), None, [0]
    with pytest.raises(CheckpointError, match="checkpoint-5"):
        one._make(saved, SimpleNamespace(step=5, world_size=1), "training was not started")


def _manifest_of_best(folder: Path) -> Any:
    """The manifest that `Repartition` reads of a checkpoint that is loaded at the end, or None."""
    found: list[Any] = []
    one: Any = object.__new__(Repartition)
    one._copy = None
    one._context = SimpleNamespace(place=SimpleNamespace(is_first=True))
    one._peers = SimpleNamespace(from_first=found.append)
    one.close = lambda: None
    one._copy_later(folder)
    return found[0]


def test_the_manifest_of_the_best_checkpoint_is_a_pipe(tmp_path: Path) -> None:
    """The first rank does not wait for a writer. What comes out of the pipe is no manifest."""
    good = commit(prepared(tmp_path / "out"), 4)
    assert _manifest_of_best(good) is not None
    pipe = tmp_path / "checkpoint-5" / MANIFEST_NAME
    pipe.parent.mkdir()
    os.mkfifo(pipe)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.write_bytes((good / MANIFEST_NAME).read_bytes())

    writer = threading.Thread(target=write)
    writer.start()
    assert _manifest_of_best(pipe.parent) is None
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # a writer that has not written yet may end
    writer.join()
    os.close(reader)


def test_the_manifest_of_the_best_checkpoint_is_a_hole(tmp_path: Path) -> None:
    """No more of it is read than a manifest may have. A sparse file can state any size."""
    hole = tmp_path / "checkpoint-5" / MANIFEST_NAME
    hole.parent.mkdir()
    hole.touch()
    os.truncate(hole, 4 * MAX_MANIFEST_BYTES)
    tracemalloc.start()
    try:
        assert _manifest_of_best(hole.parent) is None
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * MAX_MANIFEST_BYTES
