"""Runs the user's program as one rank: installs signal handlers and hooks, and decides the exit code."""

import atexit
import functools
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from safepoint.errors import ExitCode, PeerError, SafepointError, UsageError, printable_lines
from safepoint.foundation.events.start_events import Phase
from safepoint.foundation.processes import end_with_parent
from safepoint.snapshot.protocol.messages import Goodbye
from safepoint.training import program as user_program
from safepoint.training.context.rank_context import RankContext, current_context
from safepoint.training.integrations import install_integrations
from safepoint.training.outcome.launcher_folder import keep_rank_in_its_folder
from safepoint.training.outcome.program_error import exit_code_after, summarize
from safepoint.training.program import find_script, run_program
from safepoint.training.rank_processes.loaded_modules import write_loaded_modules

_log = logging.getLogger("safepoint")
LOGS_VARIABLE = "SAFEPOINT_RANK_LOGS"
"""The environment variable that names a folder. Each rank writes its output to a file there. If the variable is not
set, ranks write to the output of their launcher."""
_USAGE = "python -m safepoint.training SCRIPT [ARGS…]  or  python -m safepoint.training -m MODULE [ARGS…]"


def main(arguments: list[str]) -> int:
    """Run the program that `arguments` name, then end this process with the exit code of the rank.

    Returns:
        `ExitCode.USAGE`, if the environment is invalid. Otherwise the function does not return.
    """
    try:
        context = current_context()
    except (SafepointError, ValueError) as error:
        sys.stderr.write(f"{printable_lines(f'safepoint: error: {error}')}\n")
        return ExitCode.USAGE
    outcome = context.outcome
    if context.settings.launcher_pid is not None:
        # A rank that was copied from the template has another parent than the template.
        end_with_parent(context.settings.launcher_pid, signal.SIGTERM)
    keep_rank_in_its_folder(context.settings.record_folder)
    _print_into(os.environ.get(LOGS_VARIABLE), context.place.rank)
    code = _run_to_its_end(context, arguments)
    if code == ExitCode.OK and context.outputs.is_empty and context.place.is_first:
        _log.warning(
            "the script has ended. Safepoint saved nothing, and the options of Safepoint had no effect, because the "
            "script used no Trainer of Hugging Face or TRL, no SafepointCallback, no safepoint.session and no "
            "safepoint.epochs"
        )
    if outcome.interrupted is None:
        code = _finish_uploads(context, code)
    if code == ExitCode.OK and outcome.unsaved_end:
        code = ExitCode.STORAGE
        context.record.ended(code, outcome.unsaved_end)
        if context.place.is_first:
            _log.error("%s", outcome.unsaved_end)
    is_prompt = outcome.interrupted is not None or code == ExitCode.FAILED
    if outcome.interrupted is not None:  # also when the program caught the interruption and ran to its end
        code = outcome.interrupted.exit_code
    outcome.program_ended(code, context.record.message)
    if context.keeper.client is not None and (code == ExitCode.OK or outcome.interrupted is not None):
        context.keeper.client.send(Goodbye())
    _exit(context, code, wait_for_threads=not is_prompt)
    return code


def _run_to_its_end(context: RankContext, arguments: list[str]) -> int:
    try:
        is_module, program = _parse(arguments)
        install_integrations(context)
        folder = context.settings.record_folder
        if context.settings.preload and folder is not None and context.place.local_rank == 0:
            context.outcome.on_first_step = functools.partial(write_loaded_modules, folder)
        context.record.passed(Phase.SCRIPT_BEGUN)
        run_program(program, is_module=is_module)
    except PeerError as error:
        context.record.failed(lost_peer=True, message=str(error))
        _log.error("%s", error)
        return error.exit_code
    except SafepointError as error:
        context.record.ended(error.exit_code, str(error))
        if context.place.is_first or context.reporter.warns_for_node or error.exit_code == ExitCode.USAGE:
            _log.error("%s", error)
        return error.exit_code
    except SystemExit as error:
        code = exit_code_after(error)
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
        if code:
            context.record.failed(lost_peer=False, message=f"the script exited with code {code}")
        return code
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  the user's program failed
        is_sigint = isinstance(error, KeyboardInterrupt)
        context.record.failed(lost_peer=False, message="SIGINT" if is_sigint else summarize(error))
        if is_sigint or context.outcome.interrupted is None:
            _print_user_traceback(error)
        return exit_code_after(error)
    return ExitCode.OK


def _finish_uploads(context: RankContext, code: int) -> int:
    """Wait for the uploads. Returns `code`, or `ExitCode.STORAGE` if `code` is 0 and not everything was uploaded."""
    uploads = context.uploads
    if code == ExitCode.OK:
        uploads.adopt_scripts_model()
    is_complete = uploads.finish(newest_only=code != ExitCode.OK)
    context.outcome.wait_for_end()
    missing = uploads.missing(is_complete=is_complete)
    if code != ExitCode.OK or not missing:
        return code
    if is_complete:  # if not, `finish` has already reported the unfinished uploads
        _log.error("%s", missing)
    context.record.ended(ExitCode.STORAGE, missing)
    return ExitCode.STORAGE


def _parse(arguments: list[str]) -> tuple[bool, list[str]]:
    is_module = arguments[:1] == ["-m"]
    program = arguments[1:] if is_module else arguments
    if not program or program[0].startswith("-"):
        raise UsageError("no script was named", hint=_USAGE)
    return is_module, program if is_module else [str(find_script(program[0])), *program[1:]]


def _exit(context: RankContext, exit_code: int, *, wait_for_threads: bool) -> None:
    """End the process without tearing the interpreter down.

    The tear-down takes longer than the save of a small model, and it can hang: the destructor of torch's gloo group
    holds the interpreter's lock while it joins threads that wait for this lock. This function does only two parts of
    a tear-down: it waits for Python's threads (if `wait_for_threads`), and runs the exit handlers.
    """
    if wait_for_threads:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    # Loggers and trackers flush in their exit handlers. If these hang after an interruption, the watch thread of
    # `Termination` still ends the process at the deadline.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    context.outcome.end_now(exit_code)


def _print_into(folder: str | None, rank: int) -> None:
    """Redirect stdout and stderr of this process and its children to one file in `folder`; None changes nothing."""
    if not folder:
        return
    try:
        file = os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        _log.warning(
            "rank %d cannot write its output to a file in %s: %s; the rank writes to the launcher's output instead",
            rank,
            folder,
            error.strerror,
        )
        return
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _print_user_traceback(error: BaseException) -> None:
    """Print the traceback as Python would, without the frames of Safepoint and `runpy` that ran the script.

    If the traceback has no other frames, all its frames are printed. If the script cannot be compiled, no frame is
    printed, because no code of the script has run.
    """
    ours = (str(Path(__file__)), user_program.__file__, "<frozen runpy>", runpy.__file__)
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in ours:
        frame = frame.tb_next
    if frame is None and not isinstance(error, SyntaxError):
        frame = error.__traceback__
    lines = traceback.format_exception(type(error), error, frame)
    sys.stderr.write(printable_lines("".join(lines)))
