"""Jobs on this machine with real supervisors, launchers and ranks: after any kill, the stored state becomes right."""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.foundation.processes import processes_of
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.states import JobState
from tests.support.equality import finals, same
from tests.support.jobs_local import Place, jobs_in, tell_to_stop
from tests.support.moto_server import MotoServer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
long = pytest.mark.long

COMPLETE, FAILED, RUNNING, QUEUED = JobState.COMPLETE, JobState.FAILED, JobState.RUNNING, JobState.QUEUED
SUSPENDED, PREEMPTED = JobState.SUSPENDED, JobState.PREEMPTED
LAST_STEP = 18


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with jobs_in(tmp_path) as place:
        yield place


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A job that is not interrupted: `alone`."""
    with jobs_in(tmp_path_factory.mktemp("reference")) as place:
        place.jobs.submit(place.training("alone", "--step-ms", "0"))
        place.complete("alone")
        yield place


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A job on two nodes that is not interrupted: `pair`."""
    with jobs_in(tmp_path_factory.mktemp("pair")) as place:
        place.jobs.submit(place.training("pair", "--step-ms", "0", num_nodes=2))
        place.complete("pair")
        yield place


def assert_same(output: Path, reference: Path, num_ranks: int = 1) -> None:
    """The result is equal, bit for bit."""
    ours, theirs = finals(output, num_ranks), finals(reference, num_ranks)
    for rank in range(num_ranks):
        assert same(ours[rank], theirs[rank]), f"rank {rank} differs"


def states(place: Place, name: str) -> list[str]:
    """The states of the job, in order."""
    names = {str(state).lower() for state in JobState}
    with History() as history:
        return [event.name for event in history.events(name) if event.name in names]


def test_submitted_it_runs_to_its_end(reference: Place) -> None:
    """State, attempt, exit code, events and output are stored, and no process is left."""
    job = reference.jobs.job("alone")
    assert (job.state, job.exit_code, job.attempt, job.message) == (COMPLETE, 0, 1, "")
    [attempt] = reference.jobs.attempts("alone")
    assert (attempt.num_nodes, attempt.outcome, attempt.exit_code) == (1, "Complete", 0)
    names = [event.name for event in reference.jobs.events("alone")]
    assert names[0] == "submitted"
    assert names[-1] == "complete"
    assert "attempt_started" in names
    assert states(reference, "alone") == ["running", "complete"]
    progress = reference.jobs.progress_of(reference.jobs.job("alone"))
    assert progress is not None
    assert progress.step == LAST_STEP
    sources = {line.source for line in reference.jobs.logs("alone")}
    assert "rank 0" in sources
    assert job.safe_step == LAST_STEP


def test_suspended_and_resumed_it_ends_as_if_nothing_had_been(place: Place, reference: Place) -> None:
    """Exit code 75, the saved step, no process meanwhile, and a bit-equal result."""
    place.jobs.submit(place.training("a"))
    place.wait_for_mark("a", 4)
    job = place.jobs.suspend("a", timeout_s=60)
    assert (job.state, job.wanted, job.exit_code) == (SUSPENDED, RequestedAction.SUSPEND, 75), place.story("a")
    assert processes_of(job_folder("a")) == []
    [step] = place.steps("a")
    assert job.safe_step == step
    assert job.message == f"step {step} is saved"
    place.jobs.resume("a")
    job = place.complete("a")
    assert (job.attempt, job.setbacks) == (2, 0)
    assert states(place, "a")[:6] == ["running", "suspending", "suspended", "queued", "resuming", "running"]
    [resumed] = place.events("a", "resumed")
    assert resumed["step"] == step
    assert_same(place.output("a"), reference.output("alone"))


@long
def test_a_checkpoint_that_was_named_is_where_it_begins_once(place: Place, reference: Place) -> None:
    """After a suspension it resumes from the newest step, not from the one that `--resume` named."""
    place.jobs.submit(place.training("a", settings={"save_steps": 2}))
    place.wait_for_saved("a", 4)
    place.jobs.delete("a", timeout_s=90)
    place.jobs.submit(place.training("a", settings={"resume": str(place.output("a") / "checkpoint-4")}))
    place.wait_for_mark("a", 9)
    safe = place.jobs.suspend("a", timeout_s=60).safe_step
    place.jobs.resume("a")
    place.complete("a")
    assert [event["step"] for event in place.events("a", "resumed")] == [4, safe]
    assert_same(place.output("a"), reference.output("alone"))


