"""Tells a person what a slow start waits for: one line in the log, while the ranks have not begun to train.

A start that reaches its training within a few seconds prints nothing. The line is printed at most once, for the first
start of the ranks. If one of the launcher's own imports holds the interpreter at that time, the line comes later.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from safepoint.foundation.events.start_events import Phase
from safepoint.foundation.units import plural
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.launcher.start_phases.start_timeline import StartTimeline
from safepoint.training.rank_processes.preload_list import wanted_imports

_log = logging.getLogger("safepoint")
_AFTER_S = 3.0
_MOST_PACKAGES = 5


class StartNotice:
    """Prints what the first start of the ranks waits for, if the start is slow, on a thread of its own.

    Args:
        plan: which ranks are started.
        timeline: how far the start is.
        is_wanted: returns whether the line may be printed.
    """

    def __init__(self, plan: LaunchPlan, timeline: StartTimeline, *, is_wanted: Callable[[], bool]) -> None:
        self._plan = plan
        self._timeline = timeline
        self._is_wanted = is_wanted
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="safepoint-start-notice", daemon=True).start()

    def end(self) -> None:
        """Print nothing from now on, because the ranks have ended."""
        self._is_over.set()

    def _run(self) -> None:
        if self._is_over.wait(_AFTER_S):
            return
        line = describe_start(self._plan, self._timeline)
        if line and not self._is_over.is_set() and self._is_wanted():
            _log.info("%s", line)


def describe_start(plan: LaunchPlan, timeline: StartTimeline) -> str:
    """What the start of the ranks of this node waits for; empty if they have begun to train.

    Args:
        plan: which ranks are started.
        timeline: how far the start is.
    """
    is_one = plan.nproc_per_node == "1"
    ranks = plural(int(plan.nproc_per_node), "rank") if plan.nproc_per_node.isdecimal() else "the ranks"
    node = f" on node {plan.node_rank} of {plan.nnodes}" if plan.nnodes > 1 else ""
    if timeline.has_passed(Phase.TRAINER_REACHED):
        is_waiting = plan.nnodes > 1 and not timeline.has_passed(Phase.GROUP_FORMED)
        return f"{ranks}{node} {'waits' if is_one else 'wait'} for the ranks of the other nodes" if is_waiting else ""
    packages = _packages(plan)
    if timeline.has_passed(Phase.SCRIPT_BEGUN):
        # If the ranks were copied from a process that has imported the packages, the script imports them in no time.
        imported = "" if timeline.has_passed(Phase.IMPORTS_DONE) else f"imported its packages ({packages}) and "
        program = plan.program[0] if plan.is_module else Path(plan.program[0]).name
        return (
            f"{ranks}{node} {'runs' if is_one else 'run'} {program}; the training begins when the script has "
            f"{imported}prepared its model and its data"
        )
    is_connecting = plan.nnodes > 1 and not timeline.has_passed(Phase.STORE_READY)
    connecting = f", connecting to the other nodes through {plan.master_addr}" if is_connecting else ""
    return f"starting {ranks}{node}: importing {packages}{connecting}"


def _packages(plan: LaunchPlan) -> str:
    """The packages that the program imports, torch first. Each rank imports torch in any case."""
    found = dict.fromkeys(["torch", *(one.package for one in wanted_imports(plan.program, is_module=plan.is_module))])
    names = [name for name in found if name != "safepoint"]
    return ", ".join([*names[:_MOST_PACKAGES], "…"] if len(names) > _MOST_PACKAGES else names)
