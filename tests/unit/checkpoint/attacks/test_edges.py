"""Attacks at the edges of the formats: numbers, nesting, names and kinds of files that only just fit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.checkpoint.format.catalog import newest_valid
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_STEP,
    FileEntry,
    Manifest,
    path_fault,
)
from safepoint.checkpoint.format.verify import Fault, read_manifest, verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import ManifestError
from tests.support.checkpoints import commit, describe, prepared


def written(record: dict[str, Any], **raw_fields: str) -> bytes:
    """The text of `record`, with fields whose text is given as it is, in the writer's form and without a digest."""
    placed = {name: f"@{name}@" for name in raw_fields}
    text = json.dumps({**record, **placed}, sort_keys=True, indent=1) + "\n"
    for name, field in raw_fields.items():
        text = text.replace(f'"@{name}@"', field)
    return text.encode()


def sealed(record: dict[str, Any], **raw_fields: str) -> bytes:
    """A manifest whose own digest is right, whatever it says."""
    record = {name: value for name, value in record.items() if name != "manifest_digest"}
    return written({**record, "manifest_digest": digest_bytes(written(record, **raw_fields))}, **raw_fields)


def with_field(folder: Path, field: str) -> bytes:
    """The folder's manifest with one more field, its value written raw."""
    return sealed(json.loads((folder / MANIFEST_NAME).read_bytes()), zzz=field)


def nested(depth: int) -> str:
    """A list in a list in a list, in the writer's form for the value of a field."""
    opening = "".join("[\n" + " " * (level + 2) for level in range(depth - 1))
    closing = "".join("\n" + " " * (level + 1) + "]" for level in reversed(range(depth - 1)))
    return opening + "[]" + closing


def folder_in_place_of_the_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()
    (folder / MANIFEST_NAME).mkdir()


def folder_in_place_of_a_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def swap_names(folder: Path) -> None:
    one, two, aside = folder / "rng_state_0.pth", folder / "rng_state_1.pth", folder / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def file_in_place_of_the_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.write_bytes(b"not a folder")


def sparse_manifest(folder: Path) -> None:
    with (folder / MANIFEST_NAME).open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / MANIFEST_NAME).read_bytes())
        change(record)
        (folder / MANIFEST_NAME).write_bytes(sealed(record))

    return apply


def wrong_type(name: str, value: object) -> tuple[Callable[[Path], None], str]:
    return rewrite(lambda record: record.__setitem__(name, value)), name


def raw(field: str) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST_NAME).write_bytes(with_field(folder, field)) and None


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "infinity as a constant": (raw("Infinity"), "not a number"),
    "a list nested ten thousand deep": (raw("[" * 10_000 + "]" * 10_000), "not JSON"),
    "an object nested ten thousand deep": (raw('{"a":' * 10_000 + "0" + "}" * 10_000), "not JSON"),
    "negative epoch": (rewrite(lambda record: record.update(epoch=-1.0)), "epoch"),
    "a version that is 1.0": (rewrite(lambda record: record.update(version=1.0)), "version is 1.0"),
    "no version": (rewrite(lambda record: record.pop("version")), "version is None"),
    "a folder in place of the manifest": (folder_in_place_of_the_manifest, "not a regular file"),
    "a folder in place of a file": (folder_in_place_of_a_file, "is missing"),
    "two files with each other's names": (swap_names, "bytes, the manifest says"),
    "a file in place of the folder": (file_in_place_of_the_folder, "cannot be read"),
    "a manifest too large to read": (sparse_manifest, "larger than"),
    "digest without its algorithm": (
        rewrite(lambda record: record["files"][0].update(digest="0" * 32)),
        "must be xxh3-128",
    ),
    "a file twice": (rewrite(lambda record: record["files"].append(record["files"][-1])), "no path may occur twice"),
    "files out of order": (rewrite(lambda record: record["files"].reverse()), "sorted"),
    "a path below the manifest": (
        rewrite(lambda record: record["files"][-1].update(path=f"{MANIFEST_NAME}/x")),
        "is the manifest itself",
    ),
    "negative size": (rewrite(lambda record: record["files"][0].update(size_bytes=-1)), "must be at least 0"),
    "size that is true": (
        rewrite(lambda record: record["files"][0].update(size_bytes=True)),
        "size_bytes must be a whole number",
    ),
    "path that is a number": (rewrite(lambda record: record["files"][0].update(path=3)), "path must be a string"),
    "a file that is text": (rewrite(lambda record: record["files"].append("x")), "files must be a list of objects"),
    "library version that is a number": (rewrite(lambda record: record.update(libraries={"a": 1})), "libraries"),
    "no run": (rewrite(lambda record: record.pop("run_id")), "'run_id' is missing"),
    "no own digest": (
        lambda folder: (
            (folder / MANIFEST_NAME).write_bytes(
                json.dumps(
                    {
                        name: value
                        for name, value in json.loads((folder / MANIFEST_NAME).read_bytes()).items()
                        if name != "manifest_digest"
                    }
                ).encode()
            )
            and None
        ),
        "altered",
    ),
    "integer epoch": wrong_type("epoch", 1),
    "fractional world_size": wrong_type("world_size", 2.0),
    "attempt 0": wrong_type("attempt", 0),
    "global_batch that is true": wrong_type("global_batch", True),
    "gradient_accumulation null": wrong_type("gradient_accumulation", None),
    "samples_seen negative": wrong_type("samples_seen", -1),
    "created that is a number": wrong_type("created", 5),
    "strategy that is a list": wrong_type("strategy", ["ddp"]),
    "libraries that is a list": wrong_type("libraries", []),
    "zero_stage that is a text": wrong_type("zero_stage", "2"),
    "zero_stage that is none": wrong_type("zero_stage", 4),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_edge_case_is_refused_and_the_older_one_is_used(name: str, tmp_path: Path) -> None:
    """Whatever the newest checkpoint holds, reading it raises nothing, names the reason and goes on to the older."""
    damage, word = DAMAGE[name]
    output = prepared(tmp_path / "out")
    older, newest = commit(output, 4), commit(output, 8)
    damage(newest)
    rejected: list[tuple[Path, Fault]] = []
    found = newest_valid(output.root, rejected=lambda path, fault: rejected.append((path, fault)))
    assert found is not None
    assert found[0] == older
    assert [path for path, _ in rejected] == [newest]
    assert word in str(rejected[0][1])


