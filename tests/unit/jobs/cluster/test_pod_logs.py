"""Tests of safepoint.jobs.cluster.watches.pod_logs."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from safepoint.errors import NotFoundError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.transport.client import _lines
from safepoint.jobs.cluster.transport.failures import BusyError
from safepoint.jobs.cluster.watches import pod_logs
from safepoint.jobs.cluster.watches.log_streams import Position
from safepoint.jobs.cluster.watches.pod_logs import follow_pods, read_pods
from safepoint.jobs.model.states import JobState

RUNNING, WAITING, ENDED = {"running": {}}, {"waiting": {}}, {"terminated": {}}


def pod(uid: str, state: dict[str, Any], *, restarts: int = 0, node: int = 0) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(node)}
    status = {"name": "node", "state": state, "restartCount": restarts}
    return {"metadata": {"name": uid, "uid": uid, "labels": labels}, "status": {"containerStatuses": [status]}}


class Logs:
    """The logs of pods. A list of answers is what one request after the other gets, and then nothing more.

    Each answer is an error, or the words that were written up to then. A line has one word, and is written each tenth
    of a second. The API server takes a time in whole seconds, so it sends the words of the last second again.
    """

    def __init__(self, **answers: list[str | Exception]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def log(
        self,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
        since: str | None = None,
    ) -> Iterator[str]:
        key = f"{pod}_previous" if previous else pod
        self.asked.append(key)
        waiting = self.answers[key]
        answer = waiting[0] if len(waiting) == 1 and isinstance(waiting[0], str) else waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        for number, word in enumerate(answer.split()[-tail if tail else None :]):
            time = f"2026-11-23T10:00:{number // 10:02}.{number % 10}Z"
            if since is None:
                yield word
            elif time[:19] >= since[:19]:
                yield f"{time} {word}"


def follow(api: Logs, *seen: tuple[JobState, list[Any]] | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(pod_logs, "_LOOK_S", 0.05)
    looks = iter(seen)

    def look() -> tuple[JobState, list[Any]]:
        found = next(looks)
        if found is None:
            raise NotFoundError("no such job")
        return found

    return [line.text for line in follow_pods(api, look)]  # type: ignore[arg-type]


def test_the_first_pod_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was just submitted has no pod, then one without a container."""
    looks = [
        (JobState.QUEUED, []),
        (JobState.STARTING, [pod("a", WAITING)]),
        (JobState.RUNNING, [pod("a", RUNNING)]),
        (JobState.COMPLETE, [pod("a", ENDED)]),
        (JobState.COMPLETE, [pod("a", ENDED)]),
    ]
    assert follow(Logs(a=["one two"]), *looks, monkeypatch=monkeypatch) == ["one", "two"]


def test_all_nodes_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [pod("a", ENDED), pod("b", ENDED, node=1)]
    found = follow(Logs(a=["one"], b=["two"]), *[(JobState.COMPLETE, pods)] * 9, monkeypatch=monkeypatch)
    assert sorted(found) == ["one", "two"]


def test_a_pod_that_has_written_nothing_yet_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server has no log of it then, and says so."""
    running = (JobState.RUNNING, [pod("a", RUNNING)])
    looks = [running, running, (JobState.COMPLETE, [])]
    assert follow(Logs(a=[NotFoundError("nothing yet"), "one"]), *looks, monkeypatch=monkeypatch) == ["one"]


@pytest.mark.parametrize("end", ["", BusyError("dial tcp: connection refused")], ids=["clean", "failed"])
def test_a_stream_that_ends_while_the_container_runs_is_continued(
    end: str | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server ends it without an error when the kubelet restarts. No line is missing, and none comes twice."""
    running, words = (JobState.RUNNING, [pod("a", RUNNING)]), [f"w{number}" for number in range(25)]
    answers: list[str | Exception] = [" ".join(words[:12]), end, " ".join(words[:15]), " ".join(words)]
    api = Logs(a=answers)

    def look() -> tuple[JobState, list[Any]]:
        return running if len(api.asked) < 4 else (JobState.COMPLETE, [pod("a", ENDED)])

    monkeypatch.setattr(pod_logs, "_LOOK_S", 0.05)
    assert [line.text for line in follow_pods(cast("ClusterApi", api), look)] == words


def test_lines_of_the_same_time_are_not_lost() -> None:
    position = Position()
    assert [*position.new_lines(iter(["2026-11-23T10:00:00.1Z a", "2026-11-23T10:00:00.10Z", "part"]))] == [
        "a",
        "2026-11-23T10:00:00.10Z",
        "part",
    ]
    again = ["2026-11-23T10:00:00Z before", "2026-11-23T10:00:00.1Z a", "2026-11-23T10:00:00.1Z b"]
    assert [*position.new_lines(iter([*again, "2026-11-23T10:00:00.12Z "]))] == ["b", ""]
    assert [*position.new_lines(iter([*again, "2026-11-23T10:00:01Z c"]))] == ["c"]


