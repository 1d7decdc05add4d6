"""The template of a test process: it imports what launchers and ranks import, and copies itself on request.

It ends when the test process closes the connection. A copy that is a launcher leaves a template of its own beside it
before it begins, from which its ranks are copied: a process can only be the child of one that is above its template.
"""

import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from safepoint.foundation.channels.channel import ChannelError, close_all
from safepoint.foundation.processes import set_name
from safepoint.training.launcher.compile_cache import CompileCache
from safepoint.training.rank_processes.birth import make_children_of_reaper, restore
from safepoint.training.rank_processes.canary import can_compute
from safepoint.training.rank_processes.fitness import Fitness, UnfitError
from safepoint.training.rank_processes.preload_list import wanted_imports
from safepoint.training.rank_processes.template import import_wanted
from tests.support.copies import copied_program
from tests.support.copies.environment_at_import import EnvironmentAtImport
from tests.support.copies.messages import Begun, CopyChannel, Program, Ready, Refused
from tests.support.copies.title import set_title

_PROGRAM = Path(__file__).parents[2] / "programs" / "tiny.py"
"""The program whose imports are made."""
_MODULES = (
    *("safepoint.training.rank", "safepoint.cli.commands.run"),
    *("safepoint.training.launcher.launch", "safepoint.training.launcher.agent"),
)
_CHANGED = {"TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}
"""What the imports may change in the environment: launchers set the first one for their ranks before these import."""
_PR_SET_PDEATHSIG = 1
_MAY_DIFFER = ("OPENBLAS_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that may have another value in a copy: those of templates; one that copies read again; and one from which
torch computes a constant while it is imported, for caches of packages (`DynamoCache`), which no test makes."""


class Template:
    """Copies this process on request.

    Args:
        channel: the connection to the process that asks, which becomes the parent of the copies.
        environment: which values the environment may have in a copy.
    """

    def __init__(self, channel: CopyChannel, environment: EnvironmentAtImport) -> None:
        self._channel = channel
        self._environment = environment
        self._fitness = Fitness(channel.fileno())

    def check(self, received: Sequence[int] = ()) -> None:
        """Check that this process can be copied.

        Raises:
            UnfitError: it cannot be.
        """
        self._fitness.check("a package", received=received)

    def serve(self) -> None:
        """Answer until the connection is closed.

        Raises:
            ChannelError: it is closed.
        """
        while True:
            message, descriptors = self._channel.receive_message()
            try:
                if isinstance(message, Program):
                    self._channel.send_message(self._answer(message, descriptors))
            finally:
                close_all(descriptors)

    def _answer(self, program: Program, descriptors: Sequence[int]) -> Begun | Refused:
        different = self._different(program)
        if different is not None:
            return Refused(reason=different, is_expected=True)
        try:
            self.check(descriptors)
        except UnfitError as error:
            return Refused(reason=str(error), is_expected=False)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pids = make_children_of_reaper(1, lambda _: self._become(program, descriptors, reader, writer))
        finally:
            os.close(reader)
            os.close(writer)  # only now the copy begins: it has its parent
        return Refused(reason="no process could be made", is_expected=False) if pids is None else Begun(pid=pids[0])

    def _different(self, program: Program) -> str | None:
        """In what the program differs from this process, and a copy cannot; None if it is nothing."""
        name = self._environment.different(program.birth.environments[0], besides=_MAY_DIFFER)
        if name is not None:
            return name
        if program.session not in {None, os.getsid(0)}:
            return "session"
        return None if program.niceness == os.nice(0) + 20 else "niceness"

    def _become(self, program: Program, descriptors: Sequence[int], reader: int, writer: int) -> NoReturn:
        code = 1
        try:
            os.close(writer)
            if program.session is None:
                os.setsid()
            elif program.group != os.getpgid(0):
                os.setpgid(0, program.group)
            for target, stream in enumerate(descriptors):
                os.dup2(stream, target)
            os.read(reader, 1)  # nothing is written: the pipe is closed when the copy has its parent
            variables = program.birth.environments[0]
            restore(program.birth, 0, {})
            tempfile.tempdir = None
            _restore_signals(program)
            words = program.birth.arguments[0]
            if copied_program.is_launcher(words):
                self._leave_template()
            set_title([sys.executable, *words], variables)
            set_name(os.path.basename(sys.executable))
            code = _run(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # noqa: BLE001  as in a process of its own, which would print it and end with 1
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                threading._shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _leave_template(self) -> None:
        """Make a template for the children of this process, and let `subprocess` ask it for those that are ranks."""
        own, other = socket.socketpair()
        parent = os.getpid()
        if os.fork() == 0:
            own.close()
            set_name("copies")
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            with contextlib.suppress(ChannelError):
                if os.getppid() == parent:
                    Template(CopyChannel(other), self._environment).serve()
            os._exit(0)
        other.close()
        copied_program.copy_ranks(CopyChannel(own))


def _restore_signals(program: Program) -> None:
    """The signals that Python ignores or handles at its start, and what the parent ignores and blocks."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in program.ignored or number in {signal.SIGPIPE, signal.SIGXFSZ}:
            handler = signal.SIG_IGN
        else:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        with contextlib.suppress(OSError, ValueError):  # those that the system reserves
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)


def _run(words: Sequence[str]) -> int:
    """Run `python WORDS…`, of which `copied_program` has checked the form."""
    options, module, arguments = copied_program.parse(words)
    sys.orig_argv = [sys.executable, *words]
    sys.argv = ["-m", *arguments]
    if "-P" not in options:
        sys.path.insert(0, os.getcwd())
    if "-u" not in options:
        sys.stdout = sys.__stdout__ = _stream(1, sys.stdout)
        sys.stderr = sys.__stderr__ = _stream(2, sys.stderr)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = builtins
    runpy._run_module_as_main(module)
    return 0


def _stream(descriptor: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """A standard stream as Python opens it without the option -u."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    raw.name = old.name
    is_direct = descriptor == 2 or raw.isatty()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, old.errors, line_buffering=is_direct)
    stream.mode = "w"
    return stream


def _import(environment: EnvironmentAtImport) -> None:
    """Make the imports.

    Raises:
        UnfitError: they have changed the environment.
    """
    from safepoint.training.integrations import install_before_ranks, prepare_before_ranks

    before = dict(os.environ)
    environment.allow(before)
    with environment.recorded():
        install_before_ranks()
        for name in _MODULES:
            importlib.import_module(name)
        for wanted in wanted_imports((str(_PROGRAM),), is_module=False):
            import_wanted(wanted)
        prepare_before_ranks()
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    if changed - _CHANGED:
        raise UnfitError("a package", f"has changed the environment: {sorted(changed - _CHANGED)}")
    for name in changed:
        os.environ.pop(name)
    with tempfile.TemporaryDirectory() as scratch:
        CompileCache(Path(scratch)).protect()  # as launchers do before they start ranks
        environment.allow(os.environ)


def main(descriptor: int) -> None:
    """Serve the process at the other end of this descriptor."""
    set_name("copies")
    channel = CopyChannel(socket.socket(fileno=descriptor))
    environment = EnvironmentAtImport()
    template = Template(channel, environment)
    try:
        _import(environment)
        if fault := can_compute():
            raise UnfitError("a package", fault)  # noqa: TRY301  one place that answers
        set_title([sys.executable, "-m", "tests.support.copies.template"], os.environ)
        template.check()
    except (UnfitError, OSError) as error:
        channel.send_message(Refused(reason=str(error), is_expected=False))
        return
    gc.collect()
    gc.freeze()
    with contextlib.suppress(ChannelError):
        channel.send_message(Ready())
        template.serve()
