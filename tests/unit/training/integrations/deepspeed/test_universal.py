"""The partitions of any number of ranks, and the copy of them that every number of ranks can load."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.format.digest import digest_file
from safepoint.errors import CheckpointError, ConflictError, StorageError
from safepoint.foundation.volumes import needed
from safepoint.foundation.volumes.room import Room
from safepoint.training.integrations.deepspeed.partitions import Partitions
from safepoint.training.integrations.deepspeed.universal import OTHERS, Universal
from tests.support.zero import MOMENTS, WEIGHTS, random_states, write_zero


def whole(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What the copy in `folder` holds of the weights."""
    zero = folder / "global_step5" / "zero"
    return {
        name: {state: torch.load(zero / name / f"{state}.pt")["param"] for state in ("fp32", *MOMENTS)}
        for name in WEIGHTS
    }


def assert_equal(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name, states in theirs.items():
        for state, tensor in states.items():
            assert torch.equal(ours[name][state], tensor), (name, state)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3, 13])
@pytest.mark.parametrize("alignment", [1, 8])
def test_every_element_comes_back(stage: int, ranks: int, alignment: int, tmp_path: Path) -> None:
    """With ranks that have a part of everything, and ranks that have nothing but padding."""
    states = random_states()
    write_zero(tmp_path / "saved", states, stage=stage, ranks=ranks, alignment=alignment)
    partitions = Partitions(tmp_path / "saved", ranks=ranks)
    assert partitions.stage == (3 if stage == 3 else 2)
    assert partitions.shapes == WEIGHTS
    assert_equal({n: {s: partitions.tensor(n, s) for s in ("fp32", *MOMENTS)} for n in WEIGHTS}, states)