def test_resumed_from_an_older_checkpoint(place: Place, reference: Place) -> None:
    """The next start begins there and moves the newer ones aside; the start after it resumes from the newest."""
    place.jobs.submit(place.training("a", "--resumed-step-ms", "600", settings={"save_steps": 2}))
    place.wait_for_saved("a", 6)
    newest = place.jobs.suspend("a", timeout_s=60).safe_step
    place.jobs.resume("a", step=2)
    place.wait_for("a save", lambda: place.events("a", "resumed") and 4 in place.steps("a"), "a")
    safe = place.jobs.suspend("a", timeout_s=60).safe_step
    assert [path.name for path in place.output("a").glob(f"set-aside-*/checkpoint-{newest}")]
    place.jobs.resume("a")
    place.complete("a")
    assert [event["step"] for event in place.events("a", "resumed")] == [2, safe]
    assert_same(place.output("a"), reference.output("alone"))


@long
def test_scaled_up_and_down_no_sample_is_lost(place: Place) -> None:
    """1 → 2 → 1 nodes: each time it resumes from the step at which it stopped."""
    # The loop's sampler deals samples by the number of ranks.
    place.jobs.submit(place.training("a", "--resumed-step-ms", "300", settings={"allow_batch_change": True}))
    place.wait_for_mark("a", 2)
    assert place.jobs.scale("a", 2, timeout_s=60).spec.num_nodes == 2
    place.wait_for_mark("a", 7, rank=1)
    place.jobs.scale("a", 1, timeout_s=60)
    assert place.complete("a").attempt == 3
    assert [attempt.num_nodes for attempt in place.jobs.attempts("a")] == [1, 2, 1]
    assert [event["world_size"] for event in place.events("a", "attempt_started")] == [1, 2, 1]
    stops = [event["step"] for event in place.events("a", "stop_requested")]
    assert [event["step"] for event in place.events("a", "resumed")] == stops
    assert [event["step"] for event in place.events("a", "finished")] == [LAST_STEP]
    causes = [event.cause for event in place.jobs.events("a") if event.name == "changed"]
    assert causes == ["1 → 2 nodes", "2 → 1 nodes"]


def test_preempted_it_comes_back_by_itself(tmp_path: Path, reference: Place) -> None:
    """A job of higher priority takes the only slot; the first job resumes when it has ended."""
    with jobs_in(tmp_path, cpu_slots=1) as place:
        place.jobs.submit(place.training("weak"))
        place.wait_for_mark("weak", 4)
        place.jobs.submit(place.script("strong", "print('was here')", priority=1))
        place.jobs.wait("weak", [PREEMPTED], timeout_s=60)
        assert place.complete("strong").attempt == 1
        job = place.complete("weak")
        assert (job.attempt, job.setbacks) == (2, 0)
        history = states(place, "weak")
        assert history[:3] == ["running", "suspending", "preempted"]
        assert "restarting" not in history
        assert "was here" in place.printed("strong")
        assert_same(place.output("weak"), reference.output("alone"))


# What is killed, and how many attempts there are then: no training process is a child of a supervisor, and a rank or
# a keeper is replaced by its launcher.
KILLS = [
    pytest.param(("supervisor", "launcher"), 2, id="supervisor+launcher"),
    pytest.param(("launcher",), 2, id="launcher", marks=long),
    pytest.param(("keeper",), 1, id="keeper", marks=long),
    pytest.param(("rank",), 1, id="rank", marks=long),
    pytest.param(("supervisor",), 1, id="supervisor", marks=long),
    pytest.param(("supervisor", "rank"), 1, id="supervisor+rank", marks=long),
    pytest.param(("launcher", "keeper"), 2, id="launcher+keeper", marks=long),
    pytest.param(("all",), 2, id="everything", marks=long),
]


