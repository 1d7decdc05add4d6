"""An output location inside of a checkpoint, which any further file makes invalid."""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import list_files, verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import SafepointError, UsageError
from safepoint.settings.run_settings import place_output
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint
from tests.support.moto_server import MotoServer

BELOW = ["checkpoint-4", "checkpoint-4/sub", "checkpoint-4/a/b/c", "link", "link/sub", "checkpoint-4/../checkpoint-4"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    output = prepared(tmp_path / "out")
    commit(output, 4)
    (output.root / "link").symlink_to("checkpoint-4")
    return output.root


@pytest.mark.parametrize("below", [*BELOW, "checkpoint-5", ".safepoint", ".safepoint/work/x"])
def test_a_run_does_not_write_into_a_checkpoint(below: str, root: Path) -> None:
    """The launcher and a rank refuse it before anything is written."""
    before = sorted(root.rglob("*"))
    for check in (OutputFolder.check_usable, OutputFolder.prepare):
        with pytest.raises(UsageError, match=r"nothing was written"):
            check(OutputFolder(root / below))
    assert sorted(root.rglob("*")) == before
    assert verify(root / "checkpoint-4").is_valid


@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("command", ["copy", "export"])
def test_a_command_does_not_write_into_a_checkpoint(command: str, below: str, root: Path, tmp_path: Path) -> None:
    """Neither as the target of a copy nor of an export."""
    commit(prepared(tmp_path / "other"), 7)
    done = safepoint("checkpoints", command, tmp_path / "other/checkpoint-7", root / below / "model")
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert verify(root / "checkpoint-4").is_valid


def test_the_command_says_what_to_do(root: Path) -> None:
    """`run` ends with 2, and the message names the folder to use."""
    script = root / "script.py"
    script.touch()
    command = [sys.executable, "-m", "safepoint.cli.main", "run", "--output-dir", root / "checkpoint-4", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "checkpoint-4" in done.stderr
    assert f"--output-dir {root}" in done.stderr
    assert verify(root / "checkpoint-4").is_valid


@pytest.mark.parametrize(
    "text", ["s3://bucket/run/checkpoint-5", "s3://bucket/run/checkpoint-5/sub", "gs://b/checkpoint-0"]
)
def test_a_store_has_no_run_in_a_checkpoint_either(text: str, tmp_path: Path) -> None:
    """Objects below a checkpoint's prefix make it invalid."""
    with pytest.raises(UsageError, match="checkpoint"):
        place_output(text, local_dir=str(tmp_path))


@pytest.mark.parametrize(
    "name", ["checkpoint-05", "checkpoint", "checkpoints", "my-checkpoint-5", "checkpoint-5x", "final"]
)
def test_other_names_may_be_used(name: str, tmp_path: Path) -> None:
    """Only what is a checkpoint's name, or has its record, is one."""
    OutputFolder(tmp_path / "checkpoint-9/runs" / name).prepare()  # another tool's folder around it is not ours


def test_a_renamed_checkpoint_is_one(root: Path) -> None:
    """Its record shows it, whatever it is called."""
    (root / "checkpoint-4").rename(root / "good-one")
    with pytest.raises(SafepointError, match="checkpoint"):
        OutputFolder(root / "good-one").prepare()
    assert verify(root / "good-one").is_valid


@pytest.mark.parametrize(
    "below",
    ["checkpoint-7", "checkpoint-7/model", "checkpoint-7/a/b", "checkpoint-8/model", ".safepoint", ".safepoint/x",
     "final/model", "a/../checkpoint-7/model", "checkpoint-7//model"],
)  # fmt: skip
def test_an_export_to_a_store_does_not_write_into_a_checkpoint(
    below: str, moto: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is being uploaded."""
    checkpoint = commit(prepared(tmp_path), 7)
    store = moto.store(f"inside/{uuid.uuid4().hex}")
    for name in ("checkpoint-7", "final"):
        for path in list_files(checkpoint):
            store.write(f"{name}/{path}", (checkpoint / path).read_bytes())
        store.write(f"{name}/{MANIFEST_NAME}", (checkpoint / MANIFEST_NAME).read_bytes())
    RemoteFolder.as_guest(store).mark("checkpoint-8", {"model.safetensors": 1})
    before = [item.key for item in store.list()]
    target = f"{store.location}/{below}"
    for variable, value in moto.variables.items():
        monkeypatch.setenv(variable, value)
    done = safepoint("checkpoints", "export", checkpoint, target)
    assert done.code in ({2, 11} if below == "checkpoint-7" else {2}), done.stderr
    assert "Traceback" not in done.stderr
    assert [item.key for item in store.list()] == before
