"""What a process of low priority gets of the processor, measured by what the kernel says it has been given."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BURN = """
import os, sys, time
from safepoint.foundation.priority import Priority
os.sched_setaffinity(0, {%d})
priority = Priority() if %r else None
if priority: priority.lower()
if %r: priority.restore()
print(flush=True)
while True: pass
"""


def _burner(cpu: int, *, is_low: bool, hurries: bool = False) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", BURN % (cpu, is_low, hurries)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _share(*, hurries: bool) -> float:
    """What the first of two processes on one processor gets, as a part of both."""
    cpu = min(os.sched_getaffinity(0))
    both = [_burner(cpu, is_low=True, hurries=hurries), _burner(cpu, is_low=False)]
    try:
        before = [_processor_s(one.pid) for one in both]
        while True:
            time.sleep(0.1)
            spent = [_processor_s(one.pid) - then for one, then in zip(both, before, strict=True)]
            if sum(spent) > 1.0:
                return spent[0] / sum(spent)
    finally:
        for one in both:
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()


def test_who_gives_way_gets_little() -> None:
    """A tenth at most of what somebody else gets who wants the same processor, groups or not."""
    assert _share(hurries=False) < 0.15


def _has_groups() -> bool:
    """Whether the system shares processors between sessions, and no control group does so in their place."""
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if not switch.exists() or switch.read_text().strip() != "1":
        return False
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return all(path == "/" for _, controllers, path in lines if "cpu" in controllers.split(",") or not controllers)


@pytest.mark.skipif(not _has_groups(), reason="the system does not share processors between groups of sessions")
def test_who_hurries_gets_as_much() -> None:
    """The group's niceness is taken back; the process's own counts within its group only."""
    assert _share(hurries=True) > 0.3
