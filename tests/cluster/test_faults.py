"""A fault of the cluster costs a job nothing: it completes, and its result is the same bit for bit.

Each case runs once, or SAFEPOINT_TEST_TRIALS times; the end of pytest's output has a table of what was measured.
"""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation import clock
from tests.cluster.test_life import ON, submit, trains_at, wait
from tests.support import jobs
from tests.support.cluster import faults
from tests.support.cluster.figures import Figures
from tests.support.cluster.timeline import Timeline, timeline
from tests.support.cluster.workspace import QUEUE, Workspace, apply, queue_objects
from tests.support.commands import safepoint
from tests.support.equality import assert_same_run
from tests.support.patience import PATIENCE

_TRIALS = int(os.environ.get("SAFEPOINT_TEST_TRIALS", "1"))
_OUT = "/mnt/kubeflow-checkpoints/tiny"
_QUEUED = ("--queue", QUEUE, "--cpu", "1", "--memory", "1Gi")
_STRIKE_AT = 6
_PAUSE_S = 30.0
"""How long the only node stays cordoned."""
_OUTAGE_S = 90.0
"""How long there is no kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        strike: makes it happen, and returns when the job may go on.
        nodes: of the job.
        options: of `submit`.
        step_ms: how long a micro-batch takes; a step has two.
        has_signal: whether the pods receive SIGTERM. Then no step is lost; else those since the newest checkpoint.
        has_restart: whether the job stops at all.
    """

    strike: Callable[[Workspace], float]
    nodes: int = 2
    options: tuple[str, ...] = ()
    step_ms: int = 250
    has_signal: bool = True
    has_restart: bool = True


def _nothing(team: Workspace) -> float:
    return time.time()


def _suspend(team: Workspace) -> float:
    done = safepoint("suspend", *ON, team.namespace, "--json", "tiny")
    assert done.code == 0, done.stderr
    assert done.document["was_saved"] is True
    begun = time.time()
    assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
    return begun


def _preempt(team: Workspace) -> float:
    submit(team, "high", *_QUEUED, "--priority-class", "high", program=("--epochs", "1"))
    preempted = wait(team, "tiny", lambda job: job["state"] == "Preempted")
    assert "high" in preempted["message"] or "priorit" in preempted["message"], preempted["message"]
    wait(team, "high", lambda job: job["state"] == "Complete", 180)
    return time.time()


def _last_pod(team: Workspace) -> str:
    return team.get("pods")["items"][-1]["metadata"]["name"]


def _restarts(team: Workspace) -> None:
    wait(team, "tiny", lambda job: job["state"] in {"Restarting", "Resuming", "Starting"}, 60)


def _delete(team: Workspace) -> float:
    team.kubectl("delete", "pod", _last_pod(team), "--wait=true")
    _restarts(team)
    return time.time()


def _evict(team: Workspace) -> float:
    faults.evict(team, _last_pod(team))
    _restarts(team)
    return time.time()


def _exhaust(team: Workspace) -> float:
    faults.exhaust_memory(team, _last_pod(team))
    begun = time.time()
    wait(team, "tiny", lambda _: _end_of_last_container(team) is not None, 60)
    assert _end_of_last_container(team) == "OOMKilled"
    return begun


def _end_of_last_container(team: Workspace) -> str | None:
    status = team.get("pods")["items"][-1]["status"]["containerStatuses"][0]
    ended = status["state"].get("terminated") or status["lastState"].get("terminated")
    return ended and ended["reason"]


def _kill(team: Workspace) -> float:
    faults.kill_pod(team, _last_pod(team))
    return time.time()


def _drain(team: Workspace) -> float:
    begun = time.time()
    faults.drain(team, "tiny", _PAUSE_S)
    assert time.time() - begun > _PAUSE_S
    return time.time()


def _stop_kubelet(team: Workspace) -> float:
    faults.restart(team.cluster, "kubelet", _OUTAGE_S)
    return time.time()


def _stop_api_server(team: Workspace) -> float:
    faults.restart(team.cluster, "api_server", 10.0)
    return time.time()


