"""A small process that lets frozen processes run on if Safepoint is killed while it makes an image.

CRIU leaves the processes stopped until the image is committed. If Safepoint ends before that, for any reason, the
kernel closes its end of a pipe. Then the guard waits until CRIU has ended too, lets the processes run on, and deletes
the raw pages. It is a shell, so it starts in a millisecond, and it has a session of its own, so signals to the group
of the command do not reach it.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_SCRIPT = """
folder=$1
shift
criu=
while read -r word value; do
  case $word in
    done) exit 0 ;;
    criu) criu=$value ;;
  esac
done
while [ -n "$criu" ] && kill -0 "$criu" 2>/dev/null; do sleep 0.1; done
for pid in "$@"; do kill -CONT "$pid" 2>/dev/null; done
rm -rf -- "$folder"
"""


class Guard:
    """Watches over stopped processes, from before they are stopped until `release`.

    If the `with` block ends without `release`, the processes run on, too.
    """

    def __init__(self, pids: Iterable[int], folder: Path) -> None:
        """Start the guard.

        Args:
            pids: the processes that may be stopped; none if CRIU itself lets them run on.
            folder: the folder of the raw pages, which is deleted if Safepoint is killed.
        """
        command = ["/bin/sh", "-c", _SCRIPT, "safepoint-guard", str(folder), *map(str, pids)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def started(self, criu: int) -> None:
        """CRIU runs, as process `criu`. Until it has ended, the guard must not let the processes run on."""
        self._write(f"criu {criu}\n")

    def release(self) -> None:
        """The image is committed, and the processes were ended: there is nothing left to watch over."""
        self._write("done\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
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