@pytest.mark.parametrize(("kinds", "num_attempts"), KILLS)
def test_whatever_is_killed_the_job_ends_as_if_nothing_had_been(
    place: Place, reference: Place, kinds: tuple[str, ...], num_attempts: int
) -> None:
    """After SIGKILL in mid-training; waiting for the job starts a missing supervisor."""
    place.jobs.submit(place.training("a", settings={"save_steps": 2}))
    place.wait_for_saved("a", 4)
    place.kill("a", *kinds)
    job = place.complete("a")
    assert (job.exit_code, job.attempt) == (0, num_attempts), place.story("a")
    assert_same(place.output("a"), reference.output("alone"))
    if num_attempts == 2:
        first = place.jobs.attempts("a")[0]
        assert "it was killed" in first.outcome
        assert first.exit_code is None


def connect(server: MotoServer) -> None:
    """Write the keys of the connection `store`."""
    connections = Path(os.environ["XDG_CONFIG_HOME"], "safepoint", "connections.toml")
    connections.parent.mkdir(parents=True)
    connections.touch(mode=0o600)
    connections.write_text("[store]\n" + "".join(f'{name} = "{text}"\n' for name, text in server.variables.items()))


@long
def test_suspended_while_its_store_is_away_it_is_safe_here_only(place: Place, moto: MotoServer) -> None:
    """The message warns that the step is on this machine only; a resume uploads it."""
    connect(moto)
    location = str(moto.location(f"away-{uuid.uuid4().hex[:8]}"))
    settings = {"output_dir": location, "local_dir": str(place.output("a")), "save_steps": 2, "grace_s": 15.0}
    place.jobs.submit(place.training("a", settings=settings, data_connection="store"))
    place.wait_for("an upload", lambda: place.events("a", "uploaded"), "a")
    moto.stop()
    try:
        job = place.jobs.suspend("a", timeout_s=60)
    finally:
        moto.start()
    assert job.state is SUSPENDED
    assert f"is saved on this machine only; when the job resumes, this step is uploaded to {location}" in job.message
    place.jobs.resume("a")
    assert place.complete("a").message == ""


@long
@pytest.mark.parametrize("kinds", [("uploader",), ("uploader", "launcher"), ("uploader", "supervisor")], ids="+".join)
def test_who_brings_checkpoints_to_a_store_may_be_killed(
    place: Place, reference: Place, moto: MotoServer, kinds: tuple[str, ...]
) -> None:
    """The uploader is killed: the result is the same, and the store has the last step."""
    connect(moto)
    prefix = f"jobs-{uuid.uuid4().hex[:8]}"
    settings = {"output_dir": str(moto.location(prefix)), "local_dir": str(place.output("a")), "save_steps": 2}
    place.jobs.submit(place.training("a", settings=settings, data_connection="store"))
    place.wait_for("an upload", lambda: place.events("a", "uploaded"), "a")
    place.kill("a", *kinds)
    job = place.complete("a")
    assert (job.exit_code, job.attempt) == (0, 2 if "launcher" in kinds else 1), place.story("a")
    assert_same(place.output("a"), reference.output("alone"))
    assert f"checkpoint-{LAST_STEP}/{MANIFEST_NAME}" in [item.key for item in moto.store(prefix).list()]


@long
def test_killed_at_any_time_again_and_again(place: Place, reference: Place) -> None:
    """All running processes are killed, five times."""
    seed = int(os.environ.get("SAFEPOINT_TEST_SEED", random.randrange(2**32)))
    print(f"SAFEPOINT_TEST_SEED={seed}")
    chance = random.Random(seed)
    place.jobs.submit(place.training("a", "--resumed-step-ms", "600", settings={"save_steps": 1}))
    for _ in range(5):
        time.sleep(chance.uniform(0, 12))  # the moment is what is tried out
        kind = chance.choice(["supervisor", "launcher", "keeper", "rank", "all"])
        pids = place.processes("a", kind)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        print(f"killed {kind} {pids}")
        with LocalJobs():  # any command
            pass
    place.complete("a", timeout_s=300)
    assert_same(place.output("a"), reference.output("alone"))


