"""Runs one command in a pod. A command outside of the cluster has started the pod, and reads the pod's log.

This process writes frames to the log (`foundation.events.answer_frames`). The frames contain stdout, stderr, and how
the command ended. This process does not print failures; the command outside prints them.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from safepoint.checkpoint.remote import code
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.checkpoint.tools.removal import COMMAND, remove_all
from safepoint.cli.failures import explain
from safepoint.cli.main import root
from safepoint.errors import ExitCode, SafepointError, StorageError
from safepoint.foundation.environment import forget_service_links
from safepoint.foundation.events.answer_frames import Ending, FrameWriter, Part
from safepoint.storage.location import CLAIMS, parse_location

TERMINAL = "SAFEPOINT_HELPER_TERMINAL"
"""The variable that is set when a person reads stderr on a terminal."""


def main() -> None:
    """Entry point of the archive in the pod of a helper (a Kubernetes Job that runs one command of Safepoint)."""
    # This is the first process of a container: without a handler, the kernel would not deliver SIGTERM to it.
    signal.signal(signal.SIGTERM, _interrupt)
    forget_service_links()
    mounts = dict(pair.split("=", 1) for pair in os.environ.get(CLAIMS, "").split(",") if "=" in pair)
    shown = {folder: f"pvc://{claim}" for claim, folder in mounts.items()}
    writer = FrameWriter(sys.stdout, shown)
    ending = run(sys.argv[1:], writer, is_terminal=bool(os.environ.pop(TERMINAL, "")))
    writer.end(ending)
    sys.exit(ending.code)


def run(arguments: Sequence[str], writer: FrameWriter, *, is_terminal: bool) -> Ending:
    """Run a command of Safepoint, and write its output as frames."""
    before = sys.stdout, sys.stderr
    sys.stdout = writer.stream(Part.STDOUT)
    sys.stderr = writer.stream(Part.STDERR, is_terminal=is_terminal)
    try:
        return _ending_of(arguments)
    finally:
        sys.stdout, sys.stderr = before


def _ending_of(arguments: Sequence[str]) -> Ending:
    try:
        own = _OWN.get(arguments[0])
        if own is not None:
            return own(*arguments[1:])
        ended = root().main(list(arguments), prog_name="safepoint", standalone_mode=False)
        return Ending(code=ended if isinstance(ended, int) else ExitCode.OK)
    except KeyboardInterrupt:
        return Ending(code=ExitCode.SIGINT, message="the pod was stopped; the command was not completed")
    except SystemExit as left:
        return Ending(code=left.code if isinstance(left.code, int) else ExitCode.FAILED)
    except Exception as error:  # noqa: BLE001  the command outside prints every error
        known = explain(error)
        if known is not None:
            return Ending(code=known[0], message=known[1].message, hint=known[1].hint)
        traceback.print_exception(error)
        hint = "this is a bug in Safepoint; report it with the lines above"
        return Ending(code=ExitCode.FAILED, message=f"{type(error).__name__}: {error}", hint=hint)


def _remove(output: str) -> Ending:
    """Delete the checkpoints of a run, and print the number of deleted checkpoints.

    If the folder does not exist, the number is 0.
    """
    inventory, name = open_inventory(output)
    if name is not None:
        raise SafepointError(f"{output} is a single checkpoint; nothing was deleted")
    is_missing = inventory.folder is not None and not inventory.folder.exists()
    if inventory.folder is not None and not is_missing and not inventory.folder.is_dir():
        raise StorageError(f"{output} is not a folder; nothing was deleted")
    num_deleted = 0 if is_missing else remove_all([inventory], output)
    sys.stdout.write(json.dumps({"deleted": num_deleted}))
    return Ending(code=ExitCode.OK)


def _put_code(location: str, digest: str) -> Ending:
    """Join the pieces of a job's code, and write the code to the job's output location."""
    pieces = sorted(path for path in Path(code.PIECES).iterdir() if path.name.isdecimal())
    code.write_code(parse_location(location), b"".join(path.read_bytes() for path in pieces), digest)
    return Ending(code=ExitCode.OK)


_OWN: dict[str, Callable[..., Ending]] = {COMMAND: _remove, code.COMMAND: _put_code}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
