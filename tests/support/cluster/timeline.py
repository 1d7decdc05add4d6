"""When the pods of a namespace go, and when trainings take their steps, as seen from outside."""

import contextlib
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path

from tests.support.cluster.workspace import Workspace

_LOOK_S = 0.05
_EVENT = r"jsonpath={.type}{' '}{.object.metadata.name}{'\n'}"


class Timeline:
    """What has happened so far; times in seconds since 1970.

    Args:
        team: the namespace.
        marks: by job, the file to which the training's first rank adds a line for each micro-batch.
    """

    def __init__(self, team: Workspace, marks: Mapping[str, Path]) -> None:
        self._team, self._marks = team, marks
        self._is_over = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._deleted: list[tuple[str, float]] = []
        self.grown: defaultdict[str, list[float]] = defaultdict(list)
        """When micro-batches began, by job."""

    def deleted(self, job: str) -> list[float]:
        """When pods of a job were gone."""
        return [at for pod, at in self._deleted if pod.startswith(f"{job}-node-")]

    def steps(self, job: str) -> list[int]:
        """The number of complete steps before each micro-batch, in all attempts."""
        return [int(line.split()[1]) for line in self._lines(job)]

    def _lines(self, job: str) -> list[str]:
        with contextlib.suppress(OSError):
            return self._marks[job].read_text().split("\n")[:-1]
        return []

    def look(self) -> None:
        """Note the growth of the marks until it is over."""
        seen: defaultdict[str, int] = defaultdict(int)
        while not self._is_over.wait(_LOOK_S):
            for job in self._marks:
                num_lines = len(self._lines(job))
                if num_lines > seen[job]:
                    seen[job] = num_lines
                    self.grown[job].append(time.time())

    def watch(self) -> None:
        """Note the pods that go, until it is over. While the API server does not answer, begin again."""
        kubectl = [self._team.cluster.kubectl_program, "--kubeconfig", str(self._team.cluster.kubeconfig)]
        words = ("-n", self._team.namespace, "get", "pods", "--watch-only", "--output-watch-events", "-o", _EVENT)
        while not self._is_over.is_set():
            with subprocess.Popen(
                [*kubectl, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as kubectl_watch:
                self._process = kubectl_watch
                if self._is_over.is_set():
                    kubectl_watch.kill()
                for line in kubectl_watch.stdout or ():
                    what, _, pod = line.strip().partition(" ")
                    if what == "DELETED":
                        self._deleted.append((pod, time.time()))
            self._is_over.wait(1)

    def stop(self) -> None:
        """End the threads."""
        self._is_over.set()
        if self._process is not None:
            self._process.kill()


@contextlib.contextmanager
def timeline(team: Workspace, marks: Mapping[str, Path]) -> Generator[Timeline]:
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
