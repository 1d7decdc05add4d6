"""Programs that start other programs, under `safepoint run`."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.equality import assert_same_run
from tests.support.jobs import is_alive, no_orphans, read_events, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

_DAEMONS = """
import subprocess, sys
child = "import subprocess; print('left', subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", child])
deaf = "trap '' TERM; echo left $$; sleep 300 & wait"
print(subprocess.Popen(deaf, shell=True, start_new_session=True, stdout=subprocess.PIPE).stdout.readline().decode())
"""


def test_accelerate_launch_starts_no_ranks_of_its_own(tmp_path: Path) -> None:
    """Its script is trained by Safepoint's ranks, interrupted and resumed, and the result is that of the script."""
    command = ["accelerate", "launch", "--cpu", "--mixed_precision", "no", "--num_processes", "3"]
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, "--nproc-per-node", "2", program=tiny(reference))
    with no_orphans(job):
        assert job.wait(100) == 0, job.text
    job = safepoint(output, "--nproc-per-node", "2", program=[*command, *tiny(output, "--step-ms", "200")])
    with no_orphans(job):
        job.wait_for_step(3)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    assert "configured for 3 processes, and Safepoint has started 2" in job.text
    job = safepoint(output, "--nproc-per-node", "2", program=[*command, *tiny(output)])
    with no_orphans(job):
        assert job.wait(100) == 0, job.text
    assert read_events(output, "resumed")
    assert_same_run(output, reference)


def test_what_a_script_leaves_behind_ends_with_the_run(tmp_path: Path) -> None:
    """A daemon, and a process that ignores SIGTERM, are gone when the launcher has ended; a warning names them."""
    (tmp_path / "daemons.py").write_text(_DAEMONS)
    job = safepoint(tmp_path / "out", program=[str(tmp_path / "daemons.py")])
    with no_orphans(job):
        assert job.wait(60) == 0, job.text
    left = [int(line.split()[1]) for line in job.text.splitlines() if line.startswith("left ")]
    assert len(left) == 2, job.text
    assert "the script left processes behind" in job.text
    assert not [pid for pid in left if is_alive(pid)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["torchrun", "--nproc_per_node", "2", "train.py"], "starts processes that Safepoint does not supervise"),
        (["python", "train.py"], "leave out python"),
        (["no-such-command"], "there is no script no-such-command"),
    ],
)
def test_what_is_no_script_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    """The message says what to type instead; the exit code is that of a usage error."""
    job = safepoint(tmp_path, program=words)
    assert job.wait(60) == 2, job.text
    assert message in job.text
