"""Invalid input: a clear message, no data lost, the right exit code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.support.jobs import committed_steps, environment, no_orphans, read_events, safepoint, tiny
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def ends(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "safepoint.cli.main", "run", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120 * PATIENCE, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["missing.py"], "missing.py"),
        (["--save-steps", "0", "script.py"], "--save-steps 0"),
        (["--save-strategy", "sometimes", "script.py"], "sometimes"),
        (["--save-strategy", "epoch", "--save-steps", "5", "script.py"], "contradicts"),
        (["--save-total-limit", "0", "script.py"], "--save-total-limit 0"),
        (["--grace", "-1", "script.py"], "--grace"),
        (["--nnodes", "2", "script.py"], "--master-addr"),
        (["--nproc-per-node", "none", "script.py"], "--nproc-per-node"),
        (["--unknown", "script.py"], "--unknown"),
        (["--from-scratch", "--resume", "x", "script.py"], "contradicts"),
        (["--resume", "nowhere", "script.py"], "--resume nowhere"),
        (["-m", "no_such_module"], "no_such_module"),
        (["-m", "script.py"], "to run a file, leave out -m"),
        (["notes.ipynb"], "notes.ipynb is a notebook, not a Python script"),
        (["start.sh"], "name the Python script that start.sh starts"),
        ([], "SCRIPT"),
    ],
)
def test_usage_errors_exit_2_before_anything_starts(tmp_path: Path, arguments: list[str], word: str) -> None:
    """The message names the invalid setting, and no rank is started."""
    for name in ("script.py", "notes.ipynb", "start.sh"):
        (tmp_path / name).write_text("raise SystemExit('it was started')")
    code, text = ends(tmp_path, *arguments)
    assert code == 2, text
    assert word in text
    assert "it was started" not in text
    assert "Traceback" not in text


def test_a_script_that_raises_shows_its_own_traceback_once(tmp_path: Path) -> None:
    """The user's traceback is printed once; the script is not restarted, and exits with 1."""
    output = tmp_path / "run"
    job = safepoint(output, program=tiny(output, "--raise-at-start"))
    with no_orphans(job):
        assert job.wait() == 1
    assert job.text.count("RuntimeError: this script fails on purpose") == 1
    assert "runpy" not in job.text


def test_a_script_that_cannot_be_compiled_is_reported_as_by_python(tmp_path: Path) -> None:
    """The message names the file and the line, without a traceback of Safepoint."""
    (tmp_path / "script.py").write_text("x = 1\ndef f(:\n")
    code, text = ends(tmp_path, "script.py")
    assert code == 1
    assert f'  File "{tmp_path}/script.py", line 2\n' in text
    assert "SyntaxError: invalid syntax" in text
    assert "Traceback" not in text


def test_the_scripts_own_exit_code_is_passed_through(tmp_path: Path) -> None:
    """When the script calls sys.exit(42), the run exits with 42."""
    (tmp_path / "script.py").write_text("import sys; sys.exit(42)")
    code, _ = ends(tmp_path, "--max-restarts", "0", "script.py")
    assert code == 42


