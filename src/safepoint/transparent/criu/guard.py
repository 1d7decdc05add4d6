"""A small process that undoes or completes a freeze or a restore if Safepoint is killed meanwhile.

If Safepoint ends before `release`, for any reason, the kernel closes Safepoint's end of the pipe to the guard. Then
the guard waits until CRIU has ended too, sends a signal to the processes that it watches, and deletes the raw pages.
At first, the signal undoes the freeze or the restore. When the image is committed, or when the restored processes may
continue, `then` chooses another signal. That signal completes the freeze or the restore.

The guard is a shell, so it starts in a millisecond. It has a session of its own, so signals to Safepoint's process
group do not reach it. The guard identifies each process, including CRIU, by its number and its start time. The number
is not enough, because another process may get the number of an ended process.
"""

import signal
import subprocess
import threading
from pathlib import Path
from types import TracebackType

from safepoint.foundation.processes import identify

_SCRIPT = """
folder=$1
criu=
pids=
number=$2
runs() {
  pid=${1%:*} begun=${1#*:}
  read -r line 2>/dev/null <"/proc/$pid/stat" || return 1
  set -- ${line##*) }
  [ "${20}" = "$begun" ] && [ "$1" != Z ]
}
while read -r word value start; do
  case $word in
    done) exit 0 ;;
    criu) criu="$criu $value:$start" ;;
    process) pids="$pids $value:$start" ;;
    forget) pids= ;;
    signal) number=$value ;;
  esac
done
for one in $criu; do while runs "$one"; do sleep 0.1; done; done
for one in $pids; do runs "$one" && kill -"$number" "${one%:*}" 2>/dev/null; done
rm -rf -- "$folder"
"""


class Guard:
    """Watches over processes until `release`.

    If the `with` block ends without `release`, the guard does the same as after the end of Safepoint.
    """

    def __init__(self, folder: Path, number: signal.Signals) -> None:
        """Start the guard.

        Args:
            folder: the folder of the raw pages. The guard deletes it if there is no `release`.
            number: the signal for the processes: SIGCONT lets them continue, SIGKILL ends them.
        """
        command = ["/bin/sh", "-c", _SCRIPT, "safepoint-guard", str(folder), str(int(number))]
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Add the process `pid` to the processes that get the signal if Safepoint is killed."""
        self._note("process", pid)

    def forget(self) -> None:
        """Forget the processes, because they run and need no signal. The guard still watches over the raw pages."""
        self._write("forget\n")

    def then(self, number: signal.Signals) -> None:
        """From now on, use another signal."""
        self._write(f"signal {int(number)}\n")

    def started(self, criu: int) -> None:
        """Note that CRIU runs as process `criu`. The guard sends no signal until this process has ended."""
        self._note("criu", criu)

    def release(self) -> None:
        """End the guard: there is nothing left to watch over."""
        self._write("done\n")

    def _note(self, word: str, pid: int) -> None:
        process = identify(pid)
        if process is not None:
            self._write(f"{word} {pid} {process.start_ticks}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
