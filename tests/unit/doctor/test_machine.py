"""Memory, open files and the clock."""

import os
import resource
from pathlib import Path

import pytest

from safepoint.doctor import machine
from safepoint.doctor.finding import Status
from safepoint.doctor.machine import judge_clock, judge_dev_shm, judge_memory, judge_open_files
from safepoint.snapshot.memory.host_memory import Room


def test_a_snapshot_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a known size can be too large; a system without such memory is said."""
    room = Room(available_bytes=10**9, limit_bytes=10**9, limited_by="a group")
    monkeypatch.setattr(machine.host_memory, "look", lambda: room)
    assert judge_memory(None).status is Status.OK
    assert judge_memory(10**8).status is Status.OK
    finding = judge_memory(10**9)
    assert (finding.status, "a snapshot takes 1.0 GB" in finding.found) == (Status.WARNING, True)
    monkeypatch.setattr(machine.host_memory, "look", lambda: None)
    assert judge_memory(None).status is Status.WARNING


def test_a_containers_64_mib_are_too_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The size of /dev/shm under Docker's default."""
    status = os.statvfs(tmp_path)
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, *status[5:]))
    monkeypatch.setattr(machine.os, "statvfs", lambda folder: small)
    finding = judge_dev_shm()
    assert (finding.status, finding.found) == (Status.WARNING, "67.1 MB of 67.1 MB free")
    assert "--shm-size" in finding.fix


def test_no_dev_shm_is_said(tmp_path: Path) -> None:
    assert judge_dev_shm(str(tmp_path / "none")).status is Status.WARNING


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ((1024, 4096), Status.WARNING),
        ((65536, 65536), Status.OK),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Status.OK),
    ],
)
def test_open_files(limits: tuple[int, int], status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: limits)
    assert judge_open_files().status is status


@pytest.mark.parametrize(
    ("ahead_s", "status", "word"),
    [
        (None, Status.OK, ""),
        (2.0, Status.OK, "within 2 s"),
        (-901.0, Status.WARNING, "901 s ahead of"),
        (901.0, Status.WARNING, "901 s behind"),
    ],
)
def test_the_clock_is_compared(ahead_s: float | None, status: Status, word: str) -> None:
    finding = judge_clock(ahead_s)
    assert (finding.status, word in finding.found) == (status, True)
