"""`safepoint checkpoints …`: what it prints, what it changes, and how it ends."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.final_model import final_folder
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools.inventory import Item, Kind
from safepoint.cli.checkpoint_answers import check_removed, nothing_to_adopt, nothing_to_verify
from safepoint.cli.commands.checkpoints import app
from safepoint.errors import CheckpointError, SafepointError, StorageError
from tests.support.checkpoints import commit, prepared
from tests.support.stores import flip


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = prepared(tmp_path / "out")
    for step in (10, 20, 30):
        commit(folder, step)
    return folder.root


def call(*arguments: object) -> tuple[int, str]:
    """Exit code and stdout; errors of Safepoint as the console script turns them into codes."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, SafepointError):
        return int(result.exception.exit_code), result.stdout or str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def document(*arguments: object) -> Any:
    code, text = call(*arguments, "--json")
    assert code == 0, text
    return json.loads(text)


def test_list_and_show(output: Path, tmp_path: Path) -> None:
    """One line each, newest first; every field of the manifest."""
    (output / "checkpoint-30" / MANIFEST_NAME).unlink()
    code, text = call("list", output)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == [
        *("CHECKPOINT", "checkpoint-30", "checkpoint-20", "checkpoint-10"),
    ]
    assert "foreign" in text.splitlines()[1]
    states = [(entry["step"], entry["state"]) for entry in document("list", output, "--deep")]
    assert states == [(None, "foreign"), (20, "verified"), (10, "verified")]
    assert "samples_seen: 160" in call("show", output)[1]
    shown = document("show", output / "checkpoint-10")
    assert shown["manifest"]["step"] == 10
    (tmp_path / "empty").mkdir()
    assert call("list", tmp_path / "empty") == (0, f"no checkpoints in {tmp_path / 'empty'}\n")
    assert document("list", tmp_path / "empty") == []
    assert call("list", tmp_path / "nowhere")[0] == 10
    assert call("show", output / "checkpoint-7")[0] == 10
    assert call("list", "ftp://host/x")[0] == 2


def test_verify_explains_and_ends_with_14(output: Path) -> None:
    """A flipped bit is found with --deep only, a missing file without."""
    flip(output / "checkpoint-20" / "model.safetensors")
    code, text = call("verify", output)
    assert code == 0
    assert text.count("complete; contents were not read (--deep reads them)") == 3
    code, text = call("verify", output, "--deep")
    assert code == 14
    assert "contents were not read" not in text
    assert "model.safetensors: its content changed" in text
    assert call("verify", output / "checkpoint-10", "--deep")[0] == 0
    (output / "checkpoint-10" / "rng_state_0.pth").unlink()
    code, text = call("verify", output / "checkpoint-10", "--json")
    assert code == 14
    assert json.loads(text)[0]["version"] == 1
    assert json.loads(text)[0]["faults"] == [{"file": "rng_state_0.pth", "reason": "it is missing"}]


def test_verify_says_what_is_left(output: Path) -> None:
    """A hint about all checkpoints needs a check of all. A final model is not a checkpoint to resume from."""

    def hint_of(location: Path) -> str:
        error = CliRunner().invoke(app, ["verify", str(location)]).exception
        assert isinstance(error, CheckpointError)
        return str(error.hint)

    (output / "checkpoint-30" / "rng_state_0.pth").unlink()
    assert "other checkpoints were not checked" in hint_of(output / "checkpoint-30")
    assert "a resume uses the newest valid checkpoint" in hint_of(output)
    shutil.copytree(output / "checkpoint-20", final_folder(OutputFolder(output)))
    assert "final: complete; contents were not read (--deep reads them)" in call("verify", output)[1]
    for step in (10, 20):
        (output / f"checkpoint-{step}" / "rng_state_0.pth").unlink()
    assert "no valid checkpoint is left" in hint_of(output)


def test_prune_does_what_it_said(output: Path) -> None:
    """The dry run names the same and deletes nothing."""
    looked = document("prune", output, "--keep", "newest=1,every=20", "--dry-run")
    assert looked["deleted"] == [str(output / "checkpoint-10")]
    assert len(list_checkpoints(output)) == 3
    done = document("prune", output, "--keep", "newest=1,every=20")
    assert done == {**looked, "dry_run": False}
    assert [path.name for path in list_checkpoints(output)] == ["checkpoint-30", "checkpoint-20"]
    for policy in ("newest=0", "younger=2h", "everything"):
        assert call("prune", output, "--keep", policy)[0] == 2
    assert call("prune", output / "checkpoint-10", "--keep", "newest=1")[0] == 2


