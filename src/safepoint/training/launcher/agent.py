"""torch elastic's agent, adapted to Safepoint's exit codes and stop requests.

The agent starts and supervises the ranks of one node. It is torch's `LocalElasticAgent` with these differences:

- The agents of all nodes exchange stop requests.
- The end of a rank is noticed at once, through a pidfd. torch elastic looks for it only several times a second.
- torch elastic ends ranks with SIGTERM, and kills the ranks that still run after 30 s. This agent gives them the
  platform's grace period, even if this period is longer.
- If all ranks restart after the death of a rank, the surviving ranks of the node may have nothing to save. If their
  records state this (`RankRecord.can_be_killed`), they are killed at once.
- At a restart, the nodes do not exchange their numbers of ranks again, because the nodes of a job do not change.
- Ranks that Safepoint ended are not restarted.
- If a rank exits with an error code on the first start of the ranks, before the first step, the ranks are not
  restarted: the program would fail in the same way again. If a signal killed the rank, the ranks are restarted.
"""

# torch elastic wraps its methods in an untyped decorator, so pyright cannot check their overrides and calls.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false

import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import (
    config_from_args,  # pyright: ignore[reportUnknownVariableType]
    parse_args,  # pyright: ignore[reportUnknownVariableType]
)

from safepoint.foundation import clock
from safepoint.foundation.events.run_events import Failed, Restarted
from safepoint.foundation.events.start_events import Phase
from safepoint.settings.run_settings import RunSettings
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.training.compatibility.torch_releases import HAS_SHUTDOWN_TIMEOUT, PatientAgent, keep_signal_handlers
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.launcher.launcher_reporter import LauncherReporter
from safepoint.training.launcher.orphans import Orphans
from safepoint.training.launcher.rendezvous import Rendezvous
from safepoint.training.launcher.signal_relay import SignalRelay
from safepoint.training.launcher.start_phases.start_timeline import StartTimeline
from safepoint.training.outcome.rank_record import RankRecord, read_records
from safepoint.training.outcome.verdict import describe_end, first_failure
from safepoint.training.rank_processes.births import copied_from
from safepoint.training.rank_processes.death_watch import DeathWatch, exit_code_of_child
from safepoint.training.rank_processes.hash_seed import HashSeed
from safepoint.training.rank_processes.loaded_modules import read_loaded_modules
from safepoint.training.rank_processes.template_process import TemplateProcess

_log = logging.getLogger("safepoint")
_STOP_KEY = "safepoint/stop"
_RESTART_KEY = "safepoint/restart/{}"
_ENDED_KEY = "safepoint/left/{}"
_WAIT_FOR_OTHERS_S = 3.0
_LOOK_EVERY_S = 1.0
"""The time between two checks for orphans while nothing else happens."""
_EXCHANGE_EVERY_S = 0.1
"""The time between two checks until the first step is done. If the job has several nodes, this time is used until the
end, because their agents exchange requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """How the ranks of a node ended.

    Args:
        exit_codes: global rank → the exit code of its process in the last start; negative if a signal ended the
            process.
        restarts: how often the ranks were restarted.
    """

    exit_codes: dict[int, int]
    restarts: int


def run_agent(
    plan: LaunchPlan,
    settings: RunSettings,
    relay: SignalRelay,
    keeper: KeeperProcess | None,
    reporter: LauncherReporter,
    orphans: Orphans,
    timeline: StartTimeline,
    template: TemplateProcess | None,
    *,
    before_start: Callable[[], None],
) -> AgentOutcome:
    """Start the ranks of this node, and monitor them and their keeper until the ranks have ended.

    `before_start` is called before each start of the ranks, also before restarts.
    """
    rendezvous = Rendezvous(plan, settings)
    config = _config(plan, settings, is_on_one_machine=rendezvous.is_on_one_machine)
    keep_signal_handlers()  # `relay` handles the signals
    module = ["-m"] if plan.is_module else []
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=sys.executable,
        args=("-P", "-u", "-m", "safepoint.training", *module, *plan.program),
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
    )
    agent = SafepointAgent(
        spec,
        config,
        settings=settings,
        relay=relay,
        keeper=keeper,
        reporter=reporter,
        orphans=orphans,
        timeline=timeline,
        template=template,
        before_start=before_start,
        hash_seed=HashSeed(program=plan.program, is_module=plan.is_module),
    )
    try:
        result: Any = agent.run()
        agent.notify_others()
    finally:
        agent.close()
        rendezvous.shutdown()
    return agent.outcome(result)


def _config(plan: LaunchPlan, settings: RunSettings, *, is_on_one_machine: bool) -> LaunchConfig:
    """The configuration that torchrun derives from the same options. `settings` has the launcher's folder."""
    options = [
        f"--nnodes={plan.nnodes}",
        f"--node-rank={plan.node_rank}",
        f"--nproc-per-node={plan.nproc_per_node}",
        f"--max-restarts={plan.max_restarts}",
        "--monitor-interval=0.001",  # `SafepointAgent._monitor_workers` waits; torch refuses 0
        # Without this option, torch elastic makes a folder in the temporary folder, and does not delete it. Other
        # users may be able to replace that folder.
        *([] if "PET_LOG_DIR" in os.environ else [f"--log-dir={settings.record_folder}/elastic"]),
        *([f"--shutdown-timeout={math.ceil(settings.grace_s)}"] if HAS_SHUTDOWN_TIMEOUT else []),
    ]
    if is_on_one_machine and Path("/sys/class/net/lo").exists():
        for library in ("GLOO", "NCCL", "TP"):  # these do not authenticate peers, so they listen on loopback only
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    plan.set_default_threads()
    config, _, _ = config_from_args(parse_args([*options, plan.program[0]]))
    return config