def test_parts_of_a_long_line_are_shown_once() -> None:
    """A line of more than 1 MiB arrives in parts, and only the first part has a time. The parts may differ when the
    line is read again."""
    position = Position()
    short, long = "2026-11-23T10:00:00.1Z before", "2026-11-23T10:00:00.2Z abc"
    assert [*position.new_lines(iter([short, long, "def", "ghi"]))] == ["before", "abc", "def", "ghi"]
    again = [short, "2026-11-23T10:00:00.2Z ab", "cdefg", "hi"]
    assert [*position.new_lines(iter([*again, "2026-11-23T10:00:00.2Z next", "part"]))] == ["next", "part"]
    assert [*position.new_lines(iter([*again, "2026-11-23T10:00:00.2Z next", "part", "s"]))] == ["s"]


def test_the_rest_of_a_line_that_a_broken_stream_has_cut_off() -> None:
    position = Position()
    assert [*position.new_lines(iter(["2026-11-23T10:00:00.1Z abc", "d"]))] == ["abc", "d"]
    assert [*position.new_lines(iter(["2026-11-23T10:00:00.1Z abcde", "fg"]))] == ["e", "fg"]
    assert [*position.new_lines(iter(["2026-11-23T10:00:00.1Z abcde", "fg", "2026-11-23T10:00:00.1Z "]))] == [""]
    assert [*position.new_lines(iter(["2026-11-23T10:00:00.1Z abcdefg", "2026-11-23T10:00:00.1Z "]))] == []


@pytest.mark.parametrize("letter", ["a", "ä", "€", "😀"])
def test_a_long_line_is_not_split_within_a_character(letter: str) -> None:
    """Otherwise the two halves of the character would be shown as two wrong ones."""
    text = letter * 100
    blocks = (text.encode()[start : start + 7] for start in range(0, len(text.encode()), 7))
    parts = [part.decode() for part in _lines(blocks, 20)]
    assert "".join(parts) == text
    assert len(parts) > 3


def test_output_that_cannot_be_read_for_long_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The command goes on while the job does; it gives up when the job has stopped."""
    monkeypatch.setattr(pod_logs, "_WARN_AFTER_S", 0.0)
    failure: list[str | Exception] = [BusyError("no route to host")]
    looks = [*[(JobState.RUNNING, [pod("a", RUNNING)])] * 4, *[(JobState.COMPLETE, [pod("a", ENDED)])] * 3]
    with pytest.raises(BusyError):
        follow(Logs(a=failure * 9), *looks, monkeypatch=monkeypatch)
    [text] = caplog.messages
    assert text.startswith("the output of pod a could not be read for 0 s; Safepoint tries until the job stops")


def test_output_of_a_pod_that_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pod_logs, "_WARN_AFTER_S", 0.0)
    follower = pod_logs._Follower(cast("ClusterApi", Logs()), lambda: (JobState.RUNNING, [pod("a", RUNNING)]))
    follower._has_looked()
    start = pod_logs.start_of(follower._pods[0])
    follower._pods = []
    follower._note_end(pod_logs.StreamEnd(start=start, is_complete=False, error=BusyError("no route to host")))
    [text] = caplog.messages
    assert text.startswith("the output of a pod that is gone could not be read for 0 s")


def test_pods_after_an_interruption_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the container wrote at its end is read although it has restarted meanwhile."""
    looks = [
        (JobState.RUNNING, [pod("a", RUNNING)]),
        *[(JobState.RESTARTING, [pod("a", RUNNING, restarts=1)])] * 2,
        (JobState.PREEMPTED, []),
        (JobState.RUNNING, [pod("b", RUNNING)]),
        (JobState.SUSPENDED, []),
    ]
    api = Logs(a=["one", "two"], a_previous=["one more"], b=["three"])
    assert follow(api, *looks, monkeypatch=monkeypatch) == ["one", "more", "two", "three"]


def test_what_a_container_wrote_before_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [*[(JobState.RUNNING, [pod("a", RUNNING, restarts=2)])] * 2, (JobState.COMPLETE, [])]
    assert follow(Logs(a=["two"], a_previous=["one"]), *looks, monkeypatch=monkeypatch) == ["one", "two"]


def test_a_job_that_is_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(JobState.RUNNING, [pod("a", RUNNING)]), None]
    assert follow(Logs(a=["one"]), *looks, monkeypatch=monkeypatch) == ["one"]
    with pytest.raises(NotFoundError, match="no such job"):
        follow(Logs(), None, monkeypatch=monkeypatch)


def test_a_job_without_a_pod_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="is Suspended and has no pods"):
        follow(Logs(), (JobState.SUSPENDED, []), monkeypatch=monkeypatch)
    with pytest.raises(NotFoundError, match="has no pods"):
        list(read_pods(Logs(), lambda: (JobState.QUEUED, [])))  # type: ignore[arg-type]


def test_the_end_of_the_output() -> None:
    """About as many lines as have the size, of each start of a container."""
    seen = (JobState.RUNNING, [pod("a", RUNNING, restarts=1)])
    logs = Logs(a=["four five six"], a_previous=["one two three"])
    found = read_pods(logs, lambda: seen, last_bytes=256)  # type: ignore[arg-type]
    assert [line.text for line in found] == ["two", "three", "five", "six"]
