"""Who may start, and who has to leave for it."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.errors import UsageError
from safepoint.jobs.local import slots
from safepoint.jobs.local.slots import (
    Admission,
    Slots,
    admit,
    check_size,
    count_slots,
    devices,
    free_gpus,
    place_in_queue,
    remark_on,
)
from safepoint.jobs.model.records import JobRecord, RequestedAction
from safepoint.jobs.model.states import JobState
from tests.support.job_values import job_record, job_spec

RUNNING, QUEUED, SUSPENDING = JobState.RUNNING, JobState.QUEUED, JobState.SUSPENDING
CPU2 = Slots(cpu=2, gpu=0)


def running(name: str, **values: object) -> JobRecord:
    return job_record(name, RUNNING, **values)  # pyright: ignore[reportArgumentType]


def leaving(name: str, **values: object) -> JobRecord:
    return job_record(name, SUSPENDING, wanted=RequestedAction.PREEMPT, **values)  # pyright: ignore[reportArgumentType]


def _asks(others: Sequence[JobRecord], *, capacity: Slots = CPU2, **values: object) -> Admission:
    return admit("me", [*others, job_record("me", **values)], capacity)  # pyright: ignore[reportArgumentType]


def test_the_first_of_an_empty_machine_starts() -> None:
    """Nothing runs and nothing waits."""
    assert _asks([]).may_start


def test_the_older_one_of_two_goes_first() -> None:
    """Equal priority: in the order of their age."""
    other = job_record("other", age=1)
    assert "other, which starts first" in _asks([other]).waits_for
    assert admit("other", [other, job_record("me")], CPU2).may_start


def test_the_higher_priority_goes_before_the_older() -> None:
    """Age counts among equals only."""
    assert _asks([job_record("other", age=1)], priority=1).may_start


def test_the_place_in_the_queue() -> None:
    """By priority, then by age; a job that does not wait, or that a person has suspended, has none."""
    jobs = [
        running("runs"),
        job_record("young"),
        job_record("old", age=1),
        job_record("first", priority=1),
        job_record("stopped", age=2, wanted=RequestedAction.SUSPEND),
    ]
    found = {job.name: place_in_queue(job.name, jobs) for job in jobs}
    assert found == {"runs": None, "young": 3, "old": 2, "first": 1, "stopped": None}


def test_a_job_whose_owner_has_it_suspended_holds_nobody_up() -> None:
    """It waits for slots no longer, whatever its state says until its supervisor has seen it."""
    assert _asks([job_record("other", age=1, wanted=RequestedAction.SUSPEND)]).may_start


def test_a_small_job_starts_beside_what_an_older_one_cannot_use() -> None:
    """One slot is free, and the older one needs two that no job gives up for it."""
    assert _asks([running("a"), job_record("large", cpu=2, age=1)]).may_start


def test_jobs_in_every_state_that_has_processes_hold_their_slots() -> None:
    """A job that runs, stops, resumes or restarts keeps its slots."""
    for state in JobState:
        admission = _asks([job_record("other", state)], capacity=Slots(cpu=1, gpu=0), age=1)
        assert admission.may_start is not state.holds_slots, state


def test_nobody_is_preempted_for_an_equal() -> None:
    """Equal priority waits."""
    admission = _asks([running("a", cpu=2, priority=3)], priority=3)
    assert not admission.may_start
    assert not admission.preempt
    assert "1 of 2 CPU slots" in admission.waits_for


def test_the_lowest_priority_leaves_first() -> None:
    """Of two weaker ones."""
    assert _asks([running("one", priority=1), running("zero", priority=0)], priority=2).preempt == ("zero",)


def test_among_equals_the_youngest_leaves_first() -> None:
    """It has the least to lose."""
    others = [running("old", age=2), running("young", age=0), running("middle", age=1)]
    assert _asks(others, capacity=Slots(cpu=3, gpu=0), priority=1).preempt == ("young",)


def test_no_more_leave_than_it_takes() -> None:
    """A large one that was chosen after a small one makes the small one unnecessary."""
    others = [running("small", priority=0), running("large", cpu=3, priority=1)]
    assert _asks(others, capacity=Slots(cpu=4, gpu=0), cpu=3, priority=2).preempt == ("large",)


def test_only_those_leave_whose_slots_are_of_use() -> None:
    """Processor cores are not what a job that waits for a device needs."""
    others = [running("cores", cpu=1, priority=0), running("device", cpu=0, gpu=1, priority=1)]
    assert _asks(others, capacity=Slots(cpu=2, gpu=1), gpu=1, priority=2).preempt == ("device",)


def test_nobody_leaves_for_what_would_not_fit_then_either() -> None:
    """A stronger one holds too much."""
    others = [running("strong", cpu=2, priority=9), running("weak", cpu=1)]
    assert _asks(others, capacity=Slots(cpu=3, gpu=0), cpu=2, priority=1).preempt == ()


@pytest.mark.parametrize("state", [RUNNING, SUSPENDING, JobState.RESTARTING])
@pytest.mark.parametrize("wanted", [RequestedAction.PREEMPT, RequestedAction.SUSPEND, RequestedAction.DELETE])
def test_whoever_is_leaving_is_counted_and_not_asked_again(state: JobState, wanted: RequestedAction) -> None:
    """Their slots will be free; no other job has to leave."""
    others = [job_record("leaver", state, wanted=wanted), running("stays")]
    admission = _asks(others, priority=1)
    assert not admission.may_start
    assert not admission.preempt
    assert "about to stop" in admission.waits_for


def test_a_wish_beyond_the_machine_gets_all_cores_there_are() -> None:
    """Cores are a unit of account: a job that names more than there are has the machine to itself."""
    capacity = Slots(cpu=2, gpu=0)
    assert _asks([], cpu=64, capacity=capacity).may_start
    assert not _asks([running("a")], cpu=64, capacity=capacity).may_start
    assert not _asks([running("all", cpu=64)], capacity=capacity).may_start


def test_a_device_that_does_not_exist_is_waited_for_and_holds_nobody_up() -> None:
    """There is no account of devices: two of one cannot be had."""
    capacity = Slots(cpu=2, gpu=1)
    assert not _asks([], gpu=2, capacity=capacity).may_start
    assert _asks([job_record("dreamer", gpu=2, age=1, priority=1)], gpu=1, capacity=capacity).may_start


def test_what_was_preempted_for_a_large_job_does_not_come_back_before_it() -> None:
    """Otherwise two small ones would take turns for ever, and the large one would never fit."""
    large = job_record("large", cpu=2, priority=1)
    back = job_record("back", JobState.PREEMPTED, age=2)
    for other in (leaving("other", age=1), running("other", age=1)):
        admission = admit("back", [large, back, other], CPU2)
        assert not admission.may_start
        assert not admission.preempt


def test_a_slot_that_is_left_over_beside_the_large_job_may_be_used_meanwhile() -> None:
    """Three slots, two of them for the job that others make room for."""
    jobs = [job_record("large", cpu=2, priority=1), leaving("other", cpu=2)]
    assert admit("me", [*jobs, job_record("me")], Slots(cpu=3, gpu=0)).may_start


def test_the_second_one_asks_for_its_own_room() -> None:
    """What the first one is given is not counted for the second."""
    jobs = [job_record("first", priority=2), leaving("leaver", age=1), running("runner")]
    assert _asks(jobs, priority=1).preempt == ("runner",)


class TestCounting:
    def test_the_environment_decides(self) -> None:
        """Both variables."""
        assert count_slots({"SAFEPOINT_CPU_SLOTS": "3", "SAFEPOINT_GPU_SLOTS": "8"}) == Slots(cpu=3, gpu=8)

    def test_without_it_the_cores_are_counted(self) -> None:
        """As the system has them."""
        assert count_slots({}).cpu == os.cpu_count()

    @pytest.mark.parametrize("text", ["many", "-1", "1.5"])
    def test_what_is_no_number_is_refused(self, text: str) -> None:
        """The message names the variable."""
        with pytest.raises(UsageError, match="SAFEPOINT_CPU_SLOTS"):
            count_slots({"SAFEPOINT_CPU_SLOTS": text})

    def test_devices_are_given_by_number(self) -> None:
        """The first free ones."""
        assert free_gpus(["0", "2"], 2, ["0", "1", "2", "3"]) == ("1", "3")

    @pytest.mark.parametrize(
        ("environ", "pool"),
        [
            ({"SAFEPOINT_GPU_SLOTS": "2"}, ("0", "1")),
            ({"CUDA_VISIBLE_DEVICES": "2,3"}, ("2", "3")),
            ({"CUDA_VISIBLE_DEVICES": " 2, GPU-8932f937"}, ("2", "GPU-8932f937")),
            ({"CUDA_VISIBLE_DEVICES": "2,3", "SAFEPOINT_GPU_SLOTS": "1"}, ("2",)),
            ({"CUDA_VISIBLE_DEVICES": "2,3", "SAFEPOINT_GPU_SLOTS": "8"}, ("2", "3")),
            ({"CUDA_VISIBLE_DEVICES": "", "SAFEPOINT_GPU_SLOTS": "8"}, ()),
            ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ("1",)),
            ({"CUDA_VISIBLE_DEVICES": "", "SAFEPOINT_JOB_DIR": "/j", "SAFEPOINT_GPU_SLOTS": "1"}, ("0",)),
        ],
    )
    def test_a_persons_own_devices_are_what_jobs_may_have(
        self, environ: dict[str, str], pool: tuple[str, ...]
    ) -> None:
        """No others; within a job, the variable says only what that job was given."""
        assert devices(environ) == pool
        assert count_slots(environ).gpu == len(pool)

    def test_the_users_own_file_counts_in_every_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """And a variable more; supervisors that count differently would give one slot away twice."""
        (tmp_path / "safepoint").mkdir()
        (tmp_path / "safepoint" / "config.toml").write_text("[local]\ncpu-slots = 7\ngpu-slots = 2\n")
        monkeypatch.chdir("/")
        environ = {"XDG_CONFIG_HOME": str(tmp_path)}
        assert count_slots(environ) == Slots(cpu=7, gpu=2)
        assert count_slots(environ | {"SAFEPOINT_CPU_SLOTS": "3"}) == Slots(cpu=3, gpu=2)


class TestSize:
    @pytest.mark.parametrize(
        ("fields", "cores", "remark"),
        [
            ({"num_nodes": 2}, 2, ""),
            (
                {"ranks_per_node": 4, "cpu_per_node": 4},
                2,
                "requests 4 CPU slots, but this machine has only 2; the job still runs, and its ranks share",
            ),
            ({"num_nodes": 8}, 2, "requests 8 CPU slots"),
            ({"num_nodes": 4}, 1, "requests 4 CPU slots"),
            ({"num_nodes": 2, "cpu_per_node": 32}, 2, "requests 64 CPU slots"),
        ],
    )
    def test_a_laptop_may_try_a_few_ranks_more(self, fields: dict[str, Any], cores: int, remark: str) -> None:
        """It is said that they share its cores."""
        spec = job_spec(**fields)
        check_size(spec, Slots(cpu=cores, gpu=0))
        assert remark in remark_on(spec, Slots(cpu=cores, gpu=0))
        assert bool(remark) == bool(remark_on(spec, Slots(cpu=cores, gpu=0)))

    @pytest.mark.parametrize(
        ("fields", "cores"),
        [
            ({"num_nodes": 1000}, 2),
            ({"num_nodes": 9}, 2),
            ({"num_nodes": 3, "ranks_per_node": 3, "cpu_per_node": 0}, 2),
            ({"num_nodes": 32, "ranks_per_node": 32}, 100_000),
        ],
    )
    def test_what_the_machine_could_never_do_is_refused(self, fields: dict[str, Any], cores: int) -> None:
        """Before a thousand launchers are started, and with the variable that says otherwise."""
        with pytest.raises(UsageError, match=f"this machine with {cores} cores can run.*SAFEPOINT_CPU_SLOTS"):
            check_size(job_spec(**fields), Slots(cpu=cores, gpu=0))


wishes = st.builds(
    lambda cpu, gpu, priority: (cpu, gpu, priority), st.integers(0, 4), st.integers(0, 2), st.integers(-1, 2)
)
capacities = st.builds(lambda cpu, gpu: Slots(cpu=cpu, gpu=gpu), st.integers(1, 6), st.integers(0, 3))


@dataclass
class Machine:
    """The jobs of a machine, and supervisors that come to their turn in any order."""

    capacity: Slots
    jobs: dict[str, JobRecord] = field(default_factory=dict[str, JobRecord])

    def submit(self, wish: tuple[int, int, int]) -> None:
        cpu, gpu, priority = wish
        name = f"job{len(self.jobs)}"
        self.jobs[name] = job_record(
            name, cpu=cpu, gpu=min(gpu, self.capacity.gpu), priority=priority, age=100 - len(self.jobs)
        )

    def of(self, *states: JobState) -> list[JobRecord]:
        return [job for job in self.jobs.values() if job.state in states]

    def ask(self, name: str) -> Admission:
        """The job's supervisor has its turn."""
        me = self.jobs[name]
        admission = admit(name, [job for job in self.jobs.values() if job.state in slots.CONCERNED], self.capacity)
        if admission.may_start:
            assert not admission.preempt
            self._set(name, state=RUNNING)
        for victim in admission.preempt:
            assert self.jobs[victim].spec.priority < me.spec.priority
            assert self.jobs[victim].wanted is RequestedAction.RUN
            assert self.jobs[victim].state is RUNNING
            self._set(victim, wanted=RequestedAction.PREEMPT)
        self.check()
        return admission

    def leave(self, name: str) -> None:
        """A job that was asked to has left."""
        self._set(name, state=JobState.PREEMPTED, wanted=RequestedAction.RUN)

    def end(self, name: str) -> None:
        self._set(name, state=JobState.COMPLETE)

    def _set(self, name: str, **changes: object) -> None:
        self.jobs[name] = replace(self.jobs[name], **changes)  # pyright: ignore[reportArgumentType]

    def check(self) -> None:
        held = [slots.needs(job, self.capacity) for job in self.of(RUNNING)]
        assert sum(one.cpu for one in held) <= self.capacity.cpu
        assert sum(one.gpu for one in held) <= self.capacity.gpu