class SafepointAgent(PatientAgent):
    """Supervises the ranks of one node.

    Args:
        spec: what to run.
        config: torch elastic's launch configuration.
        settings: the options of the run, with the folder for the ranks' records.
        relay: receives stop requests, and sends signals to the ranks.
        keeper: the node's keeper, the process that writes snapshots to disk. If the keeper dies, the agent starts a
            new keeper.
        reporter: reports failures and restarts.
        orphans: the processes that ranks leave behind.
        timeline: measures the starts of the ranks.
        template: the process from which the ranks are copied, or None.
        before_start: called before each start of the ranks.
        hash_seed: the seed of the job for the hashes of strings.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        config: LaunchConfig,
        *,
        settings: RunSettings,
        relay: SignalRelay,
        keeper: KeeperProcess | None,
        reporter: LauncherReporter,
        orphans: Orphans,
        timeline: StartTimeline,
        template: TemplateProcess | None,
        before_start: Callable[[], None],
        hash_seed: HashSeed,
    ) -> None:
        super().__init__(
            spec=spec,
            logs_specs=config.logs_specs,  # pyright: ignore[reportArgumentType]
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=math.ceil(settings.grace_s),
        )
        self._settings = settings
        self._relay = relay
        self._keeper = keeper
        self._reporter = reporter
        self._orphans = orphans
        self._timeline = timeline
        self._template = template
        self._before_start = before_start
        self._hash_seed = hash_seed
        self._has_sent_modules = False
        self._restarts = -1
        """How often the ranks were restarted; -1 before they were started."""
        self._failure: Failed | None = None
        self._has_notified = False
        self._deaths = DeathWatch()
        self._killed: frozenset[int] = frozenset()
        """The ranks of this start that were killed because another rank had died."""

    def outcome(self, result: RunResult | None) -> AgentOutcome:
        """The exit codes of the ranks in their last start. `result` is the return value of `run`."""
        codes = {worker.global_rank: 0 for worker in self._worker_group.workers}
        if result is not None:
            codes |= {rank: failure.exitcode for rank, failure in result.failures.items()}
        return AgentOutcome(exit_codes=codes, restarts=self._restarts)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        group: Any = worker_group
        if group.workers and group.store is not None and self._restarts >= 0:
            group.workers = [_again(worker) for worker in group.workers]
        else:
            super()._rendezvous(worker_group)
            if group.group_world_size > 1:
                self._agree_on_hash_seed()
        self._timeline.passed(Phase.STORE_READY)

    def _agree_on_hash_seed(self) -> None:
        """Use the hash seed of node 0 on this node. If the template has another seed, replace the template."""
        group: Any = self._worker_group
        template, is_wanted = self._template, self._template is not None
        if self._hash_seed.agree(group.store, node=group.group_rank, is_wanted=is_wanted) and template is not None:
            template.end()
            template.start()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._restarts += 1
        before = dict(os.environ)
        self._before_start()
        if self._template is not None and os.environ != before:
            self._template.end()  # its imports may have used the old folders; `copied_from` starts a new template
        with copied_from(self._template):
            pids = super()._start_workers(worker_group)
        self._timeline.ranks_born(self._restarts, len(pids))
        context: Any = self._pcontext
        close = context.close

        def close_within_grace(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            close(death_sig, max(timeout, math.ceil(self._settings.grace_s)))

        context.close = close_within_grace
        self._killed = frozenset()
        self._has_sent_modules = False  # a start that resumes may load more modules than the first start
        self._relay.set_ranks(list(pids.values()))
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._exchange_requests()
        own = set(self._pids())
        if self._keeper is not None:
            self._keeper.ensure()
            own.add(self._keeper.pid)
        if self._template is not None and self._template.pid is not None:
            own.add(self._template.pid)
        self._orphans.reap(own)
        self._deaths.watch(own)
        group: Any = worker_group
        has_stepped = self._timeline.look()
        if has_stepped and self._template is not None:
            self._complete_template(self._template)
        is_idle = has_stepped and group.group_world_size == 1
        self._deaths.wait(_LOOK_EVERY_S if is_idle else _EXCHANGE_EVERY_S)
        noticed_s = clock.monotonic_s()
        self._kill_survivors()
        result = super()._monitor_workers(worker_group)
        if result.state in {WorkerState.FAILED, WorkerState.UNHEALTHY}:
            self._timeline.failure_noticed(noticed_s)
            self._timeline.passed(Phase.SURVIVORS_ENDED)  # the call above has ended them
            codes = {rank: failure.exitcode for rank, failure in result.failures.items() if rank not in self._killed}
            if self._is_final(codes, self._read_records()):
                self._remaining_restarts = 0
        return result

    def _complete_template(self, template: TemplateProcess) -> None:
        """After the first step: let the template import the ranks' modules. If it has died, start a new template."""
        if not template.ensure():
            self._has_sent_modules = False
        if not self._has_sent_modules and template.becomes_ready():
            template.import_more(read_loaded_modules(Path(self._settings.record_folder or "")))
            self._has_sent_modules = True

    def _kill_survivors(self) -> None:
        """If a rank has died and all ranks will restart, kill the node's other ranks if they have nothing to save.

        Without this kill, torch elastic would send them SIGTERM and wait. The ranks could do nothing useful in this
        time: a training cannot continue without the dead rank, and the keeper has the state of the training.
        """
        codes = {
            worker.global_rank: exit_code_of_child(worker.id) for worker in self._worker_group.workers if worker.id
        }
        ended = {rank: code for rank, code in codes.items() if code}
        if not ended or self._remaining_restarts <= 0:
            return
        records = self._read_records()
        cause = first_failure(ended, records) or 0
        if cause in records and records[cause].lost_peer:
            return  # a running rank may have failed first, and may be about to print the reason
        was_killed = ended[cause] < 0
        running = {rank for rank, code in codes.items() if code is None}
        are_expendable = all(
            rank in records and records[rank].can_be_killed(after_kill=was_killed) for rank in running
        )
        if are_expendable and not self._is_final(ended, records):
            self._killed = frozenset(running)
            self._relay.kill_ranks()

    def _read_records(self) -> dict[int, RankRecord]:
        return read_records(Path(self._settings.record_folder or ""), self._restarts)

    def _pids(self) -> list[int]:
        context: Any = self._pcontext
        return [] if context is None else list(context.pids().values())

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._relay.set_ranks(())
        failure, event = self._failure, None
        if failure is not None:
            event = Restarted(
                restart=self._restarts + 1,
                max_restarts=self._worker_group.spec.max_restarts,
                reason=failure.reason,
            )
            _log.warning("%s", event.line)
            self._reporter.report(failure)
        group: Any = self._worker_group
        if group.group_world_size > 1:
            with contextlib.suppress(RuntimeError):
                self._shared_store.set(_RESTART_KEY.format(self._restarts + 1), "1")
        super()._restart_workers(worker_group)
        if event is not None:
            self._reporter.restarting(event)

    def _is_final(self, exit_codes: dict[int, int], records: dict[int, RankRecord]) -> bool:
        """Whether the ranks must not be restarted.

        They are not restarted if a stop was requested. Otherwise the rank that failed first decides. The ranks are
        not restarted if Safepoint ended this rank, or if it exited with an error code on the first start of the
        ranks, before the first step. If it has no record, or has lost a peer, the ranks are restarted.

        Args:
            exit_codes: rank → exit code of the ranks that ended by themselves, negative for a signal.
            records: the records of all ranks.
        """
        if self._relay.signal:
            return True
        rank = first_failure(exit_codes, records)
        if rank is None:
            return False
        record = records.get(rank)
        self._failure = Failed(
            rank=rank,
            exit_code=exit_codes[rank],
            reason=describe_end(rank, exit_codes[rank], record),
            error=record.message if record is not None else "",
        )
        if record is None or record.lost_peer:
            return False
        has_stepped = any(record.has_stepped for record in records.values())
        fails_at_start = self._restarts == 0 and exit_codes[rank] > 0 and not has_stepped
        return record.exit_code is not None or fails_at_start

    # ---- the agents of the other nodes ------------------------------------------------------------------------

    def _exchange_requests(self) -> None:
        """Exchange stop requests with the other nodes' agents. If their ranks restart, restart this node's ranks."""
        group: Any = self._worker_group
        if group.group_world_size == 1:
            return
        # When node 0 ends, the store ends too. The ranks of this node then lose their peers, and end by themselves.
        with contextlib.suppress(RuntimeError):
            if self._relay.signal:
                self._send_stop()
            elif self._shared_store.check([_STOP_KEY]):
                self._relay.request(signal.SIGTERM)
            elif self._shared_store.check([_RESTART_KEY.format(self._restarts + 1)]):
                # Ranks of another node have failed. The ranks of this node would wait for the failed ranks until a
                # timeout. So this node's ranks are killed, and torch elastic restarts them.
                self._relay.kill_ranks()

    def _send_stop(self) -> None:
        if not self._has_notified:
            self._has_notified = True
            self._shared_store.set(_STOP_KEY, "1")

    def notify_others(self) -> None:
        """Before this process ends, notify the other nodes.

        Node 0 serves the store, so it waits until the other nodes have ended, for at most 3 s. It also waits after a
        success. At the end, torch elastic's agents wait for each other at a barrier in the store. If node 0 ended as
        soon as all agents have arrived, other agents might still read the barrier. They would report the closed
        connection as an error.
        """
        group: Any = self._worker_group
        if group.group_world_size == 1:
            return
        with contextlib.suppress(RuntimeError):
            if group.state != WorkerState.SUCCEEDED:
                self._send_stop()
            self._shared_store.set(_ENDED_KEY.format(group.group_rank), "1")
            others = [_ENDED_KEY.format(rank) for rank in range(group.group_world_size)]
            deadline_s = clock.monotonic_s() + _WAIT_FOR_OTHERS_S
            while group.group_rank == 0 and not self._shared_store.check(others):
                if clock.monotonic_s() >= deadline_s:
                    return
                clock.sleep(0.05)

    def close(self) -> None:
        """Stop watching the ranks."""
        self._deaths.close()

    @property
    def _shared_store(self) -> Any:
        return self._worker_group.store


def _again(worker: Worker) -> Worker:
    """The same rank, for the next start of its process."""
    return Worker(
        local_rank=worker.local_rank,
        global_rank=worker.global_rank,
        role_rank=worker.role_rank,
        world_size=worker.world_size,
        role_world_size=worker.role_world_size,
    )
