"""Ranks that are copied from one process with all imports: as other ranks are, and never instead of a working job."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from safepoint.training.rank_processes.template_process import TemplateProcess
from tests.support.equality import assert_same_run
from tests.support.jobs import Job, no_orphans, read_events, safepoint, tiny, wait_until_gone
from tests.support.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

TWO = ("--nproc-per-node", "2")
PROBE = Path(__file__).parent.parent / "programs" / "probe.py"
_INSTALLED = """
import site, sys
folder = {folder!r}
folders = site.getsitepackages()
site.getsitepackages = lambda prefixes=None: [*folders, folder]
"""


def template_of(job: Job) -> int:
    """The pid of the template of a job that runs."""
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    (pid,) = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "safepoint-templ"]
    return int(pid)


def phases(event: dict[str, Any]) -> dict[str, float]:
    return {one["phase"]: one["at_s"] for one in event["phases"]}


def was_copied(event: dict[str, Any]) -> bool:
    """Whether the Trainer was imported before the ranks executed their first line."""
    return phases(event)["imports done"] <= phases(event)["script begun"]


def test_a_killed_rank_of_copies_is_replaced_by_a_copy(tmp_path: Path) -> None:
    """The result is that of a run that was neither copied nor interrupted, bit by bit."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, *TWO, program=tiny(reference), PYTHONHASHSEED="3")
    with no_orphans(job):
        assert job.wait(100) == 0, job.text
    program = tiny(output, "--step-ms", "100", "--save-strategy", "steps", "--save-steps", "1")
    job = safepoint(output, *TWO, "--preload", program=program, PYTHONHASHSEED="3")
    with no_orphans(job):
        job.wait_for_event("saved")
        template = template_of(job)
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        job.wait_for_event("attempt_started", count=2)
        assert template_of(job) == template
        assert job.wait(100) == 0, job.text
    starts = read_events(output, "start_timed")
    assert [event["restart"] for event in starts] == [0, 1]
    assert all(was_copied(event) for event in starts), job.text
    assert "import everything by themselves" not in job.text
    assert_same_run(output, reference)


_FEATURES = {
    "several threads": ("2", []),
    "workers by fork": ("1", ["--workers", "1", "--settings", '{"dataloader_multiprocessing_context": "fork"}']),
    "workers by spawn": ("1", ["--workers", "1", "--settings", '{"dataloader_multiprocessing_context": "spawn"}']),
    "compiled": ("1", ["--settings", '{"torch_compile": true, "torch_compile_backend": "inductor"}']),
}