@pytest.mark.parametrize("name", DAMAGE)
def test_listing_what_is_committed_survives_every_edge_case(name: str, tmp_path: Path) -> None:
    """Retention looks at manifests in the middle of a run: a bad one is left out and stops nothing."""
    output = prepared(tmp_path / "out")
    older, newest = commit(output, 4), commit(output, 8)
    DAMAGE[name][0](newest)
    assert older in [path for path, _ in output.manifests()]


def test_nesting_at_the_limit_of_the_interpreter_is_refused_or_read(tmp_path: Path) -> None:
    """Around the recursion limit, where reading still works and writing may not, only ManifestError is raised."""
    folder = commit(prepared(tmp_path / "out"), 8)
    assert Manifest.from_bytes(with_field(folder, nested(100))).step == 8
    limit = sys.getrecursionlimit()
    refused = 0
    for depth in (limit - 120, limit - 40, 3 * limit):
        try:
            Manifest.from_bytes(with_field(folder, nested(depth)))
        except ManifestError:
            refused += 1
    assert refused


@given(
    value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)
    | st.integers(1, 9)
)
@settings(max_examples=25, deadline=None)
def test_no_value_of_a_known_field_raises_anything_else(value: object) -> None:
    """Any JSON value in any known field, correctly sealed, is read as it is or is a ManifestError."""
    whole = describe(8)((FileEntry(path="a", size_bytes=1, digest="xxh3-128:" + "0" * 32),))
    base = json.loads(whole.to_bytes())
    assert Manifest.from_bytes(sealed(base)) == whole
    for name in base.keys() - {"manifest_digest"}:
        try:
            read = Manifest.from_bytes(sealed({**base, name: value}))
        except ManifestError:
            continue
        if name not in {"format", "version"}:
            assert getattr(read, name) == value


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
@settings(max_examples=100, deadline=None)
def test_no_bytes_raise_anything_but_a_manifest_error(data: bytes) -> None:
    """Arbitrary bytes are never a manifest and never another kind of error."""
    with pytest.raises(ManifestError):
        Manifest.from_bytes(data)


@given(
    st.lists(st.sampled_from(["..", ".", "", "a", "b c", "\\", "\0", "\x7f", "\x9b", "é", "/", "\ud800"]), max_size=5)
)
@settings(max_examples=100, deadline=None)
def test_an_accepted_path_stays_inside(parts: list[str]) -> None:
    """Every path that is let through is relative, printable, and normalises to itself below the folder."""
    path = "/".join(parts)
    if path_fault(path) is None:
        assert os.path.normpath(os.path.join("/root", path)) == f"/root/{path}"
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in path)
        path.encode()


@pytest.mark.parametrize("character", [*map(chr, range(32)), *map(chr, range(0x7F, 0xA0))], ids=ascii)
def test_every_control_character_is_refused(character: str) -> None:
    """A path that could steer a terminal, both control blocks and DEL, is no path of a checkpoint."""
    assert "control character" in str(path_fault(f"a{character}b"))


def test_a_path_has_a_greatest_length() -> None:
    """4096 bytes, and 255 in one name, are accepted and more are not, counted as the file system counts."""
    assert path_fault("a/" * 2047 + "aa") is None
    assert path_fault("a/" * 2047 + "aaa") is not None
    assert path_fault("é" * 127) is None
    assert path_fault("é" * 128) is not None


