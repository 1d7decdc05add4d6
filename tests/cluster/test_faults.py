"""A fault of the cluster costs a job nothing: it completes, and its result is the same bit for bit.

Each fault happens once, or SAFEPOINT_TEST_TRIALS times: to one job again and again, at other steps each time, or to
several jobs at once. The end of pytest's output has a table of what was measured.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation import clock
from tests.cluster.test_life import ON, submit, wait
from tests.support import jobs
from tests.support.cluster import faults
from tests.support.cluster.figures import Figures
from tests.support.cluster.timeline import Timeline, timeline
from tests.support.cluster.workspace import QUEUE, Workspace, apply, queue_objects
from tests.support.commands import safepoint
from tests.support.equality import assert_same_run
from tests.support.patience import PATIENCE

TRIALS = int(os.environ.get("SAFEPOINT_TEST_TRIALS", "1"))
_QUEUED = ("--queue", QUEUE, "--cpu", "1", "--memory", "1Gi")
_STRIKE_AT = 6
"""The steps before the first fault."""
_PAUSE_S = 30.0
"""How long the only node stays cordoned."""
_OUTAGE_S = 90.0
"""How long there is no kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        strike: makes it happen to jobs, and returns when they may go on.
        nodes: of the job.
        options: of `submit`.
        step_ms: how long a micro-batch takes; a step has two.
        long_step_ms: the same when the fault happens to one job several times, and the job does not stop.
        most_strikes: how often it happens to one job. Kubernetes waits twice as long each time before it replaces a
            pod that was deleted, and after a few times the wait takes minutes.
        has_signal: whether the pods receive SIGTERM. Then no step is lost; else those since the newest checkpoint.
        has_restart: whether the job stops at all.
    """

    strike: Callable[[Workspace, Sequence[str]], float]
    nodes: int = 2
    options: tuple[str, ...] = ()
    step_ms: int = 250
    long_step_ms: int | None = None
    most_strikes: int = 10
    has_signal: bool = True
    has_restart: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that has happened.

    Args:
        struck: when it began.
        goes_on: when the jobs might go on.
        reached: by job, the complete steps before the last micro-batch.
    """

    struck: float
    goes_on: float
    reached: dict[str, int]


def _nothing(team: Workspace, names: Sequence[str]) -> float:
    return time.time()


def _suspend(team: Workspace, names: Sequence[str]) -> float:
    for name in names:
        done = safepoint("suspend", *ON, team.namespace, "--json", name)
        assert done.code == 0, done.stderr
        assert done.document["was_saved"] is True
    begun = time.time()
    for name in names:
        assert safepoint("resume", *ON, team.namespace, name).code == 0
    return begun


def _preempt(team: Workspace, names: Sequence[str]) -> float:
    [name], number = names, len(team.get("trainjobs")["items"])
    high = f"high-{number}"
    submit(team, high, *_QUEUED, "--priority-class", "high", program=("--epochs", "1"))
    preempted = wait(team, name, lambda job: job["state"] == "Preempted")
    assert high in preempted["message"] or "priorit" in preempted["message"], preempted["message"]
    wait(team, high, lambda job: job["state"] == "Complete", 180)
    return time.time()


def last_pod(team: Workspace, name: str) -> str:
    pods = team.get("pods", "", "-l", f"jobset.sigs.k8s.io/jobset-name={name}")["items"]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]][-1]["metadata"]["name"]


def _restarts(team: Workspace, names: Sequence[str]) -> None:
    for name in names:
        wait(team, name, lambda job: job["state"] in {"Restarting", "Resuming", "Starting"}, 60)


def _delete(team: Workspace, names: Sequence[str]) -> float:
    team.kubectl("delete", "pod", *(last_pod(team, name) for name in names), "--wait=true")
    _restarts(team, names)
    return time.time()


def _evict(team: Workspace, names: Sequence[str]) -> float:
    evicted = [last_pod(team, name) for name in names]
    for pod in evicted:
        faults.evict(team, pod)
    team.kubectl("wait", "--for=delete", "--timeout=120s", *(f"pod/{pod}" for pod in evicted))
    _restarts(team, names)
    return time.time()


