"""The output folder: found usable or not, measured, and left as it was."""

import os
import stat
from pathlib import Path

import pytest

from safepoint.doctor import output_location as module
from safepoint.doctor.finding import Status
from safepoint.doctor.output_location import Disk, judge_folder, judge_store, look_at_folder
from safepoint.storage.location import parse_location
from safepoint.storage.opening import Tried


def disk(**changes: object) -> Disk:
    facts = {"folder": Path("/x"), "bytes_per_s": 1e9, "free_bytes": 10**12, "has_locks": True, "clock_ahead_s": 0.0}
    return Disk(**{**facts, **changes})  # type: ignore[arg-type]


def test_it_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    """Where the folder is still to be made, the one above it; nothing is made."""
    for folder in (tmp_path, tmp_path / "to" / "be" / "made"):
        found = look_at_folder(folder)
        assert found.folder == tmp_path
        assert found.bytes_per_s > 0
        assert found.has_locks
        assert abs(found.clock_ahead_s) < 5
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_nameless_files_is_measured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: the file loses its name before anything is written."""
    actual, seen = os.open, []

    def refuse(path: object, flags: int, *rest: int, **named: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return actual(path, flags, *rest, **named)  # type: ignore[arg-type]

    def write(descriptor: int, *, most_bytes: int) -> float:
        seen.append((os.fstat(descriptor).st_nlink, stat.S_ISREG(os.fstat(descriptor).st_mode)))
        return 1.0

    monkeypatch.setattr(module.os, "open", refuse)
    monkeypatch.setattr(module, "_write", write)
    assert look_at_folder(tmp_path).bytes_per_s == 1.0
    assert seen == [(0, True)]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="not a folder"):
        look_at_folder(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("found", "state_bytes", "status", "word"),
    [
        (disk(), None, Status.OK, ""),
        (disk(), 10**10, Status.OK, ""),
        (disk(bytes_per_s=1e6), None, Status.WARNING, "faster disk"),
        (disk(free_bytes=10**8), None, Status.WARNING, "free 974 MB"),
        (disk(free_bytes=10**10), 6 * 10**9, Status.FAILURE, "free 2.0 GB"),
        (disk(has_locks=False), None, Status.WARNING, "nolock"),
        ("Permission denied", None, Status.FAILURE, "writ"),
    ],
)
def test_the_verdict_names_the_fix(found: Disk | str, state_bytes: int | None, status: Status, word: str) -> None:
    finding = judge_folder(found, Path("/x"), state_bytes)
    assert (finding.status, word in finding.fix) == (status, True)


@pytest.mark.parametrize(("location", "is_s3"), [("s3://bucket/run", True), ("gs://bucket/run", False)])
def test_only_a_store_of_s3_is_reached_with_the_variables_of_aws(
    location: str, is_s3: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of another store reads its own variables, so those of AWS would mislead."""
    variables = {"AWS_ENDPOINT_URL_S3": "https://s3.example", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = judge_store(Tried(duration_s=0.1, clock_ahead_s=0.0), parse_location(location)).found
    assert ("https://s3.example" in found, "AWS_ACCESS_KEY_ID" in found) == (is_s3, is_s3)


def test_the_source_of_the_keys_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine can have several sources of keys, so the finding names the one that was used."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    found = judge_store(Tried(duration_s=0.1, clock_ahead_s=0.0), parse_location("s3://bucket/run")).found
    assert f"with the keys from {tmp_path / 'keys'}, profile default" in found