@pytest.mark.parametrize("feature", [pytest.param(name, marks=pytest.mark.long) for name in _FEATURES])
def test_copies_train_as_new_processes_do(feature: str, tmp_path: Path) -> None:
    """Also after a restart: the final weights, the optimizer and the log are equal, bit by bit."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    threads, settings = _FEATURES[feature]
    env = {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": "3"}
    job = safepoint(reference, *TWO, program=tiny(reference, *settings), **env)
    with no_orphans(job):
        assert job.wait(200) == 0, job.text
    program = tiny(output, *settings, "--step-ms", "100")
    job = safepoint(output, *TWO, "--preload", "--save-steps", "1", program=program, **env)
    with no_orphans(job):
        job.wait_for_event("saved", count=2)
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        assert job.wait(200) == 0, job.text
    starts = read_events(output, "start_timed")
    assert [event["restart"] for event in starts] == [0, 1]
    assert all(was_copied(event) for event in starts), job.text
    assert "import everything by themselves" not in job.text
    assert_same_run(output, reference)


_SEEDS = """
import os, sys
from pathlib import Path
name = f"{os.environ['GROUP_RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
Path(sys.argv[1], name).write_text(f"{hash('text')} {os.environ['PYTHONHASHSEED']}")
"""


def test_nodes_have_the_seed_of_the_first_one(tmp_path: Path) -> None:
    """A seed that the user has set on node 0 only holds for the copies of the other node, too."""
    script, port = tmp_path / "seeds.py", str(free_port())
    script.write_text(_SEEDS)
    jobs = [
        safepoint(
            tmp_path / "run",
            *("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port),
            "--preload",
            program=[str(script), str(tmp_path)],
            log=tmp_path / f"node-{node}.log",
            **({"PYTHONHASHSEED": "7"} if node == 0 else {}),
        )
        for node in (0, 1)
    ]
    with no_orphans(*jobs):
        assert [job.wait(100) for job in jobs] == [0, 0], jobs[0].text + jobs[1].text
    found = [(tmp_path / f"{node}-0").read_text() for node in (0, 1)]
    assert found[0] == found[1]
    assert found[0].endswith(" 7")
    assert "import everything by themselves" not in jobs[0].text + jobs[1].text


def probe(folder: Path, *options: str, arguments: tuple[str, ...] = (), **env: str) -> list[dict[str, Any]]:
    """What two ranks see of themselves in their last start."""
    folder.mkdir()
    program = [str(PROBE), str(folder.parent / "out"), *arguments]
    (folder.parent / "out").mkdir(exist_ok=True)
    job = safepoint(folder, *TWO, *options, program=program, **env)
    with no_orphans(job):
        assert job.wait(100) == 0, job.text
    assert "import everything by themselves" not in job.text, job.text
    found = []
    for rank in range(2):
        newest = sorted((folder.parent / "out").glob(f"probe-{rank}-*.json"))[-1]
        found.append(json.loads(newest.read_text()))
    for path in (folder.parent / "out").iterdir():
        path.unlink()
    return found


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_copy_sees_what_a_new_process_sees(threads: str, tmp_path: Path) -> None:
    """Its process, environment, descriptors, threads, pickles and workers; only random numbers are its own."""
    env = {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": "5"}
    cold = probe(tmp_path / "cold", **env)
    copied = probe(tmp_path / "copied", "--preload", **env)
    again = probe(tmp_path / "again", "--preload", arguments=("kill",), **env)
    for rank in range(2):
        last = again[rank]["found"]
        assert last["environment"].pop("TORCHELASTIC_RESTART_COUNT") == "1"
        last["environment"]["TORCHELASTIC_RESTART_COUNT"] = "0"
        for key in ("argv", "orig_argv", "command"):
            last[key] = [word for word in last[key] if word != "kill"]
        for key, value in cold[rank]["found"].items():
            assert copied[rank]["found"][key] == value, key
            assert last[key] == value, key
    drawn = [number for one in (*cold, *copied, *again) for number in one["random"]]
    assert len(set(drawn)) == len(drawn), "every process draws its own"


# ---- what is not fit to be copied ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "odd",
            "thread",
        ),
        (
            "import torch\ntorch.set_num_threads(2)\n(torch.ones(999, 999) @ torch.ones(999, 999)).sum()",
            "odd",
            "thread",
        ),
        ("import atexit\natexit.register(print)\natexit.register(lambda: None)", "odd", "registers an exit handler"),
        ("import os\nRANK = os.environ.get('LOCAL_RANK', '0')", "odd", "reads LOCAL_RANK"),
        ("import os\nRANK = os.getenv('RANK')", "odd", "reads RANK"),
        ("import multiprocessing\nmultiprocessing.set_start_method('spawn')", "odd", "start method"),
        ("import socket\nPAIR = socket.socketpair()", "odd", "has opened a connection"),
        ("import subprocess\nP = subprocess.Popen(['sleep', '600'], stdin=subprocess.DEVNULL)", "odd", "a process"),
        ("import of_the_project", "of_the_project", "is code of the project"),
        ("import ray", "ray", "cannot be imported before the ranks start"),
        ("import deepspeed", "deepspeed", "cannot be imported before the ranks start"),
        ("import torch\ntorch.cuda.is_initialized = lambda: True", "odd", "has initialized CUDA"),
        ("import os, _thread\n_thread.start_new_thread(__import__('time').sleep, (600,))", "odd", "thread"),
    ],
)
def test_a_package_that_is_not_fit_is_named(
    source: str,
    name: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No rank is copied, and one line says why."""
    script = _install(tmp_path, monkeypatch, source)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "of_the_project.py").write_text("")
    for denied in ("ray", "deepspeed"):
        (tmp_path / "installed" / f"{denied}.py").write_text("")
    paths = f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path / 'project'}"
    monkeypatch.setenv("PYTHONPATH", paths)
    template = TemplateProcess([str(script)], is_module=False, is_stopping=lambda: False)
    try:
        assert template.bear([dict(os.environ)], [(1, 2)], 0) is None
        assert template.pid is None
        template.start()
        assert template.pid is None, "a new one would not be fit either"
    finally:
        template.end()
    (record,) = caplog.records
    assert f"packages: {name} " in record.getMessage()
    assert reason in record.getMessage()


_FORKS = """
import errno, os
forks, fork = [], os.fork
def fork_until_memory_is_full():
    forks.append(1)
    if len(forks) > {most}:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return fork()
os.fork = fork_until_memory_is_full
"""