@settings(max_examples=200, deadline=None)
@given(capacity=capacities, moments=st.lists(st.one_of(wishes, st.integers(0, 99)), max_size=40))
def test_never_over_capacity_and_never_at_an_equals_cost(
    capacity: Slots, moments: list[tuple[int, int, int] | int]
) -> None:
    """Whatever is submitted, asks, leaves and ends in whatever order; `Machine` checks after each."""
    machine = Machine(capacity)
    for moment in moments:
        if isinstance(moment, tuple):
            machine.submit(moment)
        elif (waiting := machine.of(QUEUED, JobState.PREEMPTED)) and moment % 3:
            machine.ask(waiting[moment % len(waiting)].name)
        elif holding := machine.of(RUNNING):
            job = holding[moment % len(holding)]
            machine.leave(job.name) if job.wanted is RequestedAction.PREEMPT else machine.end(job.name)


@settings(max_examples=200, deadline=None)
@given(capacity=capacities, wanted=st.lists(wishes, min_size=1, max_size=8))
def test_some_job_always_starts_when_nothing_runs(capacity: Slots, wanted: list[tuple[int, int, int]]) -> None:
    """As long as any of them fits the machine at all, which these do."""
    machine = Machine(capacity)
    for wish in wanted:
        machine.submit(wish)
    assert any(machine.ask(name).may_start for name in list(machine.jobs))