_SUBMIT = """
import sys, time
from pathlib import Path
from tests.support.jobs_local import Place
place = Place(Path(sys.argv[1]))
place.jobs.submit(place.training("a"))
print("submitted", flush=True)
time.sleep(600)
"""


@long
def test_whoever_submitted_it_may_be_killed(place: Place, reference: Place) -> None:
    """The submitting process group is killed, as when a terminal is closed; the job continues."""
    root = Path(__file__).parent.parent.parent
    environ = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [sys.executable, "-c", _SUBMIT, str(place.root)], stdout=subprocess.PIPE, env=environ, start_new_session=True
    ) as submitter:
        assert submitter.stdout is not None
        assert submitter.stdout.readline() == b"submitted\n"
        os.killpg(submitter.pid, signal.SIGHUP)
        os.killpg(submitter.pid, signal.SIGKILL)
    assert place.complete("a").attempt == 1
    assert_same(place.output("a"), reference.output("alone"))


@long
def test_a_supervisor_that_is_told_to_leave_takes_the_job_with_it(place: Place, reference: Place) -> None:
    """At a shutdown the job is saved, and the next command continues it."""
    place.jobs.submit(place.training("a"))
    place.wait_for_mark("a", 4)
    [pid] = place.processes("a", "supervisor")
    tell_to_stop(pid)
    place.wait_for("the supervisor's end", lambda: not place.processes("a", "supervisor"), "a")
    job = place.jobs.job("a")
    assert (job.state, job.wanted, job.exit_code) == (PREEMPTED, RequestedAction.RUN, 75)
    assert processes_of(job_folder("a")) == []
    with LocalJobs():
        pass
    assert place.complete("a").attempt == 2
    assert_same(place.output("a"), reference.output("alone"))


@long
@pytest.mark.parametrize("node", [0, 1])
def test_of_two_nodes_one_launcher_is_killed(place: Place, two_nodes: Place, node: int) -> None:
    """Both launchers are started again, and the result is equal, bit for bit."""
    place.jobs.submit(place.training("a", num_nodes=2, settings={"save_steps": 2}))
    place.wait_for_saved("a", 4)
    os.kill(place.launchers("a")[node], signal.SIGKILL)
    job = place.complete("a", timeout_s=250)
    assert job.attempt == 2, place.story("a")
    assert "it was killed" in place.jobs.attempts("a")[0].outcome
    assert_same(place.output("a"), two_nodes.output("pair"), num_ranks=2)


@long
def test_two_nodes_are_suspended_at_one_step(place: Place, two_nodes: Place) -> None:
    """One request leads to one step and one exit code."""
    place.jobs.submit(place.training("a", num_nodes=2))
    place.wait_for_mark("a", 4)
    job = place.jobs.suspend("a", timeout_s=60)
    assert (job.state, job.exit_code, [job.safe_step]) == (SUSPENDED, 75, place.steps("a"))
    place.jobs.resume("a")
    place.complete("a")
    assert_same(place.output("a"), two_nodes.output("pair"), num_ranks=2)


def test_a_program_that_fails_has_failed(place: Place) -> None:
    """The job has the exit code of the program, and is not started again."""
    place.jobs.submit(place.script("a", "import sys\nprint('no')\nsys.exit(3)"))
    job = place.jobs.wait("a", [FAILED], timeout_s=120)
    assert (job.exit_code, job.attempt, job.wanted) == (3, 1, RequestedAction.RUN), place.story("a")
    assert job.message == "exit code 3; see its logs"
    assert "no" in place.printed("a")


@long
def test_what_failed_is_tried_again_when_a_person_says_so(place: Place) -> None:
    """`resume` starts a failed job again after the program was corrected."""
    spec = place.script("a", "raise SystemExit(3)")
    place.jobs.submit(spec)
    place.jobs.wait("a", [FAILED], timeout_s=120)
    Path(spec.program[0]).write_text("print('yes')")
    place.jobs.resume("a")
    assert place.complete("a").attempt == 2
    assert "yes" in place.printed("a")


@long
def test_on_two_nodes_the_failed_programs_exit_code_counts(place: Place) -> None:
    """The exit code of the failed node counts, not that of the node that lost it."""
    code = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(300)
