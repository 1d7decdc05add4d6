"""Starts the ranks of a node for torch elastic: as copies of the template if possible, and as new processes if not.

In both cases torch elastic gets a `SubprocessContext`, whose handlers have a process with `poll` and `wait`.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from safepoint.foundation import clock
from safepoint.training.rank_processes.template_process import TemplateProcess

_LOOK_S = 0.01


class CopiedProcess:
    """A child process that another process has created, with the part of `subprocess.Popen` that torch elastic uses.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code has waited for it, and its exit code is lost
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        end_s = None if timeout is None else clock.monotonic_s() + timeout
        while (code := self.poll()) is None:
            if end_s is not None and clock.monotonic_s() >= end_s:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            clock.sleep(_LOOK_S)
        return code


class _Handler:
    """The part of `SubprocessHandler` that torch elastic uses."""

    def __init__(self, process: CopiedProcess, local_rank: int) -> None:
        self.proc = process
        self.local_rank_id = local_rank

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the rank and to the processes that it has started."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


class _CopiedRanks(SubprocessContext):
    """The ranks of one start, copied from the template if possible."""

    def __init__(self, template: TemplateProcess, **arguments: Any) -> None:
        self._template = template
        super().__init__(**arguments)  # pyright: ignore[reportUnknownMemberType]

    def _start(self) -> None:
        if self._numa_options is not None:
            self._template.give_up("NUMA binding was requested, for which torch starts each rank through numactl")
        elif self._copy():
            return
        super()._start()

    def _copy(self) -> bool:
        count, opened = self.nprocs, list[int]()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            streams: list[tuple[int, int]] = []
            for rank in range(count):
                pair: list[int] = []
                for standard, path in ((1, self.stdouts[rank]), (2, self.stderrs[rank])):
                    if path:
                        opened.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
                    pair.append(opened[-1] if path else standard)
                streams.append((pair[0], pair[1]))
            environments = [os.environ | self.envs[rank] for rank in range(count)]
            pids = self._template.bear(environments, streams, reader)
            if pids is None:
                return False
            self.subprocess_handlers: dict[int, Any] = {
                rank: _Handler(CopiedProcess(pid), rank) for rank, pid in enumerate(pids)
            }
            os.write(writer, bytes(count))
            return True
        finally:
            for descriptor in (reader, writer, *opened):
                os.close(descriptor)


@contextlib.contextmanager
def copied_from(template: TemplateProcess | None) -> Generator[None]:
    """In the block, torch elastic's agent copies ranks from `template`. If it is None, the ranks start as usual."""
    if template is None:
        yield
        return
    library: Any = local_elastic_agent
    start_processes = library.start_processes

    def start_copies(*positional: Any, **arguments: Any) -> Any:
        if positional or arguments.get("entrypoint") != sys.executable:
            return start_processes(*positional, **arguments)
        arguments.pop("start_method", None)  # this argument has no effect on programs
        context = _CopiedRanks(template, **arguments)
        try:
            context.start()
        except Exception:
            context.close()
            raise
        return context

    library.start_processes = start_copies
    try:
        yield
    finally:
        library.start_processes = start_processes
