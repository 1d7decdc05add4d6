"""Damaged and hostile checkpoints: each is refused with its reason, and the older one is used."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.catalog import newest_valid
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from safepoint.checkpoint.format.verify import Fault, verify
from safepoint.errors import ManifestError, NothingValidError
from tests.support.checkpoints import commit, prepared, sealed


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / MANIFEST_NAME).read_bytes())
        change(record)
        (folder / MANIFEST_NAME).write_bytes(sealed(record))

    return apply


def replace(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST_NAME).write_bytes(content) and None


def first_path(path: str) -> Callable[[Path], None]:
    return edit(lambda record: record["files"][0].__setitem__("path", path))


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


def flip(folder: Path) -> None:
    content = bytearray((folder / "sub/optimizer.pt").read_bytes())
    content[100] ^= 4
    (folder / "sub/optimizer.pt").write_bytes(content)


def swap(folder: Path) -> None:
    one, two = folder / "rng_state_0.pth", folder / "rng_state_1.pth"
    one.write_bytes(b"one!")
    two.write_bytes(b"zer")


def link_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    elsewhere = folder.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def link_manifest(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    elsewhere = folder.parent / "manifest-elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def link_folder(folder: Path) -> None:
    elsewhere = folder.parent / "folder-elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


def link_subfolder(folder: Path) -> None:
    elsewhere = folder.parent / "sub-elsewhere"
    (folder / "sub").rename(elsewhere)
    (folder / "sub").symlink_to(elsewhere)


def fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def fifo_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()
    os.mkfifo(folder / MANIFEST_NAME)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated file": (truncate, "bytes, the manifest says"),
    "flipped bit": (flip, "digest does not match"),
    "missing file": (lambda folder: (folder / "rng_state_1.pth").unlink(), "is missing"),
    "swapped content": (swap, "digest does not match"),
    "link in place of a file": (link_file, "link"),
    "link in place of a subfolder": (link_subfolder, "missing"),
    "link in place of the folder": (link_folder, "link"),
    "link in place of the manifest": (link_manifest, "link"),
    "pipe in place of a file": (fifo, "special file"),
    "pipe in place of the manifest": (fifo_manifest, "not a regular file"),
    "no manifest": (lambda folder: (folder / MANIFEST_NAME).unlink(), "not a checkpoint"),
    "empty manifest": (replace(b""), "not JSON"),
    "manifest that is text": (replace(b"hello"), "not JSON"),
    "manifest that is not UTF-8": (replace(b"\xff\xfe"), "not JSON"),
    "manifest that is a list": (replace(b"[]"), "not a JSON object"),
    "deeply nested manifest": (replace(b"[" * 200_000), "not JSON"),
    "huge integer": (replace(b'{"step": ' + b"9" * 10_000 + b"}"), "not JSON"),
    "a name twice": (replace(b'{"format": 1, "format": 2}'), "twice"),
    "not a number": (replace(b'{"epoch": NaN}'), "not a number"),
    "another format": (edit(lambda record: record.update(format="tar")), "format"),
    "a later version": (edit(lambda record: record.update(version=2)), "version is 2"),
    "a version that is true": (edit(lambda record: record.update(version=True)), "version is True"),
    "step is text": (edit(lambda record: record.update(step="8")), "step must be a whole number"),
    "step is true": (edit(lambda record: record.update(step=True)), "step must be a whole number"),
    "step is negative": (edit(lambda record: record.update(step=-8)), "step"),
    "no step": (edit(lambda record: record.pop("step")), "step"),
    "another step than the folder": (edit(lambda record: record.update(step=9)), "the folder's name has step"),
    "unknown trigger": (edit(lambda record: record.update(trigger="whim")), "whim"),
    "no files": (edit(lambda record: record.update(files=[])), "at least one file"),
    "files is text": (edit(lambda record: record.update(files="all")), "files must be"),
    "parent folder": (first_path("../outside"), "leaves the checkpoint's folder"),
    "hidden parent folder": (first_path("a/../../outside"), "leaves the checkpoint's folder"),
    "absolute path": (first_path("/etc/passwd"), "absolute"),
    "backslash": (first_path("..\\outside"), "backslash"),
    "control character": (first_path("a\nb"), "control"),
    "zero byte": (first_path("a\0b"), "control"),
    "surrogate": (first_path("a\ud800b"), "surrogate"),
    "dot": (first_path("./a"), "not normalized"),
    "double slash": (first_path("a//b"), "not normalized"),
    "empty path": (first_path(""), "empty"),
    "the manifest itself": (first_path(MANIFEST_NAME), "manifest itself"),
    "below another file": (first_path("rng_state_0.pth/x"), "malformed"),
    "wrong kind of digest": (
        edit(lambda record: record["files"][0].update(digest="md5:d41d8cd98f00b204e9800998ecf8427e")),
        "digest",
    ),
    "edited by hand": (
        lambda folder: (
            (folder / MANIFEST_NAME).write_bytes(
                (folder / MANIFEST_NAME).read_bytes().replace(b'"global_batch": 8', b'"global_batch": 9')
            )
            and None
        ),
        "altered",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_with_its_reason_and_the_older_one_is_used(name: str, tmp_path: Path) -> None:
    """The newest checkpoint is damaged: it is named, and step 4 is what the run resumes from."""
    damage, word = DAMAGE[name]
    output = prepared(tmp_path / "out")
    commit(output, 4)
    newest = commit(output, 8)
    assert verify(newest).is_valid
    damage(newest)
    rejected: list[tuple[Path, Fault]] = []
    found = newest_valid(output.root, rejected=lambda path, fault: rejected.append((path, fault)))
    assert found is not None
    assert found[0].name == "checkpoint-4"
    assert [path for path, _ in rejected] == [newest]
    assert word in str(rejected[0][1])


@pytest.mark.parametrize(
    "name", ["parent folder", "absolute path", "link in place of a file", "link in place of the folder"]
)
def test_nothing_outside_the_folder_is_opened(name: str, tmp_path: Path) -> None:
    """A hostile name is refused before it is used: no file outside the checkpoint is opened."""
    output = prepared(tmp_path / "out")
    newest = commit(output, 8)
    DAMAGE[name][0](newest)
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            opened.append(os.fsdecode(arguments[0]))

    sys.addaudithook(watch)
    verify(newest)
    watching = False
    outside = [path for path in opened if not path.startswith(str(newest))]
    assert not outside


def test_nothing_valid_is_never_silently_from_scratch(tmp_path: Path) -> None:
    """Only damaged checkpoints: an error that names the way out."""
    output = prepared(tmp_path / "out")
    flip(commit(output, 4))
    truncate(commit(output, 8))
    with pytest.raises(NothingValidError, match="--from-scratch"):
        newest_valid(output.root, rejected=lambda path, fault: None)


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    """No byte of a manifest can change unseen, whitespace included."""
    folder = commit(prepared(tmp_path / "out"), 8)
    content = (folder / MANIFEST_NAME).read_bytes()
    Manifest.from_bytes(content)
    for position in range(len(content)):
        for bit in (0, 5):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with pytest.raises(ManifestError):
                Manifest.from_bytes(bytes(damaged))


def test_every_truncation_of_a_manifest_is_found(tmp_path: Path) -> None:
    """A manifest that was cut off anywhere is refused."""
    content = (commit(prepared(tmp_path / "out"), 8) / MANIFEST_NAME).read_bytes()
    for length in range(len(content)):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(content[:length])


def test_a_flip_in_every_window_of_every_file_is_found(tmp_path: Path) -> None:
    """One bit in each of 256 windows of each file: always detected."""
    folder = commit(prepared(tmp_path / "out"), 8)
    for path in (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME):
        content = path.read_bytes()
        for window in range(min(256, len(content))):
            damaged = bytearray(content)
            damaged[window * len(content) // 256 if len(content) >= 256 else window] ^= 1 << (window % 8)
            path.write_bytes(damaged)
            assert not verify(folder).is_valid
        path.write_bytes(content)
    assert verify(folder).is_valid


def test_a_field_that_a_later_release_adds_is_accepted(tmp_path: Path) -> None:
    """Version 1 grows by fields: an unknown one under a right digest does no harm."""
    folder = commit(prepared(tmp_path / "out"), 8)
    edit(lambda record: record.update(colour="green"))(folder)
    assert verify(folder).is_valid
