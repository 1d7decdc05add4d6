"""Programs of tests that are copies of a template: they see what new processes see; in doubt they are not copied."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.copies import copied_program
from tests.support.jobs import Job, environment, is_alive, no_orphans, read_events, safepoint, tiny, wait_until_gone

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(300),
    pytest.mark.skipif(copied_program.is_off, reason=f"{copied_program.VARIABLE}=0"),
]

TWO = ("--nproc-per-node", "2")
PROBE = Path(__file__).parent.parent / "programs" / "probe.py"
_SAME_IN_ALL_COPIES = {"hash", "set"}
"""What follows from the seed of the hashes of strings, which new processes draw."""
_WAITING = "import sys, time; from pathlib import Path; Path(sys.argv[1]).write_text('x'); time.sleep(600)"


def num_copied() -> int:
    return copied_program.counted[copied_program.COPIED]


def were_copied(output: Path) -> list[bool]:
    """By start of a job with a Trainer, whether it was imported before the ranks executed their first line."""
    phases = [{one["phase"]: one["at_s"] for one in event["phases"]} for event in read_events(output, "start_timed")]
    return [found["imports done"] <= found["script begun"] for found in phases]


def seen(folder: Path, fresh: str) -> list[dict[str, Any]]:
    """What two ranks see of themselves."""
    (folder / "out").mkdir(parents=True)
    job = safepoint(folder / "run", *TWO, program=[str(PROBE), "out"], fresh=fresh, cwd=folder)
    with no_orphans(job):
        assert job.wait(100) == 0, job.text
    return [json.loads((folder / "out" / f"probe-{rank}-1.json").read_text()) for rank in range(2)]


def test_a_copied_rank_sees_what_a_new_one_sees(tmp_path: Path) -> None:
    """Its process, environment, descriptors, threads, pickles and workers; only random numbers are its own."""
    before = num_copied()
    new, copied = seen(tmp_path / "new", "compared with a copy"), seen(tmp_path / "copied", "")
    assert num_copied() == before + 1
    for rank in range(2):
        for key, value in new[rank]["found"].items():
            if key not in _SAME_IN_ALL_COPIES:
                text = json.dumps(copied[rank]["found"][key])
                assert json.loads(text.replace(str(tmp_path / "copied"), str(tmp_path / "new"))) == value, key
    drawn = [number for one in (*new, *copied) for number in one["random"]]
    assert len(set(drawn)) == len(drawn), "every process draws its own"


def test_a_copied_launcher_looks_like_a_new_one(tmp_path: Path) -> None:
    """Command line, environment, name, folder, mask, limits, signals, session, group and parent."""
    (tmp_path / "waiting.py").write_text(_WAITING)
    found = []
    for name, fresh in (("new", "compared with a copy"), ("copied", "")):
        job = safepoint(tmp_path / "run", program=[str(tmp_path / "waiting.py"), str(tmp_path / name)], fresh=fresh)
        with no_orphans(job):
            job.wait_for("a rank", (tmp_path / name).exists)
            proc = Path(f"/proc/{job.process.pid}")
            status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
            fields = (proc / "stat").read_text().rsplit(")", 1)[1].split()
            command = [
                word for word in (proc / "cmdline").read_bytes().split(b"\0") if not word.endswith(name.encode())
            ]
            found.append(
                {
                    "command": command,
                    "environment": sorted((proc / "environ").read_bytes().split(b"\0")),
                    "comm": (proc / "comm").read_text(),
                    "parent, group, session, terminal": fields[1:5],
                    "folder": os.readlink(proc / "cwd"),
                    "streams": [os.readlink(proc / "fd" / str(number)) for number in range(3)],
                    "limits": (proc / "limits").read_text(),
                    **{key: status[key].strip() for key in ("Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs")},
                }
            )
    assert found[0] == found[1]


def test_also_restarted_ranks_are_copied(tmp_path: Path) -> None:
    """And they are children of the launcher, which is noticed when one is killed."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, "--save-steps", "1", program=tiny(output, "--step-ms", "100"))
    with no_orphans(job):
        job.wait_for_event("saved")
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        assert job.wait(100) == 0, job.text
    assert were_copied(output) == [True, True], job.text


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONHASHSEED": "3"},
        {"PYTHONWARNINGS": "error::BytesWarning"},
        {"OMP_NUM_THREADS": "2"},
        {"HOME": "/nowhere"},
        {"HF_HUB_OFFLINE": "0"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_another_environment_at_import_is_not_copied(variables: dict[str, str], tmp_path: Path) -> None:
    """The program is started as a new process, and has its environment."""
    (name,) = variables
    before = num_copied()
    command = [sys.executable, "-m", "safepoint.cli.main", "run", "--help"]
    job = Job(command, tmp_path / "run", log=tmp_path / "log", env=environment(**variables))
    assert job.wait() == 0, job.text
    assert num_copied() == before
    assert copied_program.counted[name] > 0


def test_a_test_can_ask_for_a_new_process(tmp_path: Path) -> None:
    """Its ranks are new processes, too."""
    output, before = tmp_path / "run", num_copied()
    job = safepoint(output, program=tiny(output, "--epochs", "1"), fresh="this is what the test is about")
    with no_orphans(job):
        assert job.wait(100) == 0, job.text
    assert num_copied() == before
    assert were_copied(output) == [False]


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Neither the template of its ranks, nor a rank."""
    output = tmp_path / "run"
    job = safepoint(output, program=tiny(output, "--step-ms", "100", "--epochs", "100"))
    with no_orphans(job):
        job.wait_for_step(1)
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        templates = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "copies\n"]
        ranks = job.rank_pids()
        assert len(templates) == 1
        job.process.kill()
        job.process.wait()
        wait_until_gone([*templates, *ranks])


_TESTS = """
import os, signal, sys
from pathlib import Path
from tests.support.copies import copied_program
from tests.support.jobs import is_alive, safepoint, wait_until_gone
children = lambda: list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
jobs = [safepoint(Path("1"), program=["no-such-program"])]
(template,) = set(children()) - {jobs[0].process.pid}
assert jobs[0].wait() == 2
os.kill(template, signal.SIGKILL)
jobs.append(safepoint(Path("2"), program=["no-such-program"]))
assert jobs[1].wait() == 2, jobs[1].text
assert [job.text for job in jobs] == [jobs[0].text] * 2
assert copied_program.counted[copied_program.COPIED] == 1, copied_program.counted
"""


def test_without_its_template_a_test_goes_on(tmp_path: Path) -> None:
    """Later programs are new processes, and a line says why."""
    done = subprocess.run(
        [sys.executable, "-c", _TESTS], cwd=tmp_path, env=_of_tests(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "started as a new process: the template failed" in done.stderr


_ENDING = """
import os, sys
from pathlib import Path
from tests.support.jobs import safepoint
job = safepoint(Path("1"), program=["no-such-program"])
pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
job.wait()
print(pids)
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


def test_a_template_ends_with_its_test_process(tmp_path: Path) -> None:
    """Also if that is killed."""
    done = subprocess.run(
        [sys.executable, "-c", _ENDING], cwd=tmp_path, env=_of_tests(), stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2
    wait_until_gone(pids)
    assert not any(map(is_alive, pids))


def _of_tests() -> dict[str, str]:
    """The environment of a test process."""
    root = Path(__file__).parents[2]
    return {**environment(), "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(root))))}