_PERIODIC = ("--save-steps", "3")
_FAULTS = {
    "nothing": Fault(strike=_nothing, has_signal=False, has_restart=False),
    "suspended": Fault(strike=_suspend),
    "preempted": Fault(strike=_preempt, nodes=1, options=(*_QUEUED, "--priority-class", "low")),
    "deleted": Fault(strike=_delete),
    "evicted": Fault(strike=_evict),
    "drained": Fault(strike=_drain),
    "out_of_memory": Fault(strike=_exhaust, options=(*_PERIODIC, "--memory", "2Gi"), has_signal=False),
    "killed": Fault(strike=_kill, options=_PERIODIC, has_signal=False),
    "api_server": Fault(strike=_stop_api_server, step_ms=500, has_signal=False, has_restart=False),
    "kubelet": Fault(strike=_stop_kubelet, step_ms=2000, has_signal=False, has_restart=False),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The output of the same training on this machine without a fault, for a number of ranks."""
    found: dict[int, Path] = {}

    def run(ranks: int) -> Path:
        if ranks not in found:
            output = tmp_path_factory.mktemp("undisturbed") / str(ranks)
            program = jobs.tiny(output, "--epochs", "4")
            job = jobs.safepoint(output, "--nproc-per-node", str(ranks), program=program)
            assert job.wait(200) == 0, job.text
            found[ranks] = output
        return found[ranks]

    return run


@pytest.mark.timeout(600 * PATIENCE)
@pytest.mark.parametrize("trial", range(_TRIALS))
@pytest.mark.parametrize("name", _FAULTS)
def test_a_fault_costs_nothing(
    name: str, trial: int, team: Workspace, undisturbed: Callable[[int], Path], figures: Figures
) -> None:
    fault, output = _FAULTS[name], team.folder / "tiny"
    if "--queue" in fault.options:
        apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    program = ("--out", _OUT, "--epochs", "4", "--step-ms", str(fault.step_ms))
    submit(team, "tiny", "--nnodes", str(fault.nodes), *fault.options, program=program)
    with timeline(team, output / "marks-0") as seen:
        wait(team, "tiny", trains_at(_STRIKE_AT), 200)
        struck = time.time()
        goes_on = fault.strike(team)
        wait(team, "tiny", lambda job: job["state"] == "Complete", 300)
    assert_same_run(output, undisturbed(fault.nodes))
    events = jobs.read_events(output)
    assert _num_lost(fault, events, seen.steps(), figures, name) == 0
    figures.add(name, **_durations(fault, events, seen, struck, goes_on))


def _num_lost(fault: Fault, events: list[dict[str, Any]], steps: list[int], figures: Figures, name: str) -> int:
    """The steps that were lost beyond what is promised."""
    resumed = [event["step"] for event in events if event["event"] == "resumed"]
    if not fault.has_restart:
        assert resumed == []
        assert steps == sorted(steps)
        return 0
    [step] = resumed
    [index] = [n for n, event in enumerate(events) if event["event"] == "resumed"]
    if fault.has_signal:
        [stopped] = [event["step"] for event in events if event["event"] == "stop_requested"]
        figures.add(name, **{"steps lost": stopped - step})
        return stopped - step
    saved = [event["step"] for event in events[:index] if event["event"] == "saved"]
    reached = next((before for before, after in itertools.pairwise(steps) if after < before), step)
    figures.add(name, **{"steps lost": reached - step})
    return max(saved) - step


def _durations(
    fault: Fault, events: list[dict[str, Any]], seen: Timeline, struck: float, goes_on: float
) -> dict[str, float]:
    """Seconds of each part of the interruption."""
    if not fault.has_restart:
        return {}
    found: dict[str, float] = {}
    times = [(event["event"], clock.parse_utc(event["time"]), event) for event in events]
    began = max(at for name, at, _ in times if name == "attempt_started")
    found["may go on → first step"] = next(at for at in seen.grown if at > began) - goes_on
    if fault.has_signal:
        stops = [at for name, at, event in times if name == "signal_received" and event["signal"] == "SIGTERM"]
        signalled = min(at for at in stops if at > struck)
        safe = min(at for name, at, event in times if name == "saved" and event["trigger"] in {"jit", "on-demand"})
        gone = [at for at in seen.deleted if signalled < at < began]
        # `suspend` requests a save before the pods receive SIGTERM.
        found |= {"request → safe": safe - struck} if safe < signalled else {"signal → safe": safe - signalled}
        found["safe → pods gone"] = max(gone) - safe
    return found
