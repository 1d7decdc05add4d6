"""Starts the launchers of one attempt, stops them with SIGTERM and a grace period, and reads their exit codes."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safepoint.errors import ExitCode
from safepoint.foundation import clock, processes
from safepoint.foundation.processes import JOB_VARIABLE
from safepoint.jobs.local.attempt import rank_reports
from safepoint.jobs.local.attempt.node import read_exit_code, write_plan
from safepoint.jobs.local.attempt.steps import JobStoppedError
from safepoint.jobs.local.slots import VISIBLE
from safepoint.jobs.model.connections import with_keys
from safepoint.jobs.model.records import NodeRecord
from safepoint.jobs.model.spec import JobSpec

_RANK_LOGS = "SAFEPOINT_RANK_LOGS"
_OURS = ("SAFEPOINT_", "PET_", "TORCHELASTIC_")
_TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
_KEPT = ("SAFEPOINT_VERIFY_TLS",)
_AFTER_A_LOSS_S = 10.0
"""How long launchers may continue after one of them has failed."""
_KILLED_LATER_S = 2.0
"""Launchers are killed this long after the end of the grace period. Until then they can kill their own ranks."""
_GONE_WITHIN_S = 30.0
_PORT_S = 0.5


class Launchers:
    """The launchers of one attempt of one job.

    Args:
        spec: the specification of the job.
        folder: the folder of the job.
        attempt: the number of the attempt.
        nodes: the launchers that an earlier supervisor has started.
    """

    def __init__(self, spec: JobSpec, folder: Path, attempt: int, nodes: Sequence[NodeRecord] = ()) -> None:
        self._spec = spec
        self._folder = folder
        self._attempt = attempt
        self._nodes = list(nodes)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._asked_s: float | None = None
        self._lost_s: float | None = None
        self._port: int | None = None
        self._listening: socket.socket | None = None

    def reserve_port(self, may_continue: Callable[[], bool]) -> None:
        """Listen at a free port, if there are several nodes. Call this before `start`.

        The launcher of node 0 inherits the listening socket, so that no other user can take the port. The other
        launchers need only the number of the port. If other programs use all ports of this machine, wait for a free
        port.

        Raises:
            JobStoppedError: `may_continue` has returned False.
            OSError: no socket can be made, for another reason.
        """
        while self._spec.num_nodes > 1 and self._listening is None:
            try:
                self._listening = socket.create_server(("127.0.0.1", 0))
                self._port = self._listening.getsockname()[1]
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if not may_continue():
                    raise JobStoppedError from error
                clock.sleep(_PORT_S)

    def start(self, node: int, environ: Mapping[str, str], gpus: tuple[str, ...] | None) -> NodeRecord:
        """Start the launcher of one node.

        Args:
            node: the number of the node.
            environ: see `launcher_environment`.
            gpus: the devices that the launcher may use: an empty tuple if it may use none, and None on a machine
                without GPUs.

        Raises:
            OSError: the launcher cannot be started.
        """
        plan_file = self._plan_file(node)
        plan_file.parent.mkdir(parents=True, exist_ok=True)
        listening, self._listening = self._listening, None
        settings = replace(self._spec.settings.of_job(), job_dir=str(self._folder))
        if self._spec.resume_mark is not None:  # if the start finds no mark, it resumes from the chosen checkpoint
            settings = replace(settings, first_start=self._spec.resume_mark, from_scratch=False)
        elif rank_reports.has_begun(self._folder):  # --resume and --from-scratch apply to the first start only
            settings = replace(settings, has_begun=True, from_scratch=False)
        spec = self._spec
        plan = {
            "program": spec.program,
            "is_module": spec.is_module,
            "nproc_per_node": str(spec.ranks_per_node),
            "nnodes": spec.num_nodes,
            "node_rank": node,
            "master_addr": "127.0.0.1" if spec.num_nodes > 1 else None,
            "master_port": self._port,
            "listening": None if listening is None else listening.fileno(),
            "max_restarts": spec.max_restarts,
        }
        write_plan(plan_file, plan, settings)
        devices = {} if gpus is None or VISIBLE in spec.env else {VISIBLE: ",".join(gpus)}
        output = self._folder / "logs" / f"node-{node}.log"
        output.parent.mkdir(exist_ok=True)
        with output.open("ab") as stream, listening or contextlib.nullcontext():
            process = subprocess.Popen(
                [spec.python, "-P", "-m", "safepoint.jobs.local.attempt.node", str(plan_file)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=spec.working_dir,
                env={**environ, JOB_VARIABLE: str(self._folder), _RANK_LOGS: str(output.parent), **devices},
                start_new_session=True,
                pass_fds=() if listening is None else (listening.fileno(),),
            )
        identity = processes.identify(process.pid)
        if identity is None:
            raise OSError(f"the launcher of node {node} ended at once")
        self._children[process.pid] = process
        record = NodeRecord(node=node, process=identity, gpus=gpus or ())
        self._nodes.append(record)
        return record

    def readopt(self) -> None:
        """Create the folder for the exit codes of restored launchers."""
        self._plan_file(0).parent.mkdir(parents=True, exist_ok=True)

    def _plan_file(self, node: int) -> Path:
        return self._folder / f"attempt-{self._attempt}" / f"node-{node}.json"

    @property
    def pids(self) -> list[int]:
        """The pids of the launchers that run, in the order of their nodes."""
        return [node.process.pid for node in self._nodes if node.process.is_alive]

    @property
    def asked_s(self) -> float | None:
        """When the launchers were asked to stop, on the monotonic clock; None if they were not asked."""
        return self._asked_s

    @property
    def are_complete(self) -> bool:
        """Whether all launchers were started.

        An earlier supervisor may have been killed before it had started all launchers.
        """
        return len(self._nodes) == self._spec.num_nodes

    @property
    def are_alive(self) -> bool:
        """Whether any launcher is alive."""
        alive = any(node.process.is_alive for node in self._nodes)
        for process in self._children.values():
            # `poll` comes after the check above, so that it reaps each child that the check found dead.
            process.poll()
        return alive

    def ask_to_stop(self) -> None:
        """Send SIGTERM to all launchers, once. The grace period begins."""
        if self._asked_s is None:
            self._asked_s = clock.monotonic_s()
            for node in self._nodes:
                node.process.send(signal.SIGTERM)

    def enforce(self) -> None:
        """Kill the launchers after the grace period. If one launcher has failed, stop the others. Call this often."""
        now_s = clock.monotonic_s()
        if self._asked_s is not None:
            if now_s - self._asked_s >= self._spec.settings.grace_s + _KILLED_LATER_S:
                self.kill()
            return
        ended = (node.node for node in self._nodes if not node.process.is_alive)
        if self._lost_s is None and any(self._exit_code(node) != 0 for node in ended):
            self._lost_s = now_s
        if self._lost_s is not None and now_s - self._lost_s >= _AFTER_A_LOSS_S:
            self.ask_to_stop()

    def kill(self) -> None:
        """Kill every process of the job."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        processes.kill(processes.processes_of(self._folder))
        # Kill each launcher by its pid too, because `processes_of` may not find a launcher that has just started.
        for node in self._nodes:
            node.process.send(signal.SIGKILL)

    def wait_until_gone(self) -> None:
        """Wait until all processes of the job have ended.

        Keepers (the processes that write snapshots to disk) may commit after their launchers have ended.

        Processes that still run after the grace period (at least 30 s) are killed.
        """
        deadline_s = clock.monotonic_s() + max(_GONE_WITHIN_S, self._spec.settings.grace_s)
        # This reads /proc and uses no pidfds, because processes of the job may start other processes meanwhile.
        while self.are_alive or processes.processes_of(self._folder):
            if clock.monotonic_s() >= deadline_s:
                self.kill()
            clock.sleep(0.05)

    @property
    def exit_codes(self) -> list[int | None]:
        """The exit codes, in the order of the nodes; None for a launcher that still runs, or that was killed."""
        return [self._exit_code(node) for node in range(self._spec.num_nodes)]

    def _exit_code(self, node: int) -> int | None:
        """The exit code that the launcher wrote; if it wrote no exit code, the exit code of its process.

        None if the launcher still runs or was killed, or if an earlier supervisor started the launcher and it wrote
        no exit code.
        """
        code = read_exit_code(self._plan_file(node))
        child = next((self._children.get(known.process.pid) for known in self._nodes if known.node == node), None)
        if code is not None or child is None or child.poll() is None or child.returncode < 0:
            return code
        return child.returncode or ExitCode.FAILED  # a launcher that wrote no exit code has failed, even with 0

    def tidy(self) -> None:
        """Remove the files of this attempt."""
        shutil.rmtree(self._plan_file(0).parent, ignore_errors=True)


def launcher_environment(spec: JobSpec, secrets: Mapping[str, str], extra_path: Path | None) -> dict[str, str]:
    """The environment of a job's launchers: the job's variables, and the variables of this process except settings of
    a run.

    Args:
        spec: the specification of the job.
        secrets: the keys of its data connection.
        extra_path: the folder with packages that were installed for the job; None if there are no such packages.
    """
    environ = {
        name: text
        for name, text in os.environ.items()
        if name in _KEPT or (not name.startswith(_OURS) and name not in _TORCHRUN)
    }
    environ = {**with_keys(environ, secrets), **spec.env}
    if extra_path is not None:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(extra_path), environ.get("PYTHONPATH", ""))))
    return environ
