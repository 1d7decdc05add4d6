"""What is deleted with a job's checkpoints, and what is not."""

import os
import shutil
from pathlib import Path

import pytest

from safepoint.errors import ConflictError, UsageError
from safepoint.foundation.shared_folders.leases import reading
from safepoint.jobs.local.outputs import remove_checkpoints
from safepoint.settings.run_settings import place_output
from tests.support.checkpoints import commit, prepared
from tests.support.job_values import job_spec
from tests.support.moto_server import MotoServer


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def trained(folder: Path, *steps: int) -> Path:
    output = prepared(folder)
    for step in steps:
        commit(output, step)
    return folder


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def test_checkpoints_go_and_everything_else_stays(tmp_path: Path) -> None:
    """Those of another tool, the script's own model, notes, and what lies beside the folder."""
    output = trained(tmp_path / "out", 10, 20)
    (output / "checkpoint-30").mkdir()
    (output / "checkpoint-30" / "model.bin").write_bytes(b"of another tool")
    (output / "final").mkdir()
    (output / "final" / "model.bin").write_bytes(b"the script's own")
    (output / "notes.txt").write_text("mine")
    other = trained(tmp_path / "other", 10)
    assert remove_checkpoints(str(output), job_spec(output_dir=str(output))) == 2
    assert visible(output) == ["checkpoint-30", "final", "notes.txt"]
    assert (output / "checkpoint-30" / "model.bin").read_bytes() == b"of another tool"
    assert visible(other) == ["checkpoint-10"]


def test_a_folder_with_the_name_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """Nothing in it and nothing beside it is deleted."""
    beside = trained(tmp_path, 10)
    output = trained(tmp_path / "renamed", 1, 2).rename(tmp_path / "checkpoint-5")
    with pytest.raises(UsageError, match="has the name of a checkpoint"):
        remove_checkpoints(str(output), job_spec(output_dir=str(output)))
    assert visible(output) == ["checkpoint-1", "checkpoint-2"]
    assert "checkpoint-10" in visible(beside)


def test_one_that_is_read_stays_and_is_named(tmp_path: Path) -> None:
    """The others are gone."""
    output = trained(tmp_path / "out", 10, 20)
    with reading(output / "checkpoint-10" / "safepoint-manifest.json"):
        with pytest.raises(ConflictError, match=r"checkpoint-10 in .* is being read"):
            remove_checkpoints(str(output), job_spec())
    assert visible(output) == ["checkpoint-10"]


def test_a_folder_that_was_never_made_holds_nothing(tmp_path: Path) -> None:
    """The job may have been deleted before it began."""
    assert remove_checkpoints(str(tmp_path / "never"), job_spec()) == 0
    assert not (tmp_path / "never").exists()


def test_a_store_and_the_folder_in_front_of_it(
    tmp_path: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both: the next run there would take what one of them still has. The job's own variables say which store."""
    committed = trained(tmp_path / "made", 10, 20)
    for prefix in ("gone", "stays"):
        store = moto.store(prefix)
        for path in sorted(committed.glob("checkpoint-*/**/*")):
            if path.is_file():
                store.write(path.relative_to(committed).as_posix(), path.read_bytes())
    location = str(moto.location("gone"))
    front = place_output(location, local_dir=None).folder
    front.parent.mkdir(parents=True)
    shutil.copytree(committed, front)
    for name, value in moto.variables.items():
        monkeypatch.setenv(name, value)
    spec = job_spec(output_dir=location)
    assert remove_checkpoints(location, spec) == 2
    assert not list(moto.store("gone").list()) or all("checkpoint-" not in o.key for o in moto.store("gone").list())
    assert visible(front) == []
    assert any(item.key.startswith("checkpoint-20/") for item in moto.store("stays").list())
    shutil.copytree(committed, tmp_path / "local")
    spec = job_spec(output_dir=location, settings={"local_dir": "local"}, working_dir=str(tmp_path))
    assert remove_checkpoints(location, spec) == 2
    assert visible(tmp_path / "local") == []
