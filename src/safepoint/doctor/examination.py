"""Runs all checks. Checks that wait for other programs or for the object store run at the same time."""

from pathlib import Path

from safepoint.doctor.deadline import History, judge_grace, look_at_history
from safepoint.doctor.finding import Finding, Status
from safepoint.doctor.machine import judge_clock, judge_dev_shm, judge_memory, judge_open_files, judge_python
from safepoint.doctor.output_location import Disk, judge_folder, judge_store, look_at_folder, look_at_store
from safepoint.doctor.process_images import examine_criu, examine_locks, examine_namespaces
from safepoint.doctor.programs import (
    judge_checkpoint_api,
    judge_gpus,
    judge_torch,
    look_at_gpus,
    look_at_torch,
)
from safepoint.foundation.bounded import Work
from safepoint.settings.run_settings import OutputPlace
from safepoint.storage.opening import Tried

_FOLDER_S = 5.0
_STORE_S = 8.0
_PROGRAMS_S = 15.0


def examine(place: OutputPlace | None, *, grace_s: float, margin_s: float, images: Path) -> list[Finding]:
    """Run all checks.

    Args:
        place: the output location; None to skip the checks that need an output location.
        grace_s: the grace period.
        margin_s: how long before the end of the grace period all processes must have exited.
        images: the folder below which the process images of jobs are.
    """
    history, disk = History(), None
    if place is not None:  # this check runs first and alone, because it measures the speed of the disk
        history, disk = _look_at_place(place.folder)
    torch_work, gpu_work, criu_work = Work(look_at_torch), Work(look_at_gpus), Work(examine_criu)
    remote = place.remote if place is not None else None
    namespace_work, lock_work = Work(examine_namespaces), Work(lambda: examine_locks(images))
    store_work = Work(lambda: look_at_store(remote)) if remote is not None else None

    findings = [judge_python(), judge_memory(history.state_bytes), judge_dev_shm(), judge_open_files()]
    ahead_s = disk.clock_ahead_s if isinstance(disk, Disk) else None
    if place is not None and disk is not None:
        findings.append(judge_folder(disk, place.folder, history.state_bytes))
        rate = disk.bytes_per_s if isinstance(disk, Disk) else None
        grace = judge_grace(history, grace_s=grace_s, margin_s=margin_s, bytes_per_s=rate)
        findings += [grace] if grace is not None else []
    if store_work is not None and remote is not None:
        tried = store_work.result(_STORE_S)
        findings.append(judge_store(tried, remote))
        ahead_s = tried.clock_ahead_s if isinstance(tried, Tried) else ahead_s
    findings.append(judge_clock(ahead_s))
    torch = torch_work.result(_PROGRAMS_S)
    findings.append(judge_torch(torch))
    gpus = gpu_work.result(_PROGRAMS_S)
    findings.append(_no_answer("gpu") if gpus is None else judge_gpus(gpus, torch))
    findings.append(criu_work.result(_PROGRAMS_S) or _no_answer("criu"))
    findings.append(namespace_work.result(_PROGRAMS_S) or _no_answer("pid namespaces"))
    findings.append(lock_work.result(_FOLDER_S) or _no_locks(images))
    if gpus is not None:
        findings.append(judge_checkpoint_api(gpus))
    return findings


def _no_answer(check: str) -> Finding:
    return Finding(
        check=check,
        status=Status.WARNING,
        found=f"no answer within {_PROGRAMS_S:.0f} s",
        why="a program that does not answer may also block a training",
        fix="look for driver errors in dmesg",
    )


def _no_locks(images: Path) -> Finding:
    return Finding(
        check="image locks",
        status=Status.WARNING,
        found=f"no answer within {_FOLDER_S:.0f} s from {images} or the temporary folder",
        why="a freeze or a restore may hang",
        fix="set XDG_STATE_HOME (for the images) and TMPDIR (for temporary files) to folders on a local disk",
    )


def _look_at_place(folder: Path) -> tuple[History, Disk | str]:
    def attempt() -> Disk | str:
        try:
            return look_at_folder(folder)
        except OSError as error:
            return error.strerror or str(error)

    disk = Work(attempt).result(_FOLDER_S)
    if disk is None:
        return History(), f"no answer within {_FOLDER_S:.0f} s"
    history = Work(lambda: look_at_history(folder)).result(_FOLDER_S)
    return history or History(), disk