def test_a_script_without_a_trainer_just_runs(tmp_path: Path) -> None:
    """Its arguments, its name, its file and its folder on sys.path are as under plain Python."""
    (tmp_path / "neighbour.py").write_text("value = 3")
    (tmp_path / "script.py").write_text(
        "import os, sys, neighbour; assert __name__ == '__main__'; os.chdir('/'); assert os.path.isabs(__file__)\n"
        "assert sys.modules['__main__'].__file__ == __file__; print(sys.argv, neighbour.value)"
    )
    command = [sys.executable, "-m", "safepoint.cli.main", "run", "script.py", "--save-steps", "0", "-v"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['script.py', '--save-steps', '0', '-v'] 3"


def test_an_output_folder_that_is_a_file_is_refused_at_the_start(tmp_path: Path) -> None:
    """The run exits with 13 before the first step, and the file is unchanged."""
    (tmp_path / "taken").write_text("mine")
    output = tmp_path / "run"
    job = safepoint(output, "--output-dir", str(tmp_path / "taken"), program=tiny(output))
    with no_orphans(job):
        assert job.wait() == 13, job.text
    assert "taken" in job.text
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """The run exits with 13 and the reason; not even root can write to /sys."""
    output = tmp_path / "run"
    job = safepoint(output, "--output-dir", "/sys/safepoint", program=tiny(output))
    with no_orphans(job):
        assert job.wait() == 13, job.text
    assert "/sys/safepoint" in job.text


def test_two_runs_on_one_folder_are_a_conflict(tmp_path: Path) -> None:
    """The second run waits for its grace period, names the owner of the folder, and exits with 11."""
    output = tmp_path / "run"
    first = safepoint(output, program=tiny(output, "--step-ms", "100", "--epochs", "100"))
    with no_orphans(first):
        first.wait_for_step(1)
        second = safepoint(output, "--grace", "1", program=tiny(output), log=tmp_path / "second.log")
        with no_orphans(second):
            assert second.wait() == 11, second.text
        assert str(first.rank_pids()[0]) in second.text
        first.signal()
        assert first.wait() == 75


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_fails_the_save_and_not_the_training(small_disk: Path, tmp_path: Path) -> None:
    """Failed periodic saves are reported, the older checkpoint stays, training finishes."""
    output = small_disk / "run"
    options = ("--save-strategy", "steps", "--save-steps", "4", "--hidden", "128", "--max-steps", "12")
    job = safepoint(output, "--max-restarts", "0", program=tiny(output, *options), log=tmp_path / "log")
    with no_orphans(job):
        job.wait_for_event("saved")
        (small_disk / "ballast").write_bytes(b"x" * free_bytes(small_disk))
        # The script's own `save_model`, after the training, meets the same full disk.
        assert job.wait() == 1, job.text
    # The event stream is on the same full disk; the console is not.
    assert "could not be saved" in job.text, job.text
    assert "safepoint: training finished at step 12" in job.text
    steps = committed_steps(output)
    assert steps
    assert all(verify(path).is_valid for path in list_checkpoints(output))


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize - 20_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with checkpoints of steps 4 and 8. Copy it, do not change it."""
    output = tmp_path_factory.mktemp("finished") / "run"
    options = ("--save-strategy", "steps", "--save-steps", "4", "--max-steps", "8")
    job = safepoint(output, program=tiny(output, *options))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert committed_steps(output) == [4, 8]
    return output


def test_a_damaged_newest_checkpoint_means_the_older_one(finished: Path, tmp_path: Path) -> None:
    """A flipped byte is found and named before training; the run resumes from the older checkpoint."""
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    weights = output / "checkpoint-8" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    job = safepoint(output, program=tiny(output, "--max-steps", "8"))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    rejected = read_events(output, "checkpoint_rejected")
    assert [event["file"] for event in rejected] == ["model.safetensors"]
    assert read_events(output, "resumed")[-1]["step"] == 4
    assert "model.safetensors" in job.text


@pytest.mark.long
def test_only_damaged_checkpoints_stop_the_job_with_14(finished: Path, tmp_path: Path) -> None:
    """The run exits with 14 and names `--from-scratch`, which then works and deletes nothing."""
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    for path in list_checkpoints(output):
        (path / "optimizer.pt").unlink()
    job = safepoint(output, "--nproc-per-node", "2", program=tiny(output))
    with no_orphans(job):
        assert job.wait() == 14, job.text
    assert "--from-scratch" in job.text
    job = safepoint(output, "--from-scratch", program=tiny(output, "--max-steps", "4"))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert len(list(output.glob("set-aside-*/checkpoint-*"))) == 2


@pytest.mark.long
def test_a_named_checkpoint_is_where_the_run_goes_on(finished: Path, tmp_path: Path) -> None:
    """--resume PATH starts from an older checkpoint; newer ones are moved aside."""
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    job = safepoint(output, "--resume", str(output / "checkpoint-4"), program=tiny(output, "--max-steps", "6"))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert read_events(output, "resumed")[-1]["step"] == 4
    assert list(output.glob("set-aside-*/checkpoint-8"))


@pytest.mark.long
def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    """--save-total-limit counts committed checkpoints, newest first."""
    output = tmp_path / "run"
    options = ("--save-steps", "2", "--save-total-limit", "2")
    job = safepoint(output, *options, program=tiny(output, "--max-steps", "8"))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert committed_steps(output) == [6, 8]
    assert [event["step"] for event in read_events(output, "pruned")] == [2, 4]


@pytest.mark.long
def test_files_added_by_a_callback_belong_to_the_checkpoint(tmp_path: Path) -> None:
    """The manifest lists files that on_save callbacks add, and the checkpoint stays valid."""
    output = tmp_path / "run"
    job = safepoint(output, "--save-steps", "2", program=tiny(output, "--max-steps", "4", "--add-file"))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    for path in list_checkpoints(output):
        verdict = verify(path)
        assert verdict.is_valid, verdict.faults
        assert verdict.manifest is not None
        assert "notes-0.txt" in {entry.path for entry in verdict.manifest.files}
