"""Starts programs as copies of a template: `subprocess.Popen` for commands that a template can run."""

import atexit
import contextlib
import ctypes
import dataclasses
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safepoint.foundation.channels.channel import ChannelError
from safepoint.foundation.processes import close_in_children
from safepoint.training.rank_processes.template import OWN_VARIABLES
from safepoint.training.rank_processes.template_process import birth_here
from tests.support.copies.messages import Begun, CopyChannel, Program, Ready, Refused
from tests.support.job_environment import environment
from tests.support.patience import PATIENCE

VARIABLE = "SAFEPOINT_TEST_TEMPLATE"
"""The environment variable that turns copies off, with the value 0."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_LIMIT_S = 60 * PATIENCE
_ROOT = Path(__file__).parents[3]
_MODULES = frozenset({"safepoint.cli.main", "safepoint.training"})
_START = "import sys; sys.path.append(sys.argv[1]); from tests.support.copies import template; del sys.path[-1]; "
_START += "template.main(int(sys.argv[2]))"
_execute = subprocess.Popen._execute_child
_SIGNATURE = inspect.signature(_execute)
_environment = environment()
"""That of jobs, as it is before the first test can change it."""
is_off = os.environ.get(VARIABLE) == "0"
"""Whether programs are started as new processes. The fixture `both_ways` changes it."""
COPIED = "copied"
counted: Counter[str] = Counter()
"""How many programs were copied, and why others were not."""


def parse(words: Sequence[str]) -> tuple[set[str], str, list[str]] | None:
    """The options, the module and the arguments of `python WORDS…`; None if a template does not run such programs."""
    options = set[str]()
    for number, word in enumerate(words):
        if word in {"-P", "-u"}:
            options.add(word)
        elif word == "-m" and _MODULES.intersection(words[number + 1 : number + 2]):
            return options, words[number + 1], list(words[number + 2 :])
        else:
            break
    return None


def is_launcher(words: Sequence[str]) -> bool:
    """Whether `python WORDS…` starts ranks."""
    parsed = parse(words)
    return parsed is not None and parsed[1] == "safepoint.cli.main" and parsed[2][:1] == ["run"]


class Copies:
    """Asks a template for copies, which become children of this process.

    Args:
        channel: the connection to the template.
    """

    def __init__(self, channel: CopyChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def begin(
        self, words: Sequence[str], streams: Sequence[int], variables: dict[str, str], asked: dict[str, Any]
    ) -> Any:
        """Start `python WORDS…`. The answer is `Begun` or `Refused`."""
        birth = birth_here([words], [variables])
        program = Program(
            birth=dataclasses.replace(birth, folder=os.path.abspath(asked["cwd"] or "")),
            session=None if asked["start_new_session"] else os.getsid(0),
            group=os.getpgid(0),
            ignored=tuple(
                int(number)
                for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
                if signal.getsignal(number) == signal.SIG_IGN
            ),
            blocked=tuple(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            niceness=os.nice(0) + 20,
        )
        with self._lock, _reaper():
            try:
                self._channel.send_message(program, streams)
                return self._channel.receive_message(_LIMIT_S)[0]
            except ChannelError as error:
                self._channel.close()
                return Refused(reason=f"the template failed: {error}", is_expected=False)


@contextlib.contextmanager
def _reaper() -> Any:
    """Orphans of processes below this one become its children while the block runs."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _copy(copies: Copies, process: Any, asked: dict[str, Any]) -> bool:
    words = list(map(os.fspath, asked["args"])) if not isinstance(asked["args"], str) else []
    is_usual = (
        words[:1] == [sys.executable]
        and parse(words[1:]) is not None
        and not any(asked[name] for name in ("executable", "preexec_fn", "pass_fds", "shell", "startupinfo"))
        and all(asked[name] is None for name in ("gid", "gids", "uid"))
        and asked["umask"] == -1
        and asked["process_group"] in {None, -1}
        and asked["close_fds"]
    )
    if not is_usual:
        return False
    given = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
    streams = [number if stream == -1 else stream for number, stream in enumerate(given)]
    variables = dict(os.environ if asked["env"] is None else asked["env"])
    answer = copies.begin(words[1:], streams, variables, asked)
    if isinstance(answer, Refused):
        counted[answer.reason] += 1
        if not answer.is_expected:
            print(f"a program is started as a new process: {answer.reason}", file=sys.stderr)
        return False
    assert isinstance(answer, Begun)
    counted[COPIED] += 1
    process.pid = answer.pid
    process._child_created = True
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(asked[name] for name in names))
    return True


def copy_ranks(channel: CopyChannel) -> None:
    """From now on, `subprocess` starts ranks as copies of the template at the other end of `channel`."""
    copies = Copies(channel)
    close_in_children(channel)

    def execute(self: Any, *positional: Any) -> None:
        asked = dict(_SIGNATURE.bind(self, *positional).arguments)
        if not _copy(copies, self, asked):
            _execute(self, *positional)

    subprocess.Popen._execute_child = execute


class CopiedProgram(subprocess.Popen[bytes]):
    """`subprocess.Popen`, whose program is a copy of this test process's template if it can be."""

    def _execute_child(self, *positional: Any) -> None:
        asked = dict(_SIGNATURE.bind(self, *positional).arguments)
        copies = _copies() if is_launcher(list(asked["args"])[1:]) else None
        if copies is None or not _copy(copies, self, asked):
            _execute(self, *positional)


_started: list[Copies | None] = []
_starting = threading.Lock()


def _copies() -> Copies | None:
    """The template of this test process, which starts with the first program; None if there is none."""
    if is_off:
        return None
    with _starting:
        if not _started:
            _started.append(_start())
        return _started[0]


def _start() -> Copies | None:
    own, other = socket.socketpair()
    command = [sys.executable, "-P", "-u", "-c", _START, str(_ROOT), str(other.fileno())]
    with other:
        process = subprocess.Popen(
            command, env=_environment | OWN_VARIABLES, pass_fds=(other.fileno(),), stdin=subprocess.DEVNULL
        )
    close_in_children(own)
    channel = CopyChannel(own)
    atexit.register(_end, channel, process)
    try:
        answer, _ = channel.receive_message()
    except ChannelError as error:
        answer = Refused(reason=str(error), is_expected=False)
    if isinstance(answer, Ready):
        return Copies(channel)
    print(f"the programs of this test process are not copied: {answer}", file=sys.stderr)
    return None


def _end(channel: CopyChannel, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    process.wait()