@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("after", [2, 3])
@pytest.mark.parametrize("count", [1, 20])
def test_shares_make_the_whole(before: int, after: int, count: int, tmp_path: Path) -> None:
    """However the shares are divided, each file is written once, and all are there."""
    states = random_states()
    write_zero(tmp_path / "saved", states, stage=before, ranks=2)
    seen: list[int] = []
    written: list[Path] = []
    for index in range(count):
        one = tmp_path / f"share-{index}"
        one.mkdir()
        universal = Universal(Partitions(tmp_path / "saved", ranks=2), one, stage=after)
        universal.write(index, count, lambda done, total: seen.append(total - done))
        written += [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
        shutil.copytree(one, tmp_path / "all", dirs_exist_ok=True)
    assert len(written) == len(set(written))
    assert_equal(whole(tmp_path / "all"), states)
    assert (tmp_path / "all" / "latest_universal").read_text() == "global_step5"
    size_bytes = sum(path.stat().st_size for path in (tmp_path / "all").rglob("*") if path.is_file())
    assert size_bytes <= Universal(Partitions(tmp_path / "saved", ranks=2), tmp_path, stage=after).needed_bytes
    assert seen[-1] == 0
    files = {path.name for path in written}
    assert ("step.pt" in files) == (after < 3)
    assert ("mp_rank_00_model_states.pt" in files) == (after < 3)


def test_what_belongs_to_all_weights(tmp_path: Path) -> None:
    """Settings of all groups and the scheduler, and no weight among them."""
    write_zero(tmp_path / "saved", random_states(), stage=3, ranks=3)
    Universal(Partitions(tmp_path / "saved", ranks=3), tmp_path / "copy", stage=3).write(0, 1)
    step = tmp_path / "copy" / "global_step5"
    common = torch.load(step / "zero" / "optimizer_state.pt")
    assert [group["weight_decay"] for group in common["param_groups"]] == [0.1, 0.05]
    assert common["optimizer_state_dict"]["state"][0]["step"] == 5
    metadata = torch.load(step / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert metadata["lr_scheduler"] == {"last_epoch": 5}
    assert metadata["global_steps"] == 5
    assert metadata["module"] == {}


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_not_trained_lies_beside_it(stage: int, tmp_path: Path) -> None:
    """Buffers are whole at every stage, weights are not."""
    frozen, buffer = torch.randn(5, 3), torch.randn(4)
    module = {"seen": buffer, "frozen.weight": torch.empty(0) if stage == 3 else frozen}
    write_zero(
        tmp_path / "saved",
        random_states(),
        stage=stage,
        ranks=4,
        module=module,
        buffers=["seen"],
        frozen={"frozen.weight": frozen} if stage == 3 else None,
    )
    Universal(Partitions(tmp_path / "saved", ranks=4), tmp_path / "copy", stage=2).write(0, 1)
    others = tmp_path / "copy" / OTHERS
    assert sorted(path.name for path in others.iterdir()) == ["frozen.weight.pt", "seen.pt"]
    assert torch.equal(torch.load(others / "seen.pt"), buffer)
    assert torch.equal(torch.load(others / "frozen.weight.pt"), frozen)


def test_the_checkpoint_is_only_read(tmp_path: Path) -> None:
    """Content and times of every file stay."""
    write_zero(tmp_path / "saved", random_states(), stage=2, ranks=3)

    def look() -> dict[Path, tuple[str, int, int]]:
        paths = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
        return {path: (str(digest_file(path)), path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in paths}

    before = look()
    Universal(Partitions(tmp_path / "saved", ranks=3), tmp_path / "copy", stage=2).write(0, 1)
    assert look() == before


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what there is and what it takes."""
    write_zero(tmp_path / "saved", random_states(), stage=2, ranks=2)
    universal = Universal(Partitions(tmp_path / "saved", ranks=2), tmp_path / "copy", stage=2)
    monkeypatch.setattr(needed, "room_of", lambda folder, **_: Room(free_bytes=1000))
    with pytest.raises(StorageError, match=r"has 1.0 kB free, and the files need .* converted copy"):
        universal.check_room()
    assert not list((tmp_path / "copy").iterdir())


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path) -> None:
    """Torch says it in its own way."""
    write_zero(tmp_path / "saved", random_states(), stage=2, ranks=2)
    universal = Universal(Partitions(tmp_path / "saved", ranks=2), tmp_path / "copy", stage=2)
    folder = tmp_path / "copy" / "global_step5" / "zero" / "scale"
    folder.mkdir(parents=True)
    (folder / "fp32.pt").symlink_to("/dev/full")
    with pytest.raises((StorageError, OSError)):
        universal.write(0, 1)


# ---- what is refused --------------------------------------------------------------------------------------------


def changed(place: Path, change: Any) -> None:
    """Change what every rank has written of the optimizer."""
    for path in place.glob("*_optim_states.pt"):
        content = torch.load(path)
        change(content["optimizer_state_dict"])
        torch.save(content, path)


def read(folder: Path, ranks: int = 2) -> Partitions:
    return Partitions(folder, ranks=ranks)


def test_a_missing_rank_is_damage(tmp_path: Path) -> None:
    """No weight is made of what is there."""
    place = write_zero(tmp_path / "saved", random_states(), stage=2, ranks=3)
    (place / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks the file of a rank"):
        read(tmp_path / "saved", 3)


def test_no_partitions_at_all(tmp_path: Path) -> None:
    """A checkpoint of DeepSpeed without ZeRO."""
    with pytest.raises(CheckpointError, match="holds no partitions"):
        read(tmp_path)


def test_ranks_that_share_something_else_are_refused(tmp_path: Path) -> None:
    """The manifest names more ranks than ZeRO has split the weights among."""
    write_zero(tmp_path / "saved", random_states(), stage=2, ranks=2)
    with pytest.raises(ConflictError, match="partitions of 2 ranks, but 4 ranks wrote it"):
        read(tmp_path / "saved", 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(partition_count=[1, 1]), "split among fewer ranks"),
        (lambda state: state.update(base_optimizer_state=[{}]), "elastic_checkpoint"),
        (
            lambda state: state["base_optimizer_state"]["state"][0].update(exp_avg=torch.ones(3)),
            "'exp_avg' does not have one value for each element",
        ),
        (
            lambda state: state["base_optimizer_state"]["state"][0].update(scale=torch.tensor(1.0)),
            "'scale' does not have one value for each element",
        ),
        (
            lambda state: state["base_optimizer_state"]["state"][1].pop("exp_avg"),
            "'exp_avg' does not have one value for each element",
        ),
    ],
)
def test_what_cannot_be_cut_anew_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    """With the reason."""
    changed(write_zero(tmp_path / "saved", random_states(), stage=2, ranks=2), change)
    with pytest.raises(ConflictError, match=words):
        read(tmp_path / "saved")


def test_ranks_that_are_not_at_one_step_are_refused(tmp_path: Path) -> None:
    """Whose steps would it be?"""
    place = write_zero(tmp_path / "saved", random_states(), stage=2, ranks=2)
    path = place / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1
    torch.save(content, path)
    with pytest.raises(ConflictError, match="different numbers of steps on different ranks"):
        read(tmp_path / "saved")


def test_fewer_elements_than_weights_are_damage(tmp_path: Path) -> None:
    """Nothing is made up."""
    place = write_zero(tmp_path / "saved", random_states(), stage=2, ranks=2)

    def shorten(state: Any) -> None:
        state["single_partition_of_fp32_groups"] = [one[:3] for one in state["single_partition_of_fp32_groups"]]

    changed(place, shorten)
    with pytest.raises((CheckpointError, ConflictError)):
        read(tmp_path / "saved")


@pytest.mark.parametrize("name", ["../outside", "a/b", ".hidden"])
def test_a_weight_names_no_folder(name: str, tmp_path: Path) -> None:
    """A name becomes a folder's name."""
    place = write_zero(tmp_path / "saved", random_states(), stage=2, ranks=1)
    path = place / "mp_rank_00_model_states.pt"
    content = torch.load(path)
    content["param_shapes"][1] = {name if old == "scale" else old: s for old, s in content["param_shapes"][1].items()}
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="cannot be used as the name of a file"):
        read(tmp_path / "saved", 1)


@pytest.mark.parametrize("moments", [("exp_avg",), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ()])
def test_stage_3_loads_adam_only(moments: tuple[str, ...], tmp_path: Path) -> None:
    """Below it, all moments are loaded."""
    write_zero(tmp_path / "saved", random_states(moments), stage=2, ranks=2)
    with pytest.raises(ConflictError, match="only the moments of Adam"):
        Universal(read(tmp_path / "saved"), tmp_path / "copy", stage=3)
    Universal(read(tmp_path / "saved"), tmp_path / "copy", stage=1).write(0, 1)
    zero = tmp_path / "copy" / "global_step5" / "zero"
    assert sorted(path.stem for path in (zero / "scale").iterdir()) == sorted(["fp32", "step", *moments])


def test_stage_3_loads_one_number_of_steps(tmp_path: Path) -> None:
    """Groups that have taken different numbers of steps go on below it only."""
    write_zero(tmp_path / "saved", random_states(), stage=2, ranks=2, steps=(5, 4))
    with pytest.raises(ConflictError, match="different numbers of steps"):
        Universal(read(tmp_path / "saved"), tmp_path / "copy", stage=3)
    Universal(read(tmp_path / "saved"), tmp_path / "copy", stage=2).write(0, 1)
    zero = tmp_path / "copy" / "global_step5" / "zero"
    steps = {name: float(torch.load(zero / name / "step.pt")) for name in ("embed.weight", "layer.bias")}
    assert steps == {"embed.weight": 5, "layer.bias": 4}


def test_two_threads_leave_torchs_checksums_on(tmp_path: Path) -> None:
    """The second begins while the first writes."""
    write_zero(tmp_path / "saved", random_states(), stage=2, ranks=2)
    begun = [threading.Event(), threading.Event()]

    def write(index: int, wait: Callable[[], object]) -> None:
        def watch(*_: object) -> None:
            begun[index].set()
            wait()

        folder = tmp_path / f"share-{index}"
        folder.mkdir()
        Universal(Partitions(tmp_path / "saved", ranks=2), folder, stage=2).write(0, 1, watch)

    first = threading.Thread(target=write, args=(0, lambda: begun[1].wait(0.1)))
    first.start()
    begun[0].wait()
    write(1, first.join)
    assert torch.serialization.get_crc32_options()