def _exhaust(team: Workspace, names: Sequence[str]) -> float:
    begun = time.time()
    for name in names:
        pod = last_pod(team, name)
        container = team.get("pod", pod)["status"]["containerStatuses"][0]["containerID"]
        faults.exhaust_memory(team, pod)
        begun = time.time()
        ends: list[str] = []
        wait(team, name, lambda _, pod=pod, id_=container, ends=ends: _has_ended(team, pod, id_, ends), 60)
        assert ends == ["OOMKilled"]
    return begun


def _has_ended(team: Workspace, pod: str, container: str, ends: list[str]) -> bool:
    """Whether a container of a pod has ended; adds the reason to `ends`."""
    status = team.get("pod", pod)["status"]["containerStatuses"][0]
    for state in (status["state"], status["lastState"]):
        if state.get("terminated", {}).get("containerID") == container:
            ends.append(state["terminated"]["reason"])
            return True
    return False


def _kill(team: Workspace, names: Sequence[str]) -> float:
    for name in names:
        faults.kill_pod(team, last_pod(team, name))
    return time.time()


def _drain(team: Workspace, names: Sequence[str]) -> float:
    with faults.drained(team, names):
        time.sleep(_PAUSE_S)
    return time.time()


def _stop_kubelet(team: Workspace, names: Sequence[str]) -> float:
    faults.restart(team.cluster, "kubelet", _OUTAGE_S)
    return time.time()


def _stop_api_server(team: Workspace, names: Sequence[str]) -> float:
    faults.restart(team.cluster, "api_server", 10.0)
    return time.time()


_PERIODIC = ("--save-steps", "3")
_FAULTS = {
    "nothing": Fault(strike=_nothing, has_signal=False, has_restart=False),
    "suspended": Fault(strike=_suspend),
    "preempted": Fault(strike=_preempt, nodes=1, options=(*_QUEUED, "--priority-class", "low")),
    "deleted": Fault(strike=_delete, most_strikes=4),
    "evicted": Fault(strike=_evict, most_strikes=4),
    "drained": Fault(strike=_drain, most_strikes=4),
    "out_of_memory": Fault(strike=_exhaust, options=(*_PERIODIC, "--memory", "2Gi"), has_signal=False),
    "killed": Fault(strike=_kill, options=_PERIODIC, has_signal=False),
    "api_server": Fault(
        strike=_stop_api_server,
        step_ms=500,
        long_step_ms=1000,
        most_strikes=5,
        has_signal=False,
        has_restart=False,
    ),
    "kubelet": Fault(strike=_stop_kubelet, step_ms=2000, most_strikes=5, has_signal=False, has_restart=False),
}


@pytest.mark.timeout((600 if TRIALS == 1 else 1800) * PATIENCE)
@pytest.mark.parametrize("name", _FAULTS)
def test_a_fault_costs_nothing(
    name: str, team: Workspace, undisturbed: Callable[[int, int], Path], figures: Figures
) -> None:
    assert_costs_nothing(name, _FAULTS[name], team, undisturbed, figures)


