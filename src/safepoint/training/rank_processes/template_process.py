"""The launcher's side of the template, the process from which ranks are copied.

In any doubt, the template is ended, the ranks are started as new processes, and one log line gives the reason. A
template that has died or hangs is replaced. An unfit template is not replaced.
"""

import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.channels.channel import ChannelError, close_all
from safepoint.foundation.processes import STOPPED, close_in_children, run_state, status_words
from safepoint.training.rank_processes.messages import (
    Birth,
    Born,
    Import,
    Message,
    Plan,
    Ready,
    Stale,
    TemplateChannel,
    Unfit,
)
from safepoint.training.rank_processes.template import OWN_VARIABLES, VARIABLE

_log = logging.getLogger("safepoint")
_ANSWER_S = 30.0
"""Seconds that a template may take to copy itself. A copy takes some hundredths of a second, but the template may
still be importing modules that the launcher has requested."""
_IMPORT_S = 600.0
"""Seconds that the imports of a template may take, for example on a slow network file system."""
_LOOK_S = 0.05
_MOST_DEATHS = 3
_LIMITS = (
    *(resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA, resource.RLIMIT_STACK),
    *(resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_AS),
)


class TemplateProcess:
    """The template of a node. No process runs before `start`.

    Args:
        program: script and arguments, or module and arguments.
        is_module: whether the program is a module.
        is_stopping: returns whether a stop was requested. If so, no call waits any longer.
    """

    def __init__(self, program: Sequence[str], *, is_module: bool, is_stopping: Callable[[], bool]) -> None:
        self._plan = Plan(program=tuple(program), is_module=is_module, launcher_pid=os.getpid())
        self._is_stopping = is_stopping
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: TemplateChannel | None = None
        self._is_ready = False
        self._num_deaths = 0
        self._has_given_up = False

    @property
    def pid(self) -> int | None:
        """The pid of the running template, or None."""
        return None if self._process is None else self._process.pid

    @property
    def rank_arguments(self) -> tuple[str, ...]:
        """The arguments of every rank, after `python -m safepoint.training`."""
        return (*(("-m",) if self._plan.is_module else ()), *self._plan.program)

    def ensure(self) -> bool:
        """Start a new template if the last template has died. Returns whether the last template still runs."""
        if self._process is not None and self._process.poll() is not None:
            self._fail(f"it ended with {self._process.returncode}")
        if self._process is not None:
            return True
        self.start()
        return False

    def start(self) -> None:
        """Start a template, unless a template runs or cannot be used. It imports while this process continues."""
        if self._process is not None or self._has_given_up:
            return
        own, other = socket.socketpair()
        variables = os.environ | OWN_VARIABLES | {VARIABLE: str(other.fileno())}
        try:
            # This is the command line of a rank, because `ps` shows it for the ranks, too.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "safepoint.training", *self.rank_arguments],
                env=variables,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            own.close()
            self.give_up(f"no process can be started: {error.strerror}")
            return
        finally:
            other.close()
        close_in_children(own)
        self._channel = TemplateChannel(own)
        self._is_ready = False
        with contextlib.suppress(ChannelError):  # if the template has ended, the first request finds that out
            self._channel.send_message(self._plan)

    def bear(
        self, environments: Sequence[Mapping[str, str]], streams: Sequence[tuple[int, int]], go: int
    ) -> tuple[int, ...] | None:
        """Copy the template once for each rank. The ranks begin when they can read a byte from `go`.

        Args:
            environments: the whole environment of each rank.
            streams: the descriptors for stdout and stderr of each rank.
            go: the reading end of a pipe.

        Returns:
            The pids of the ranks, which are children of this process; None if the ranks have to be started as new
            processes. Ranks that were copied before a failure end when the pipe is closed.
        """
        for _ in range(2):  # the second attempt uses a new template, if the first template was out of date
            self.start()
            answer = self._ask(environments, streams, go)
            if isinstance(answer, Born) and len(answer.pids) == len(environments):
                return answer.pids
            if isinstance(answer, Stale):
                _log.info("a file of %s has changed on disk; the packages are imported again", answer.module)
                self.end()
                continue
            if isinstance(answer, Unfit):
                self.give_up(f"{answer.name} {answer.reason}")
            elif answer is not None:
                self._fail("it sent a message that does not fit")
            return None
        return None

    def import_more(self, modules: Sequence[str]) -> None:
        """Let the template import more modules, while the ranks train. The template must be ready."""
        assert self._channel is not None
        try:
            self._channel.send_message(Import(modules=tuple(modules)))
        except ChannelError as error:
            self._fail(str(error))

    def becomes_ready(self) -> bool:
        """Whether the template has finished its first imports. This call does not wait for them."""
        if not self._is_ready and self._channel is not None and self._channel.has_data(0):
            try:
                self._take_ready(self._receive(_ANSWER_S))
            except ChannelError as error:
                self._fail(str(error))
        return self._is_ready

    def _take_ready(self, answer: Message) -> None:
        if isinstance(answer, Ready):
            self._is_ready = True
            _log.debug("%d modules were imported in %.1f s", answer.num_modules, answer.took_s)
        elif isinstance(answer, Unfit):
            self.give_up(f"{answer.name} {answer.reason}")
        else:
            self._fail("it sent a message that does not fit")

    def end(self) -> None:
        """End the template. Ranks that were copied from it continue."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()  # not `terminate`, which does not end a process that SIGSTOP has suspended
            process.wait()

    def _ask(
        self, environments: Sequence[Mapping[str, str]], streams: Sequence[tuple[int, int]], go: int
    ) -> Message | None:
        if self._channel is None:
            return None
        birth = birth_here([self.rank_arguments for _ in environments], environments)
        try:
            if not self._is_ready:
                self._take_ready(self._receive(_IMPORT_S))
            if not self._is_ready:
                return None
            self._channel.send_message(birth, [0, *(stream for pair in streams for stream in pair), go])
            return self._receive(_ANSWER_S)
        except ChannelError as error:
            self._fail(str(error))
            return None

    def _receive(self, limit_s: float) -> Message:
        """Wait for an answer of the template.

        Raises:
            ChannelError: there was no answer within `limit_s`, the template has ended or is suspended (for example by
                SIGSTOP), or a stop of the ranks was requested.
        """
        assert self._channel is not None
        assert self._process is not None
        end_s = clock.monotonic_s() + limit_s
        while not self._channel.has_data(_LOOK_S):
            if self._is_stopping():
                raise ChannelError("a stop was requested")
            if run_state(Path(f"/proc/{self._process.pid}")) in STOPPED:
                raise ChannelError("it is suspended, for example by SIGSTOP")
            if clock.monotonic_s() > end_s:
                raise ChannelError("it does not answer")
        message, descriptors = self._channel.receive_message(_ANSWER_S)
        close_all(descriptors)
        return message

    def _fail(self, reason: str) -> None:
        self._num_deaths += 1
        self.end()
        if self._is_stopping():
            return
        if self._num_deaths >= _MOST_DEATHS:
            self.give_up(f"this process failed {self._num_deaths} times: {reason}")
        else:
            _log.warning(
                "the process from which the ranks are copied failed: %s; this time the ranks import everything by "
                "themselves, which takes longer",
                reason,
            )

    def give_up(self, reason: str) -> None:
        """From now on, start all ranks as new processes.

        Args:
            reason: why no rank can be copied. Only the reason of the first call is logged.
        """
        if self._has_given_up:
            return
        self._has_given_up = True
        self.end()
        _log.warning(
            "the ranks cannot be copied from a process that has imported their packages: %s; the ranks import "
            "everything by themselves, which takes longer; --no-preload avoids this message",
            reason,
        )


def birth_here(arguments: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> Birth:
    """The request for processes with the folder, the mask, the cores and the limits of this process.

    Args:
        arguments: the arguments of each process.
        environments: the whole environment of each process.
    """
    return Birth(
        arguments=tuple(tuple(one) for one in arguments),
        environments=tuple(dict(one) for one in environments),
        folder=os.getcwd(),
        umask=_umask(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        limits={str(number): _limits_of(number) for number in _LIMITS},
    )


def _umask() -> int:
    """The mask of this process. `os.umask` can return the mask only if it sets another mask."""
    words = status_words(Path("/proc/self"), b"Umask:")
    return int(words[0], 8) if words else 0o022


def _limits_of(number: int) -> tuple[int | None, ...]:
    return tuple(None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(number))