"""
    place.jobs.submit(place.script("a", code, num_nodes=2))
    job = place.jobs.wait("a", [FAILED], timeout_s=120)
    assert (job.exit_code, job.attempt) == (3, 1), place.story("a")


@long
def test_a_job_waits_for_its_slots_and_starts(tmp_path: Path) -> None:
    """With equal priority, the first job keeps the slots until it ends."""
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[0] + '.go'): time.sleep(0.05)"
    with jobs_in(tmp_path, cpu_slots=1) as place:
        place.jobs.submit(place.script("first", wait))
        place.jobs.wait("first", [RUNNING], timeout_s=60)
        place.jobs.submit(place.script("second", "print('at last')"))
        job = place.jobs.wait("second", [QUEUED], timeout_s=60)
        assert job.message == "waits for 1 of 1 CPU slots"
        assert place.jobs.job("first").wanted is RequestedAction.RUN
        (tmp_path / "first.py.go").touch()
        place.complete("second")
        place.complete("first")
        [first], [second] = place.jobs.attempts("first"), place.jobs.attempts("second")
        assert first.ended is not None
        assert second.started >= first.ended


@long
def test_deleted_while_it_runs_its_checkpoints_stay_until_they_are_asked_for(place: Place, reference: Place) -> None:
    """A new job resumes from them; `--checkpoints` leaves only foreign ones."""
    output = place.output("a")
    place.jobs.submit(place.training("a", settings={"save_steps": 2}))
    place.wait_for_saved("a", 4)
    (output / "checkpoint-1").mkdir()
    (output / "checkpoint-1" / "model.bin").write_bytes(b"foreign")
    pids = processes_of(job_folder("a"))  # not the supervisor, which forgets the job and then ends
    place.jobs.delete("a", timeout_s=90)
    assert place.jobs.jobs() == []
    assert not job_folder("a").exists()
    assert not [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and _is_ours(pid)]
    saved = place.steps("a")[-1]
    place.jobs.submit(place.training("a"))
    assert place.complete("a").attempt == 1
    assert place.events("a", "resumed")[-1]["step"] == saved
    assert_same(output, reference.output("alone"))
    place.jobs.delete("a", with_checkpoints=True)
    assert place.jobs.jobs() == []
    assert place.steps("a") == []
    assert (output / "checkpoint-1" / "model.bin").read_bytes() == b"foreign"
    assert (output / "final-0.pt").exists(), "what the script itself has written"


def _is_ours(pid: int) -> bool:
    try:
        return b"safepoint" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@long
def test_keys_are_never_on_a_disk_nor_on_a_command_line(place: Place) -> None:
    """Only the rank's environment has the keys: no file, argument list or log."""
    secret = f"geheim-{random.getrandbits(64):x}"
    folder = place.root / "config" / "safepoint"
    folder.mkdir(parents=True)
    connections = folder / "connections.toml"
    connections.write_text(f'[minio]\nAWS_ACCESS_KEY_ID = "me"\nAWS_SECRET_ACCESS_KEY = "{secret}"\n')
    connections.chmod(0o600)
    wait = """
import hashlib, os, sys, time
print(hashlib.sha256(os.environ["AWS_SECRET_ACCESS_KEY"].encode()).hexdigest(), flush=True)
while not os.path.exists(sys.argv[0] + ".go"): time.sleep(0.05)
"""
    place.jobs.submit(place.script("a", wait, data_connection="minio", settings={"grace_s": 2.0, "verbosity": 2}))
    printed = place.wait_for("a line", lambda: place.printed("a"), "a")
    assert hashlib.sha256(secret.encode()).hexdigest() in printed
    for _ in range(2):
        for path in place.root.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # what is written atomically has another name before
                assert path == connections or not path.is_file() or secret.encode() not in path.read_bytes(), path
        for process in Path("/proc").glob("[0-9]*"):
            try:
                assert secret.encode() not in (process / "cmdline").read_bytes(), process
            except OSError:
                continue
        assert secret not in place.story("a")
        (place.root / "a.py.go").touch()
        place.complete("a")