def assert_costs_nothing(
    name: str, fault: Fault, team: Workspace, undisturbed: Callable[[int, int], Path], figures: Figures
) -> None:
    """Run jobs to which a fault happens, and compare each of them with the same training without it."""
    trials = 1 if name == "nothing" else TRIALS
    num_strikes = min(trials, fault.most_strikes)
    names = [f"tiny-{number}" for number in range(math.ceil(trials / num_strikes))]
    # So many that the training cannot end before the last fault, also where the machine is slow.
    epochs = 4 if num_strikes == 1 else 30 * fault.nodes
    step_ms = fault.step_ms if num_strikes == 1 else fault.long_step_ms or fault.step_ms
    if "--queue" in fault.options:
        apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    for job in names:
        out = f"/mnt/kubeflow-checkpoints/{job}"
        hurry = ("--hurry", "/mnt/kubeflow-checkpoints/hurry") if num_strikes > 1 else ()
        program = ("--out", out, "--epochs", str(epochs), "--step-ms", str(step_ms), *hurry)
        submit(team, job, "--nnodes", str(fault.nodes), *fault.options, program=program)
    strikes: list[Strike] = []
    with timeline(team, {job: team.folder / job / "marks-0" for job in names}) as seen:
        for number in range(num_strikes):
            _wait_for_steps(team, seen, names, _STRIKE_AT if number == 0 else 2 + number % 3)
            struck = time.time()
            goes_on = fault.strike(team, names)
            strikes.append(
                Strike(struck=struck, goes_on=goes_on, reached={job: seen.steps(job)[-1] for job in names})
            )
        (team.folder / "hurry").touch()
        for job in names:
            wait(team, job, lambda job: job["state"] == "Complete", 600)
    for job in names:
        output = team.folder / job
        assert_same_run(output, undisturbed(fault.nodes, epochs))
        events = jobs.read_events(output)
        if not fault.has_restart:
            assert [event for event in events if event["event"] == "resumed"] == []
            assert seen.steps(job) == sorted(seen.steps(job))
            for _ in strikes:
                figures.add(name, **{"steps lost": 0})
            continue
        assert [event["event"] for event in events].count("resumed") == num_strikes
        ends = [strike.struck for strike in strikes[1:]] + [math.inf]
        for strike, end in zip(strikes, ends, strict=True):
            among = [event for event in events if strike.struck <= clock.parse_utc(event["time"]) < end]
            earlier = [event for event in events if clock.parse_utc(event["time"]) < strike.struck]
            lost, beyond = _num_lost(fault, earlier, among, strike.reached[job])
            assert beyond == 0
            figures.add(name, **{"steps lost": lost}, **_durations(fault, among, seen, job, strike))


def _wait_for_steps(team: Workspace, seen: Timeline, names: Sequence[str], num_steps: int) -> None:
    """Wait until each job runs and has taken this number of steps more."""
    wanted = {job: len(seen.steps(job)) + 2 * num_steps for job in names}

    def has_taken_them(job: dict[str, Any]) -> bool:
        return job["state"] == "Running" and len(seen.steps(job["name"])) >= wanted[job["name"]]

    for job in names:
        wait(team, job, has_taken_them, 300)


def _num_lost(
    fault: Fault, earlier: list[dict[str, Any]], events: list[dict[str, Any]], reached: int
) -> tuple[int, int]:
    """The steps that were lost by a strike, and how many of them beyond what is promised.

    Args:
        fault: the fault.
        earlier: the events of the job before it.
        events: those from this strike to the next one.
        reached: the complete steps before the last micro-batch.
    """
    [step] = [event["step"] for event in events if event["event"] == "resumed"]
    if fault.has_signal:
        [stopped] = [event["step"] for event in events if event["event"] == "stop_requested"]
        return stopped - step, stopped - step
    until = itertools.takewhile(lambda event: event["event"] != "resumed", events)
    saved = [event["step"] for event in [*earlier, *until] if event["event"] == "saved"]
    return max(reached - step, 0), max(saved) - step


def _durations(
    fault: Fault, events: list[dict[str, Any]], seen: Timeline, job: str, strike: Strike
) -> dict[str, float]:
    """Seconds of each part of the interruption."""
    found: dict[str, float] = {}
    times = [(event["event"], clock.parse_utc(event["time"]), event) for event in events]
    began = max(at for name, at, _ in times if name == "attempt_started")
    found["may go on → first step"] = next(at for at in seen.grown[job] if at > began) - strike.goes_on
    if fault.has_signal:
        stops = [at for name, at, event in times if name == "signal_received" and event["signal"] == "SIGTERM"]
        signalled = min(at for at in stops if at > strike.struck)
        safe = min(at for name, at, event in times if name == "saved" and event["trigger"] in {"jit", "on-demand"})
        gone = [at for at in seen.deleted(job) if signalled < at < began]
        # `suspend` requests a save before the pods receive SIGTERM.
        found |= {"request → safe": safe - strike.struck} if safe < signalled else {"signal → safe": safe - signalled}
        found["safe → pods gone"] = max(gone) - safe
    return found
