"""A best checkpoint that was changed on the disk: its model is not loaded, and the run does not end with 0."""

from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from safepoint.errors import CheckpointError, ExitCode
from safepoint.training.start.copies import verify_best
from tests.support.checkpoints import commit, prepared
from tests.support.jobs import committed_steps, no_orphans, safepoint

_PROGRAM = Path(__file__).parent.parent / "programs" / "best.py"


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("change", ["nothing", "bit", "manifest", "folder"])
def test_a_best_checkpoint_that_was_changed(change: str, tmp_path: Path) -> None:
    """On two ranks; one that was deleted is not loaded, with the Trainer's own warning."""
    output = tmp_path / "run"
    ranks = ("--nproc-per-node", "2" if change == "bit" else "1")
    job = safepoint(output, *ranks, program=[str(_PROGRAM), "--out", str(output), "--change", change])
    with no_orphans(job):
        code = job.wait()
    if change in {"nothing", "folder"}:
        assert code == ExitCode.OK, job.text
        assert (output / "final" / "model.safetensors").exists()
        return
    assert code == ExitCode.NOTHING_VALID, job.text
    assert "the best checkpoint" in job.text
    assert "its model was not loaded" in job.text
    assert not (output / "final" / "model.safetensors").exists()
    assert 2 in committed_steps(output)


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


CHANGES = {
    "one bit": flip,
    "no manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
    "another file": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"),
    "a file less": lambda folder: (folder / "model.safetensors").unlink(),
    "a link": lambda folder: folder.rename(folder.parent / "real") and folder.symlink_to("real"),
    "a file": lambda folder: (folder.rename(folder.parent / "real"), folder.write_bytes(b"x")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_valid_is_refused(name: str, tmp_path: Path) -> None:
    folder = commit(prepared(tmp_path), 4)
    verify_best(folder)
    CHANGES[name](folder)
    with pytest.raises(CheckpointError, match="its model was not loaded"):
        verify_best(folder)


def test_what_is_gone_is_left_to_the_framework(tmp_path: Path) -> None:
    verify_best(tmp_path / "checkpoint-4")


def test_the_checkpoint_that_lightning_tests(tmp_path: Path) -> None:
    """`Trainer.test` asks for the path, and loads it."""
    pytest.importorskip("lightning")
    from safepoint.lightning import SafepointCallback

    callback = SafepointCallback()
    assert callback.best_model_path == ""
    folder = commit(prepared(tmp_path), 4)
    callback._root, callback._steps = tmp_path, 4
    assert callback.best_model_path == "", "it is of another run"
    callback._run_id = Manifest.from_bytes((folder / MANIFEST_NAME).read_bytes()).run_id
    assert callback.best_model_path.startswith(str(folder))
    flip(folder)
    with pytest.raises(CheckpointError, match="its model was not loaded"):
        assert callback.best_model_path
