"""A small process that undoes a freeze or a restore if Safepoint is killed meanwhile.

If Safepoint ends before `release`, for any reason, the kernel closes its end of a pipe. Then the guard waits until
CRIU has ended too, sends a signal to the processes that it watches, and deletes the raw pages. It is a shell, so it
starts in a millisecond, and it has a session of its own, so signals to the group of the command do not reach it. A
process, also CRIU, is known by its number and the time of its start: if it has ended, another process may have the
number.
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

    If the `with` block ends without `release`, the guard sends its signal, too.
    """

    def __init__(self, folder: Path, number: signal.Signals) -> None:
        """Start the guard.

        Args:
            folder: the folder of the raw pages, which is deleted if Safepoint is killed.
            number: the signal for the processes: SIGCONT lets them run on, SIGKILL ends them.
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
        """The process `pid` gets the signal, too."""
        self._note("process", pid)

    def forget(self) -> None:
        """The processes run on, and need no signal any more. The raw pages are still there."""
        self._write("forget\n")

    def then(self, number: signal.Signals) -> None:
        """From now on, another signal is the right one."""
        self._write(f"signal {int(number)}\n")

    def started(self, criu: int) -> None:
        """CRIU runs, as process `criu`. Until it has ended, the guard must not send its signal."""
        self._note("criu", criu)

    def release(self) -> None:
        """There is nothing left to watch over."""
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