def test_values_at_their_greatest_survive_the_round_trip(tmp_path: Path) -> None:
    """A huge step and a non-ASCII file name are written and read back as they are."""
    output = prepared(tmp_path / "out")
    step = MAX_STEP
    folder = commit(output, step, {0: {"Größe/日本.bin": b"x", "DEL-free name": b""}})
    found = newest_valid(output.root, rejected=lambda path, fault: None)
    assert found is not None
    assert found[0] == folder
    assert found[1].step == step


def test_a_manifest_that_cannot_be_opened_leaks_no_descriptor(tmp_path: Path) -> None:
    """Refusing pipes, folders and links a hundred times leaves as many open files as before."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 8)
    folder_in_place_of_the_manifest(folder)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        with pytest.raises(ManifestError):
            read_manifest(folder)
    assert len(os.listdir("/proc/self/fd")) == before


SPY = """
import os, pathlib, sys
from safepoint.checkpoint.format import catalog, verify
root, seen = os.path.realpath(sys.argv[1]), []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        seen.append((os.fsdecode(arguments[0]), arguments[2]))
    elif event in {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
                   "os.chmod", "os.chown", "os.utime", "subprocess.Popen", "os.system", "socket.connect", "exec"}:
        seen.append((event, os.O_WRONLY))
sys.addaudithook(watch)
open(root + "/canary").close()
catalog.newest_valid(pathlib.Path(root), rejected=lambda path, fault: None)
assert seen.pop(0)[0] == root + "/canary", "the hook sees nothing"
outside = [path for path, _ in seen if not path.startswith(root + "/checkpoint-")]
writes = [path for path, flags in seen if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)]
inside = [path for path in (os.path.realpath(path) for path, _ in seen) if not path.startswith(root + "/")]
print(outside, writes, inside, len(seen) > 0)
"""


def point_outside(folder: Path, path: str) -> None:
    rewrite(lambda record: record["files"].insert(0, {**record["files"][0], "path": path}))(folder)


@pytest.mark.parametrize(
    "path",
    ["../secret", "a/../../../secret", "{secret}", "..\\secret", "sub/../../secret", "link/secret", "./../secret"],
)
def test_a_hostile_path_opens_and_writes_nothing_outside(path: str, tmp_path: Path) -> None:
    """A process of its own that looks for the newest checkpoint opens files inside checkpoints only, to read."""
    output = prepared(tmp_path / "out")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (output.root / "canary").touch()
    commit(output, 4)
    newest = commit(output, 8)
    (newest / "link").symlink_to(tmp_path)
    point_outside(newest, path.format(secret=secret))
    done = subprocess.run(
        [sys.executable, "-c", SPY, str(output.root)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "[] [] [] True\n", done.stderr
    assert secret.read_text() == "secret"


def test_a_hostile_name_in_the_output_folder_is_no_checkpoint(tmp_path: Path) -> None:
    """Only `checkpoint-<step>` in plain digits is looked at; everything else is left alone."""
    output = OutputFolder(tmp_path)
    for name in (
        "checkpoint-",
        "checkpoint-01",
        "checkpoint--1",
        "checkpoint-1\n",
        "checkpoint-\u0661",
        "checkpoint-1.5",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / ("checkpoint-" + "9" * 19)).mkdir()
    assert [path for path, _ in output.manifests()] == []
    assert newest_valid(tmp_path, rejected=lambda path, fault: None) is None


def test_verification_that_is_not_deep_still_finds_kinds_and_sizes(tmp_path: Path) -> None:
    """Without reading contents, a changed size is found, a flipped bit is not, and the verdict says which file."""
    folder = commit(prepared(tmp_path / "out"), 8)
    file = folder / "rng_state_0.pth"
    file.write_bytes(b"ZERO")
    assert verify(folder, deep=False).is_valid
    file.write_bytes(b"longer than before")
    assert [fault.file for fault in verify(folder, deep=False).faults] == ["rng_state_0.pth"]


def test_all_faults_are_named_and_progress_ends_at_the_whole(tmp_path: Path) -> None:
    """Two damaged files are two faults, and progress counts every byte once."""
    folder = commit(prepared(tmp_path / "out"), 8)
    reports: list[tuple[int, int]] = []
    assert verify(folder, progress=lambda done, total: reports.append((done, total))).is_valid
    assert reports[-1][0] == reports[-1][1] == read_manifest(folder).size_bytes
    (folder / "rng_state_0.pth").write_bytes(b"ZERO")
    (folder / "rng_state_1.pth").write_bytes(b"ONE")
    assert {fault.file for fault in verify(folder).faults} == {"rng_state_0.pth", "rng_state_1.pth"}