def test_copy_export_and_diff(output: Path, tmp_path: Path) -> None:
    """All of a location or one; the model alone; what changed."""
    assert [entry["copied"] for entry in document("copy", output, tmp_path / "copy")] == [True, True, True]
    assert [entry["copied"] for entry in document("copy", output / "checkpoint-20", tmp_path / "copy")] == [False]
    assert all(verify(path).is_valid for path in list_checkpoints(tmp_path / "copy"))
    assert "model.safetensors" in document("export", output, tmp_path / "model")["files"]
    assert (tmp_path / "model" / "model.safetensors").is_file()
    difference = document("diff", output / "checkpoint-10", output)
    assert {"name": "step", "before": "10", "after": "30"} in difference["settings"]
    assert difference["files"] == difference["tensors"] == []
    assert "tensors: the same" in call("diff", output / "checkpoint-10", output / "checkpoint-20", "--deep")[1]


def test_repair_says_what_is_left(output: Path) -> None:
    """14 while something is damaged, 0 when it is moved aside."""
    flip(output / "checkpoint-20" / "model.safetensors")
    code, text = call("repair", output, "--deep")
    assert code == 14
    assert "kept; --drop-damaged removes it" in text
    code, text = call("repair", output, "--deep", "--drop-damaged")
    assert code == 0
    assert "moved to" in text
    assert call("repair", output) == (0, "nothing to repair\n")
    assert [path.name for path in list_checkpoints(output)] == ["checkpoint-30", "checkpoint-10"]
    (output / "checkpoint-30" / MANIFEST_NAME).unlink()
    assert call("repair", output) == (0, f"kept {output / 'checkpoint-30'}: Safepoint did not write it\n")
    assert call("verify", output)[0] == 0
    assert call("verify", output / "checkpoint-30")[0] == 14
    assert (output / "checkpoint-30" / "model.safetensors").is_file()


def test_copies_keep_their_name_and_touch_nothing(output: Path, tmp_path: Path) -> None:
    """A target that is named like a checkpoint is the copy's own name, or refused; conflicts are found first."""
    place = tmp_path / "copy"
    code, text = call("copy", output / "checkpoint-20", place / "checkpoint-20")
    assert (code, list_checkpoints(place)) == (0, [place / "checkpoint-20"])
    assert f"copied to {place / 'checkpoint-20'}" in text
    before = sorted(output.rglob("*"))
    assert call("copy", output / "checkpoint-30", output / "checkpoint-20")[0] == 2
    assert call("copy", output, output / "checkpoint-20")[0] == 2
    assert sorted(output.rglob("*")) == before
    other = OutputFolder(tmp_path / "other")
    other.prepare()
    commit(other, 30, {0: {"model.safetensors": b"other"}})
    assert call("copy", output, other.root)[0] == 11
    assert [path.name for path in list_checkpoints(other.root)] == ["checkpoint-30"], "nothing was copied"
    assert call("copy", output / "checkpoint-10", output / "checkpoint-10" / "inside")[0] == 2
    assert call("export", output, output / "checkpoint-10" / "inside")[0] == 2
    assert sorted(output.rglob("*")) == before


def test_a_copy_leaves_out_what_is_damaged(output: Path, tmp_path: Path) -> None:
    """The others arrive, and the exit code says so."""
    flip(output / "checkpoint-20" / "model.safetensors")
    code, text = call("copy", output, tmp_path / "copy")
    assert code == 3
    assert "checkpoint-20 was not copied" in text
    assert [path.name for path in list_checkpoints(tmp_path / "copy")] == ["checkpoint-30", "checkpoint-10"]


def test_a_figure_that_nobody_measured_keeps_nothing_silently(output: Path) -> None:
    """A mistyped metric would delete everything but the newest."""
    code, text = call("prune", output, "--keep", "best=1:eval_los")
    assert code == 2
    assert "eval_los" in text
    assert len(list_checkpoints(output)) == 3


