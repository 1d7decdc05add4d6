"""Behaves towards Safepoint as CRIU does, for processes that only sleep. It needs no root.

    stand_in_criu.py dump|restore --images-dir FOLDER …

The variable STAND_IN_CRIU_FAULT chooses what goes wrong: `ACTION PART WHAT`, such as `dump 1 fail`. WHAT is one of
`fail`; `die`, as after SIGKILL; `wait`, until the file `release` exists in the current folder; and `kill-root`, which
kills the root process of the tree. The files `dumped-PART` and `restored-PART` in the current folder show how far it
came.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from safepoint.transparent.criu.trees import processes_of
from tests.support.criu_images import dump

ARGUMENTS = dict(zip(sys.argv[2:], [*sys.argv[3:], ""], strict=True))
FOLDER = Path(ARGUMENTS.get("--images-dir", "."))


def state(pid: int) -> str:
    """The state of a process, as /proc has it; X if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def fail(pid: int) -> None:
    action, part, what = (os.environ.get("STAND_IN_CRIU_FAULT") or "- - -").split()
    if action != sys.argv[1] or FOLDER.name != f"part-{part}":
        return
    if what == "fail":
        leave("(00.1) Error (criu/x.c:1): Something went wrong\n")
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "kill-root":
        os.kill(pid, signal.SIGKILL)
        leave("(00.1) Error (criu/x.c:1): No such process\n")
    while not Path("release").exists():
        time.sleep(0.01)


def leave(log: str) -> NoReturn:
    Path(ARGUMENTS["--log-file"]).write_text(log)
    sys.exit(1)


def run_script(action: str) -> bool:
    environ = {**os.environ, "CRTOOLS_SCRIPT_ACTION": action}
    return subprocess.run([ARGUMENTS["--action-script"]], env=environ, check=False).returncode == 0


def main() -> None:
    if sys.argv[1] == "dump":
        root = int(ARGUMENTS["--tree"])
        moving = [pid for one in os.environ["TREES"].split() for pid in processes_of(int(one)) if state(pid) != "T"]
        Path(f"dumped-{FOLDER.name}").write_text(str(moving))
        fail(root)
        FOLDER.rmdir()
        dump(FOLDER, {root: b"pages" + bytes(4091)})
        return
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    child.send_signal(signal.SIGSTOP)
    Path(f"restored-{FOLDER.name}").write_text(str(child.pid))
    fail(child.pid)
    if not run_script("post-restore"):
        child.kill()
        leave("(00.1) Error (criu/cr-restore.c:1): Aborting restore due to post-restore script\n")
    Path(ARGUMENTS["--pidfile"]).write_text(str(child.pid))
    run_script("post-resume")


if __name__ == "__main__":
    main()