@pytest.mark.parametrize(
    ("most", "reason"),
    [
        (0, "the template cannot be copied: Cannot allocate memory"),
        *((most, "the template could not copy itself") for most in (1, 2, 3)),
    ],
)
def test_a_template_without_memory_is_given_up(
    most: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial copy, the process that copies, the first rank and the second one; a rank that was made ends."""
    script = _install(tmp_path, monkeypatch, _FORKS.format(most=most))
    template = TemplateProcess([str(script)], is_module=False, is_stopping=lambda: False)
    reader, writer = os.pipe()
    output, end = os.pipe()
    try:
        assert template.bear([dict(os.environ)] * 2, [(end, end)] * 2, reader) is None
        assert template.pid is None
    finally:
        template.end()
    for descriptor in (reader, writer, end):
        os.close(descriptor)
    assert os.read(output, 1) == b"", "a rank that was made has not written, and has ended"
    os.close(output)
    assert reason in caplog.text


def _install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Path:
    """An installed package `odd` with this source, and a script that imports it."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "odd.py").write_text(source)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(_INSTALLED.format(folder=str(tmp_path / "installed")))
    paths = [str(tmp_path / "start"), str(tmp_path / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.write_text("import odd\n")
    return script


_CHANGING = """
import os, signal, sys
from pathlib import Path
import odd, own
out = Path(sys.argv[1])
with out.open("a") as file:
    file.write(f"{odd.VALUE} {own.VALUE} {odd.__file__ in open('/proc/self/maps').read()}\\n")
if out.read_text().count("\\n") == 1:
    Path(odd.__file__).write_text("VALUE = 2")
    Path(own.__file__).write_text("VALUE = 2")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_changed_packages_and_changed_code_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade of a package a new template imports it again; code of the project is always read again."""
    script = _install(tmp_path, monkeypatch, "VALUE = 1\n")
    script.write_text(_CHANGING)
    (script.parent / "own.py").write_text("VALUE = 1\n")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    job = safepoint(tmp_path / "run", "--preload", "-v", program=[str(script), str(tmp_path / "out")])
    with no_orphans(job):
        assert job.wait(100) == 0, job.text
    assert (tmp_path / "out").read_text().splitlines() == ["1 1 False", "2 2 False"]
    assert "a file of odd has changed on disk; the packages are imported again" in job.text
    assert "import everything by themselves" not in job.text


def test_ranks_do_not_wait_for_further_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that dies soon after its first step is replaced while the template still imports: at the next module."""
    script = _install(tmp_path, monkeypatch, "")
    names = [f"slow_{number}" for number in range(100)]
    for name in names:
        (tmp_path / "installed" / f"{name}.py").write_text(
            f"import time\nopen({str(tmp_path)!r} + '/begun', 'w')\ntime.sleep(3)"
        )
    template = TemplateProcess([str(script)], is_module=False, is_stopping=lambda: False)
    reader, writer = os.pipe()
    try:
        template.start()
        while not template.becomes_ready():
            assert template.pid is not None, caplog.text
            time.sleep(0.01)  # leaves the processor to the imports
        template.import_more(names)
        while not (tmp_path / "begun").exists():
            assert template.pid is not None, caplog.text
            time.sleep(0.01)
        pids = template.bear([dict(os.environ)], [(1, 2)], reader)
        assert pids is not None, caplog.text
    finally:
        template.end()
        os.close(writer)
        os.close(reader)
    wait_until_gone(list(pids))


# ---- a template that fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_restart_without_their_template(number: int, tmp_path: Path) -> None:
    """A killed or stopped template disturbs no rank; the next start does without it, or with a new one."""
    output = tmp_path / "run"
    program = tiny(output, "--step-ms", "100", "--max-steps", "40", "--grad-accum", "1")
    job = safepoint(output, *TWO, "--preload", "--save-steps", "1", program=program)
    with no_orphans(job):
        job.wait_for_event("start_timed")
        template, ranks = template_of(job), job.rank_pids()
        os.kill(template, number)
        saved = len(job.events("saved"))
        job.wait_for_event("saved", count=saved + 2)
        os.kill(ranks[0], signal.SIGKILL)
        job.wait_for_event("start_timed", count=2)
        assert job.rank_pids() != ranks
        assert job.wait(100) == 0, job.text
    wait_until_gone([template])
    assert read_events(output, "finished")


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    """Template and ranks end with it."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, "--preload", program=tiny(output, "--step-ms", "100", "--epochs", "50"))
    with no_orphans(job):
        job.wait_for_event("start_timed")
        pids = [template_of(job), *job.rank_pids()]
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        wait_until_gone(pids, timeout_s=60)


def test_a_stop_while_the_template_imports_ends_promptly(tmp_path: Path) -> None:
    """SIGTERM before the first rank exists."""
    output = tmp_path / "run"
    job = safepoint(output, *TWO, "--preload", program=tiny(output))
    with no_orphans(job):
        job.wait_for("template", lambda: _has_template(job))
        pid = template_of(job)
        job.signal(signal.SIGTERM)
        assert job.wait(30) == 143, job.text
        wait_until_gone([pid])
    assert sys.executable


def _has_template(job: Job) -> bool:
    try:
        return bool(template_of(job))
    except (OSError, ValueError):
        return False
