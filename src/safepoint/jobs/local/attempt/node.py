"""The process of one node of a job: a launcher that writes its exit code to a file.

With this file, a supervisor that did not start the launcher can read the exit code too. The command of the
process is `python -m safepoint.jobs.local.attempt.node PLAN`; `Launchers` writes the plan.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from safepoint.errors import ExitCode, SafepointError, printable_lines
from safepoint.foundation.files import write_atomic
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launch import launch
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.outcome.program_error import exit_code_after

_PORT_TAKEN = "EADDRINUSE"
"""Part of the error of torch's store when another process listens on the rendezvous port."""


def write_plan(path: Path, plan: Mapping[str, Any], settings: RunSettings) -> None:
    """Write the file that `main` reads.

    Args:
        path: the file.
        plan: the fields of a `LaunchPlan`. Only the node's process makes the `LaunchPlan`, because creating a
            `LaunchPlan` looks up the program.
        settings: the options of the run.
    """
    document = {
        "plan": dict(plan),
        "settings": {item.name: getattr(settings, item.name) for item in fields(settings)},
    }
    write_atomic(path, json.dumps(document).encode(), durable=False)


def exit_file(plan: Path) -> Path:
    """The file for the exit code of the launcher with this plan."""
    return plan.with_suffix(".exit")


def read_exit_code(plan: Path) -> int | None:
    """The exit code that the launcher wrote; None if it wrote no exit code."""
    try:
        return int(exit_file(plan).read_text())
    except (OSError, ValueError):
        return None


def main(arguments: Sequence[str]) -> int:
    """Run the node, write its exit code, and end the process."""
    path = Path(arguments[0])

    def leave(code: int) -> None:
        write_atomic(exit_file(path), str(int(code)).encode(), durable=False)

    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        document["plan"]["program"] = tuple(document["plan"]["program"])
        plan = LaunchPlan(**document["plan"])
        code = launch(plan, RunSettings(**document["settings"]), on_exit=leave)
    except SafepointError as error:
        sys.stderr.write(f"{printable_lines(f'safepoint: error: {error}')}\n")
        code = error.exit_code
    except BaseException as error:  # noqa: BLE001  the supervisor needs an exit code in any case
        sys.stderr.write(printable_lines(traceback.format_exc()))
        code = _code_after(error)
    leave(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the shutdown of the interpreter, which with torch takes longer than a save


def _code_after(error: BaseException) -> int:
    # Another process has taken the port: interrupted, because the next attempt will choose another port.
    if _PORT_TAKEN in str(error):
        return ExitCode.TERMINATED_UNSAVED
    return exit_code_after(error) or ExitCode.FAILED


if __name__ == "__main__":
    main(sys.argv[1:])
