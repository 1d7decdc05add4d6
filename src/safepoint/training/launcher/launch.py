"""Starts and supervises the ranks of one node with torch elastic, and decides the node's exit code.

torch elastic starts, monitors and restarts the ranks. The launcher changes this in four points:

- A stop signal to the launcher is sent to the ranks at once, and they have the platform's grace period to end.
- The agents of other nodes receive the stop request.
- Ranks that Safepoint ended are not restarted.
- The exit code shows how the ranks ended.
"""

import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safepoint.foundation.events import console
from safepoint.foundation.temporary_folders.places import provide_home
from safepoint.settings.run_settings import STATUS_URL, RunSettings
from safepoint.settings.wording import use_wording
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.memory import block
from safepoint.snapshot.protocol.channel import new_keeper_key
from safepoint.snapshot.protocol.messages import KeeperPlan
from safepoint.training.launcher.compile_cache import CompileCache
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.launcher.launcher_reporter import LauncherReporter
from safepoint.training.launcher.orphans import Orphans
from safepoint.training.launcher.signal_relay import SignalRelay
from safepoint.training.launcher.space_watch import SpaceWatch
from safepoint.training.launcher.start_phases.start_notice import StartNotice
from safepoint.training.launcher.start_phases.start_timeline import StartTimeline
from safepoint.training.outcome.launcher_folder import launcher_folder
from safepoint.training.outcome.program_error import exit_code_after, summarize
from safepoint.training.outcome.rank_record import read_records
from safepoint.training.outcome.verdict import first_failure, reach_verdict
from safepoint.training.rank_processes.hash_seed import HashSeed
from safepoint.training.rank_processes.template_process import TemplateProcess

_log = logging.getLogger("safepoint")


def launch(
    plan: LaunchPlan,
    settings: RunSettings,
    *,
    on_exit: Callable[[int], None] | None = None,
    reports_slow_start: bool = True,
) -> int:
    """Run the ranks of this node to their end.

    Call this function on the main thread, because it installs handlers for the process's signals.

    Args:
        plan: which ranks to start.
        settings: the options of the run.
        on_exit: receives the exit code when a signal ends the process before this function returns.
        reports_slow_start: whether to print what the ranks wait for, if they have not begun to train after some
            seconds.

    Returns:
        The exit code for this process: 0, 2, 11, 13, 14, 75, 130 or 143 (docs/exit-codes.md), or the exit code of the
        failed rank. Pass it to `os._exit`: the tear-down of an interpreter that has imported torch takes longer than
        a save.
    """
    console.set_up(settings.verbosity)
    if settings.job_dir is not None:
        settings = replace(settings, job_dir=os.path.abspath(settings.job_dir))
    use_wording(settings.wording, job_dir=settings.job_dir)
    with launcher_folder() as folder:
        reporter = LauncherReporter(settings, folder, node=plan.node_rank, num_nodes=plan.nnodes)
        relay = SignalRelay(settings, folder, is_alone=plan.nnodes == 1, reporter=reporter, on_exit=on_exit)
        timeline = StartTimeline(folder, plan.node_rank, reporter.report)
        relay.install()
        reporter.start()
        notice = StartNotice(plan, timeline, is_wanted=lambda: reports_slow_start and not relay.signal)
        watch = SpaceWatch(folder, reporter.report)
        watch.start()
        orphans = Orphans()
        keeper = _start_keeper(settings, folder)
        key = None if keeper is None else keeper.key
        settings = replace(settings, record_folder=str(folder), launcher_pid=os.getpid(), keeper=key)
        _prepare_environment(settings)
        cache = CompileCache(folder)

        def protect_folders() -> None:
            provide_home(folder / "home")
            cache.protect()

        protect_folders()
        template = _make_template(plan, settings, relay)
        # The agent is imported only here, because that import takes seconds, and `relay` handles signals by now. If
        # this is the only node, a stop signal that arrives before the ranks start ends this process.
        from safepoint.training.launcher.agent import run_agent

        try:
            outcome = run_agent(
                plan, settings, relay, keeper, reporter, orphans, timeline, template, before_start=protect_folders
            )
        except BaseException as error:
            reporter.end(exit_code_after(error), summarize(error), limit_s=relay.report_limit_s)
            raise
        finally:
            notice.end()
            if template is not None:
                template.end()
        stop_signal, killed = relay.ranks_ended()
        timeline.ends()
        watch.stop()
        if keeper is not None:
            keeper.finish(lambda: relay.remaining_s)
        orphans.end(lambda: relay.remaining_s)
        records = read_records(folder, outcome.restarts)
        verdict = reach_verdict(outcome.exit_codes, records, stop_signal=stop_signal, killed=killed)
        rank = first_failure(outcome.exit_codes, records)
        error = records[rank].message if rank is not None and rank in records else ""
        reporter.end(
            verdict.exit_code,
            verdict.message or error,
            error=error,
            rank=rank,
            is_reported=any(record.exit_code is not None for record in records.values()),
            limit_s=relay.report_limit_s,
        )
        if verdict.message:
            used_up = (
                f"; all {plan.max_restarts} restarts are used up" if 0 < plan.max_restarts == outcome.restarts else ""
            )
            _log.error("%s%s", verdict.message, used_up)
        return verdict.exit_code


def _start_keeper(settings: RunSettings, folder: Path) -> KeeperProcess | None:
    if not block.are_available() or settings.snapshot_slots == 0:
        return None
    events = None if settings.job_events is None else str(settings.job_events)
    return KeeperProcess(
        KeeperPlan(key=new_keeper_key(), verbosity=settings.verbosity, scratch=str(folder), events=events)
    )


def _make_template(plan: LaunchPlan, settings: RunSettings, relay: SignalRelay) -> TemplateProcess | None:
    """The process from which the ranks are copied; None if the ranks are started one by one.

    If the number of ranks is known, the process is started: it imports modules while this process imports the agent.
    """
    if not settings.preload or not sys.platform.startswith("linux"):
        return None
    HashSeed(program=plan.program, is_module=plan.is_module).choose()
    plan.set_default_threads()
    template = TemplateProcess(plan.program, is_module=plan.is_module, is_stopping=lambda: bool(relay.signal))
    if plan.nproc_per_node.isdecimal():
        template.start()
    return template


def _prepare_environment(settings: RunSettings) -> None:
    os.environ.update({name: text for name, text in settings.to_environment().items() if text})
    for name, text in settings.to_environment().items():
        if not text:
            os.environ.pop(name, None)
    if os.environ.get(STATUS_URL):
        # Safepoint posts the progress. The callback of transformers' Trainer must not post too: it would report
        # 100 % for an interrupted run.
        os.environ.setdefault("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    # Without this setting, torch elastic kills ranks 30 s after a signal.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(settings.grace_s))
    if settings.verbosity == 0:
        # torch elastic reports Safepoint's exit codes as failures; the verdict names the real failures.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