@pytest.mark.parametrize("place", ["/proc/x", "{0}/file/x", "{0}/file"])
def test_a_model_cannot_go_everywhere(output: Path, place: str, tmp_path: Path) -> None:
    """Said without a traceback, and nothing is left."""
    (tmp_path / "file").write_text("x")
    code, text = call("export", output / "checkpoint-20", place.format(tmp_path))
    assert (code, "nothing was written" in text) == (13, True)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_is_passed_over_is_said(output: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The newest is damaged: the one before it is exported, and not silently; a damaged one is not compared."""
    (output / "checkpoint-30" / "rng_state_0.pth").unlink()
    _, name = call("export", output, tmp_path / "model")
    assert "exported" in name
    assert "checkpoint-20" in name
    assert call("diff", output / "checkpoint-10", output / "checkpoint-30")[0] == 14
    assert call("list", output / "checkpoint-99")[0] == 10


def test_looking_at_a_foreign_folder_leaves_nothing_in_it(tmp_path: Path) -> None:
    """A plain Trainer's checkpoints: reported as such, and not a file is added."""
    plain = tmp_path / "plain" / "checkpoint-5"
    plain.mkdir(parents=True)
    (plain / "model.safetensors").write_bytes(b"a plain Trainer's")
    before = sorted((tmp_path / "plain").rglob("*"))
    code, text = call("verify", plain.parent)
    assert (code, "only 1 checkpoint of another program" in text) == (14, True)
    assert call("repair", plain.parent)[0] == 0
    assert call("prune", plain.parent, "--keep", "newest=1")[0] == 0
    assert call("copy", plain.parent, tmp_path / "copy")[0] == 14
    assert sorted((tmp_path / "plain").rglob("*")) == before


def test_a_dry_run_says_what_it_would_do(output: Path) -> None:
    """And does nothing."""
    flip(output / "checkpoint-20" / "model.safetensors")
    code, text = call("repair", output, "--deep", "--drop-damaged", "--dry-run")
    assert code == 14
    assert "would be removed" in text
    assert len(list_checkpoints(output)) == 3


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ((), "--drop-damaged removes them"),
        (("--dry-run",), "--drop-damaged removes them"),
        (("--drop-damaged", "--dry-run"), "leave out --dry-run to remove them"),
    ],
)
def test_how_damaged_checkpoints_are_removed(options: tuple[str, ...], hint: str, output: Path) -> None:
    """The hint names the option that is missing, or the option that is too much."""
    (output / "checkpoint-20" / "model.safetensors").unlink()
    error = CliRunner().invoke(app, ["repair", str(output), *options]).exception
    assert isinstance(error, CheckpointError)
    assert error.hint == hint


def test_why_there_is_nothing_to_adopt(output: Path, tmp_path: Path) -> None:
    """An unfinished checkpoint, or one of another user, has no manifest."""
    whole = f"nothing to adopt in {output}: every checkpoint has a manifest\n"
    assert call("adopt", output) == (0, whole)
    (tmp_path / "empty").mkdir()
    assert call("adopt", tmp_path / "empty")[1].endswith("empty: there is no checkpoint\n")
    manifest = output / "checkpoint-30" / MANIFEST_NAME
    content = manifest.read_bytes()
    manifest.unlink()
    if os.geteuid() == 0:
        os.chmod(output, 0o1777)
        os.chown(output / "checkpoint-30", 4711, 4711)
        text = call("adopt", output)[1]
        assert text.endswith("out: 1 checkpoint of another user, which cannot be adopted\n")
        os.chown(output / "checkpoint-30", 0, 0)
        os.chmod(output, 0o755)
    manifest.write_bytes(content)
    assert call("adopt", output) == (0, whole)


@pytest.mark.parametrize("kind", [Kind.UNFINISHED, Kind.FOREIGN])
def test_a_location_that_has_only_what_cannot_be_adopted(kind: Kind) -> None:
    found = nothing_to_adopt([_item("checkpoint-1", kind), _item("checkpoint-2", Kind.CHECKPOINT)], "s3://b/run")
    what = "1 unfinished checkpoint" if kind is Kind.UNFINISHED else "1 checkpoint of another user"
    assert found == f"nothing to adopt in s3://b/run: {what}, which cannot be adopted"


def test_a_location_that_has_nothing_to_verify(tmp_path: Path) -> None:
    root = prepared(tmp_path / "out").root
    assert call("verify", root) == (14, f"there is no checkpoint in {root}")
    foreign, unfinished = _item("checkpoint-1", Kind.FOREIGN), _item("checkpoint-2", Kind.UNFINISHED)
    assert nothing_to_verify([foreign, foreign, unfinished], "s3://b/run") == (
        "there is no complete checkpoint of Safepoint in s3://b/run, only 2 checkpoints of another program and 1 "
        "unfinished checkpoint"
    )


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_to_do_about_checkpoints_that_stay(is_folder: bool) -> None:
    """The message names others only if there are others, and `lsattr` only for a folder."""
    failed = [(_item("checkpoint-1", Kind.CHECKPOINT), "Operation not permitted")]
    for num_removed, fate in ((0, ""), (1, "; 1 other checkpoint was removed"), (2, "; 2 other checkpoints were ")):
        with pytest.raises(StorageError) as caught:
            check_removed(failed, "out", num_removed=num_removed, is_folder=is_folder)
        words = "1 checkpoint in out could not be removed, such as checkpoint-1 (Operation not permitted)"
        assert caught.value.message.startswith(words + fate)
        assert num_removed or caught.value.message == words
        assert ("lsattr" in str(caught.value.hint)) is is_folder
    check_removed([], "out", num_removed=1, is_folder=is_folder)


def _item(name: str, kind: Kind) -> Item:
    return Item(
        name=name,
        prefix=name,
        where=f"out/{name}",
        stated=None,
        kind=kind,
        faults=(),
        num_files=1,
        size_bytes=0,
        modified_s=0.0,
        created_s=0.0,
    )
