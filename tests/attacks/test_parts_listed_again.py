"""Metadata of DCP that list a part of a tensor many times, or not at all.

DCP reads a part as often as the metadata list it: some megabytes of metadata can keep a start busy for days. If a
part is missing, or outside of the tensor, DCP leaves the tensor as it is, and the training would continue with
initial weights.
"""

import copy
import dataclasses
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from safepoint.checkpoint.foreign.contents import check_dcp
from safepoint.checkpoint.foreign.names import AllowedNames
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.weights.budget import Budget
from safepoint.checkpoint.weights.dcp_weights import dcp_weights
from safepoint.checkpoint.weights.parts import make_whole
from safepoint.errors import CheckpointError, ExitCode
from safepoint.storage.browsing import ReadablePath, browse
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.training.state.data_only import only_data
from tests.support.checkpoints import reseal
from tests.support.jobs import committed_steps, no_orphans, safepoint

_PROGRAMS = Path(__file__).parent.parent / "programs"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def _again(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks *= 40


def _at_one_place(of: TensorStorageMetadata, found: Any) -> None:
    place = next(iter(found.storage_data.values()))
    of.chunks = [ChunkStorageMetadata(torch.Size([one]), torch.Size([1])) for one in range(64)]
    for one in range(64):
        found.storage_data[MetadataIndex("weight", torch.Size([one]))] = place


def _none(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks = []


def _a_piece(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks[0].sizes = torch.Size([63])


def _of_another_kind(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks[0].sizes = ([0] * 8, 8)  # pyright: ignore[reportAttributeAccessIssue]


def _below_zero(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([-64])), *of.chunks, *of.chunks]


def _in_two(of: TensorStorageMetadata, found: Any, *boxes: tuple[int, int]) -> None:
    """Two parts of the tensor, each in an archive of its own: the second archive is that of another tensor."""
    other = found.storage_data.pop(MetadataIndex("other", torch.Size([0])))
    del found.state_dict_metadata["other"]
    of.chunks = [ChunkStorageMetadata(torch.Size([begin]), torch.Size([size])) for begin, size in boxes]
    found.storage_data[MetadataIndex("weight", torch.Size([boxes[1][0]]))] = other


def _that_overlap(of: TensorStorageMetadata, found: Any) -> None:
    """The last 16 elements are missing, and 16 others are listed twice."""
    _in_two(of, found, (0, 32), (16, 32))


def _outside(of: TensorStorageMetadata, found: Any) -> None:
    _in_two(of, found, (0, 32), (100, 32))


def _with_a_gap(of: TensorStorageMetadata, found: Any) -> None:
    _in_two(of, found, (0, 48), (56, 16))


def _whole(of: TensorStorageMetadata, found: Any) -> None:
    _in_two(of, found, (0, 40), (40, 24))


def _load(folder: Path) -> torch.Tensor:
    state = {"weight": torch.zeros(64)}
    with only_data(folder):
        load(state, checkpoint_id=str(folder))
    return state["weight"]


def _changed(folder: Path, change: Callable[[TensorStorageMetadata, Any], None]) -> None:
    path = folder / ".metadata"
    found = copy.deepcopy(pickle.loads(path.read_bytes()))
    change(found.state_dict_metadata["weight"], found)
    path.write_bytes(pickle.dumps(found))


_CHANGES = [
    _again,
    _at_one_place,
    _none,
    _a_piece,
    _of_another_kind,
    _below_zero,
    _that_overlap,
    _outside,
    _with_a_gap,
]


@pytest.mark.parametrize("change", _CHANGES)
def test_it_is_refused(change: Callable[[TensorStorageMetadata, Any], None], tmp_path: Path) -> None:
    """By a resume, by `export` and by `adopt`."""
    save({"weight": torch.ones(64), "other": torch.ones(64)}, checkpoint_id=tmp_path)
    assert _load(tmp_path).sum() == 64
    _changed(tmp_path, change)
    with pytest.raises(CheckpointError, match="was not loaded"):
        _load(tmp_path)
    for read in (dcp_weights, _examined):
        with pytest.raises(CheckpointError):
            read(browse(open_store(parse_location(str(tmp_path)))))


def test_parts_that_make_the_whole_tensor(tmp_path: Path) -> None:
    save({"weight": torch.ones(64), "other": torch.ones(64)}, checkpoint_id=tmp_path)
    _changed(tmp_path, _whole)
    assert _load(tmp_path).sum() == 64
    _examined(browse(open_store(parse_location(str(tmp_path)))))


def _examined(folder: ReadablePath) -> None:
    check_dcp(folder, AllowedNames(), Budget(1 << 20))


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_resume_does_not_use_it(tmp_path: Path, *, is_alone: bool) -> None:
    """The first half of a sharded weight is listed twice, and the second half is not listed. The run resumes from the
    checkpoint before, if there is one."""
    output = tmp_path / "run"
    program = [str(_PROGRAMS / "shards.py"), "--kind", "fsdp", "--step-ms", "0", "--out", str(output)]
    saves = ("--nproc-per-node", "1", "--save-strategy", "steps", "--save-steps", "2")
    job = safepoint(output, *saves, program=program)
    with no_orphans(job):
        assert job.wait(200) == ExitCode.OK, job.text
    steps = committed_steps(output)
    kept = steps[:1] if is_alone else steps[:2]
    for step in set(steps) - set(kept):
        shutil.rmtree(output / f"checkpoint-{step}")
    folder = output / f"checkpoint-{kept[-1]}"
    _list_the_first_half_twice(folder / "sharded")
    reseal(folder)
    assert verify(folder).is_valid
    job = safepoint(output, *saves, program=program)
    with no_orphans(job):
        assert job.wait(200) == (ExitCode.NOTHING_VALID if is_alone else ExitCode.OK), job.text
    assert "do not make the whole tensor" in job.text
    assert is_alone or f"checkpoint-{kept[0]}" in job.text
    assert job.text.count(f"{folder.name}") > 0


def _list_the_first_half_twice(folder: Path) -> None:
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    tensors = [(key, one) for key, one in found.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)]
    key, of = next((key, one) for key, one in tensors if key.startswith("model.") and len(one.size) == 2)
    rows, columns = of.size
    begin = torch.Size([0, 0])
    index, place = next((one, place) for one, place in found.storage_data.items() if one.fqn == key)
    file = folder / place.relative_path
    content = file.read_bytes()
    file.write_bytes(content + content[place.offset : place.offset + place.length])
    half = rows // 2
    sizes = (torch.Size([half, columns]), torch.Size([rows - half, columns]))
    of.chunks = [ChunkStorageMetadata(begin, sizes[1]), ChunkStorageMetadata(torch.Size([half // 2, 0]), sizes[0])]
    copied = copy.copy(place)
    copied.offset = len(content)
    found.storage_data[dataclasses.replace(index, offset=torch.Size([half // 2, 0]), index=None)] = copied
    path.write_bytes(pickle.dumps(found))


def test_very_many_parts(tmp_path: Path) -> None:
    """The time grows with the number of parts, and not with its square: 200,000 parts that overlap nearly all others
    take less than a minute."""
    count = 200_000
    began_s = time.monotonic()
    assert not make_whole([count, 2 * count], (([one, 0], [1, one + 1]) for one in range(count)))
    assert make_whole([count, 3], (([one, 0], [1, 3]) for one in range(count)))
    assert time.monotonic() - began_s < 60


def test_empty_tensors_and_single_numbers(tmp_path: Path) -> None:
    saved = {"empty": torch.ones(0, 3), "one": torch.tensor(2.0), "text": "a"}
    save(saved, checkpoint_id=str(tmp_path))
    state = {"empty": torch.zeros(0, 3), "one": torch.tensor(0.0), "text": ""}
    with only_data(tmp_path):
        load(state, checkpoint_id=str(tmp_path))
    assert (state["one"], state["text"]) == (2.0, "a")