@settings(max_examples=200, deadline=None)
@given(
    capacity=capacities,
    wanted=st.lists(wishes, min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_preemption_comes_to_an_end(capacity: Slots, wanted: list[tuple[int, int, int]], seed: int) -> None:
    """No job ends by itself: no job has to leave twice, and in the end those run that no other may preempt."""
    machine, chance = Machine(capacity), random.Random(seed)
    names = [f"job{number}" for number in range(len(wanted))]
    for wish in wanted:
        machine.submit(wish)
        machine.ask(chance.choice(machine.of(QUEUED)).name)
    asked: list[str] = []
    quiet = 0
    for _ in range(100):
        has_changed = False
        for name in chance.sample(names, len(names)):
            job = machine.jobs[name]
            if job.state is RUNNING and job.wanted is RequestedAction.PREEMPT:
                if chance.random() < 0.5:
                    machine.leave(name)
                has_changed = True
            elif job.state is not RUNNING:
                admission = machine.ask(name)
                has_changed |= admission.may_start or bool(admission.preempt)
                asked += admission.preempt
        quiet = 0 if has_changed else quiet + 1
        if quiet == 2:
            break
    assert quiet == 2, [(job.name, job.state, job.cpu, job.gpu, job.spec.priority) for job in machine.jobs.values()]
    assert len(asked) == len(set(asked)), asked
    for job in machine.jobs.values():
        if job.state is not RUNNING:
            weaker = [other for other in machine.of(RUNNING) if other.spec.priority < job.spec.priority]
            free = capacity
            for other in machine.of(RUNNING):
                free -= slots.needs(other, capacity)
            for other in weaker:
                free += slots.needs(other, capacity)
            assert not free.holds(slots.needs(job, capacity)), f"{job.name} could have had its room"
