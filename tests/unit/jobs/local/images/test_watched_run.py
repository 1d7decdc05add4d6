"""`safepoint run --freeze-as-last-resort` ends at the start where it cannot keep its promise."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.cli.commands import run as run_command
from safepoint.errors import ExitCode, FreezeError, SafepointError
from safepoint.foundation.events.stream import read_events
from safepoint.foundation.processes import identify
from safepoint.jobs.cluster.records.pod_image import image_of
from safepoint.jobs.local.attempt.thaw_watch import ThawWatch
from safepoint.jobs.local.images import watched_run
from safepoint.jobs.local.images.last_resort import LastResort
from safepoint.jobs.local.images.watched_run import _End, _WatchedRun
from safepoint.progress.record import Progress, State
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.transparent import self_test
from safepoint.transparent.criu import program
from safepoint.transparent.criu.program import VARIABLE, Criu
from safepoint.transparent.images.location import ImageLocation
from tests.support.commands import safepoint
from tests.support.criu_images import add_image

OUTPUT = ("--output-dir", "out")
REFUSED = [
    pytest.param((), {}, ExitCode.USAGE, "needs --output-dir", id="no output folder"),
    pytest.param(
        (*OUTPUT, "--nnodes", "2", "--master-addr", "a"), {}, ExitCode.NOT_SUPPORTED, "nodes", id="several nodes"
    ),
    pytest.param(OUTPUT, {VARIABLE: "/no/criu"}, ExitCode.NOT_SUPPORTED, "/no/criu", id="no CRIU"),
]


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('begun', 'w')")


@pytest.mark.parametrize(("options", "variables", "code", "text"), REFUSED)
def test_it_is_refused_before_anything_starts(
    options: tuple[str, ...],
    variables: dict[str, str],
    code: ExitCode,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the option's exit code, and a message that says why."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = safepoint("run", "--freeze-as-last-resort", *options, "train.py")
    assert (outcome.code, text in outcome.stderr) == (code, True), outcome.stderr
    assert not (tmp_path / "begun").exists()


def test_a_machine_on_which_the_trial_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16, whatever has failed, and with its hint."""

    def fail(*_: object) -> None:
        raise SafepointError("the kernel says no", hint="update it")

    monkeypatch.setattr(self_test, "find_criu", lambda: Criu(path="criu", version="4.2.1"))
    monkeypatch.setattr(self_test, "try_out", fail)
    with pytest.raises(SafepointError, match="the kernel says no") as caught:
        self_test.find_working_criu()
    assert (caught.value.exit_code, caught.value.hint) == (ExitCode.NOT_SUPPORTED, "update it")


def test_a_pod_has_no_such_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive for most pods lacks the module."""
    import sys

    monkeypatch.setitem(sys.modules, "safepoint.jobs.local.images.watched_run", None)  # pyright: ignore
    with pytest.raises(SafepointError, match="no modules for process images") as caught:
        run_command._run_watched()
    assert caught.value.exit_code == ExitCode.NOT_SUPPORTED


def test_the_trial_needs_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CRIU, the reason is that of every other command."""
    monkeypatch.setenv(VARIABLE, "/no/criu")
    with pytest.raises(SafepointError, match="/no/criu"):
        program.find_criu()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[_WatchedRun, "subprocess.Popen[bytes]"]]:
    """A run whose launcher is a program that sleeps."""
    settings = RunSettings(output_dir=str(tmp_path / "out"))
    OutputFolder(tmp_path / "out").prepare()
    plan = LaunchPlan(program=(str(tmp_path / "train.py"),))
    run = _WatchedRun(plan, settings, Criu(path="criu", version="4.2.1"))
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as launcher:
        run._launcher = identify(launcher.pid)
        yield run, launcher
        launcher.kill()


def test_restored_processes_without_progress_are_ended(
    watched: tuple[_WatchedRun, "subprocess.Popen[bytes]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the run continues from its newest checkpoint."""
    run, launcher = watched
    monkeypatch.setattr(ThawWatch, "is_stuck", lambda _: True)
    assert run._watch(None) is _End.STUCK
    assert launcher.wait() == -signal.SIGKILL
    assert [event["event"] for event in read_events(tmp_path / "out" / ".safepoint" / "events.jsonl")] == [
        "thawed_without_progress"
    ]


def test_a_stop_during_a_freeze_reaches_the_launcher_when_it_runs_on(
    watched: tuple[_WatchedRun, "subprocess.Popen[bytes]"],
) -> None:
    """A signal to a stopped process would be in the image, and stop the job as soon as it was restored."""
    run, launcher = watched
    assert run._launcher is not None
    with run._forwarding():
        with run._holding(run._launcher, is_needed=True):
            os.kill(os.getpid(), signal.SIGTERM)
            run._wait_for_stop()  # the job is stopped: it would end here
            assert launcher.poll() is None
        assert launcher.wait() == -signal.SIGTERM


def test_a_freeze_without_a_stop_fails(
    watched: tuple[_WatchedRun, "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the processes run on, and do not stay stopped for ever."""
    monkeypatch.setattr(watched_run, "HOLD_S", 0.0)
    with pytest.raises(FreezeError, match="no stop signal arrived"):
        watched[0]._wait_for_stop()


def test_an_image_at_the_deadline_is_in_the_termination_message(
    watched: tuple[_WatchedRun, "subprocess.Popen[bytes]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher, which writes this message otherwise, is in the image. Commands on a cluster read the message."""
    location = ImageLocation(tmp_path / "out" / "images")
    manifest = add_image(location, tmp_path / "dump", {100: b"x" * 4096})
    log = tmp_path / "termination-log"
    progress = Progress(time="2026-11-27T10:00:00Z", state=State.TRAINING, step=7, safe_step=5)
    (tmp_path / "out" / ".safepoint" / "progress.json").write_bytes(progress.to_bytes())

    def freeze(resort: LastResort, before_end: Callable[[str], None]) -> Any:
        before_end(location.where(manifest.name))
        return SimpleNamespace(manifest=manifest, frozen_s=1.0)

    monkeypatch.setattr(LastResort, "freeze", freeze)
    monkeypatch.setattr(watched_run, "images_in", lambda folder: nullcontext(location))
    monkeypatch.setattr(watched_run, "TERMINATION_LOG", log)
    resort = LastResort(RunSettings(), [os.getpid()], location.folder)
    assert watched[0]._freeze(resort)
    assert not log.exists(), "only a platform makes the file"
    log.touch()
    assert watched[0]._freeze(resort)
    message = json.loads(log.read_bytes())
    image = image_of(message["processImage"], "pvc://ckpt/x")
    assert image is not None
    assert (image.path, image.num_processes) == (f"pvc://ckpt/x/images/{manifest.name}", 1)
    assert message["currentStep"] == 5, "step 7 is in the image, and not in a checkpoint"
