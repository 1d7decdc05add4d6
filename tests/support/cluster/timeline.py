"""When the pods of a namespace go, and when a training takes its steps, as seen from outside."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Generator
from pathlib import Path

from tests.support.cluster import programs
from tests.support.cluster.workspace import Workspace

_LOOK_S = 0.05
_EVENT = r"jsonpath={.type}{'\n'}"


class Timeline:
    """What has happened so far; times in seconds since 1970.

    Args:
        team: the namespace.
        marks: the file to which the training's first rank adds a line for each micro-batch.
    """

    def __init__(self, team: Workspace, marks: Path) -> None:
        self._team, self._marks = team, marks
        self._is_over = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self.deleted: list[float] = []
        """When pods were gone."""
        self.grown: list[float] = []
        """When micro-batches began."""

    def steps(self) -> list[int]:
        """The number of complete steps before each micro-batch, in all attempts."""
        return [int(line.split()[1]) for line in self._lines()]

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self._marks.read_text().split("\n")[:-1]
        return []

    def look(self) -> None:
        """Note the growth of the marks until it is over."""
        seen = 0
        while not self._is_over.wait(_LOOK_S):
            if len(self._lines()) > seen:
                seen = len(self._lines())
                self.grown.append(time.time())

    def watch(self) -> None:
        """Note the pods that go, until it is over. While the API server does not answer, begin again."""
        kubectl = [str(programs.folder() / "kubectl"), "--kubeconfig", str(self._team.cluster.kubeconfig)]
        words = ("-n", self._team.namespace, "get", "pods", "--watch-only", "--output-watch-events", "-o", _EVENT)
        while not self._is_over.is_set():
            with subprocess.Popen(
                [*kubectl, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as kubectl_watch:
                self._process = kubectl_watch
                if self._is_over.is_set():
                    kubectl_watch.kill()
                for line in kubectl_watch.stdout or ():
                    if line.strip() == "DELETED":
                        self.deleted.append(time.time())
            self._is_over.wait(1)

    def stop(self) -> None:
        """End the threads."""
        self._is_over.set()
        if self._process is not None:
            self._process.kill()


@contextlib.contextmanager
def timeline(team: Workspace, marks: Path) -> Generator[Timeline]:
    """Look while the block runs."""
    found = Timeline(team, marks)
    threads = [threading.Thread(target=target) for target in (found.look, found.watch)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        found.stop()
        for thread in threads:
            thread.join()
