"""Runs a helper: creates it, reads its answer, extends its deadline while it works, and deletes it.

A helper is a Kubernetes Job with config maps. Its pod runs one command of Safepoint. The answer of a helper is what
the command prints and how the command ends. The pod writes the answer to its log as frames: numbered lines. The Job
is created before its config maps, and owns them from the start. So if this process is killed, only the Job and
objects that the Job owns are left. The cluster ends the Job at its deadline, and deletes the Job and these objects
soon afterwards.
"""

import contextlib
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from safepoint.errors import (
    AccessDeniedError,
    ExitCode,
    NotFoundError,
    SafepointError,
    StorageError,
    TransientError,
    WaitTimeoutError,
)
from safepoint.foundation import clock
from safepoint.foundation.events.answer_frames import Ending, EndingReader, Frame, Part, read_frame
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.submission import create
from safepoint.jobs.cluster.helper.claim_users import find_basis, find_secret_keys
from safepoint.jobs.cluster.helper.helper_objects import (
    CONTAINER,
    DEADLINE_S,
    HELPER_LABEL,
    HelperRequest,
    config_maps,
    helper_job,
)
from safepoint.jobs.cluster.helper.trouble import (
    Trouble,
    ending_without_answer,
    has_started,
    is_over,
    trouble_of,
)
from safepoint.jobs.cluster.objects import Object, name_of, owners_of, uid_of

_LOOK_S, _SHORT_LOOK_S, _SOON_S = 1.0, 0.25, 5.0
_STARTS_WITHIN_S = 900.0
"""The time within which the pod has to start. An image of 10 GB takes minutes to pull."""
_SAY_AFTER_S = 15.0
_EXTEND_S = 30.0
_EVENTS_AFTER_S = 2.0
_TIMES_BROKEN = 20
_MOST_LINES, _MOST_SHOWN = 20, 4096
_MOST_CHARACTERS = 1 << 28
_MOST_LOG_CHARACTERS, _LEAST_PER_LINE = 1 << 30, 256
"""The limit of the characters that are read of a log, including lines that are not frames. Each line counts as at
least 256 characters."""
_CODES = {int(code) for code in ExitCode}

Receive = Callable[[Part, str], None]


class HelperError(SafepointError):
    """The command in the pod failed. This error has the exit code, the message and the hint of the command."""


def run_helper(
    api: ClusterApi,
    request: HelperRequest,
    receive: Receive,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Run a command of Safepoint in a pod.

    Args:
        api: the API of the cluster, in the namespace of the helper.
        request: the command, and what the pod mounts.
        receive: called with each part of the command's stdout and stderr, as soon as it arrives.
        say: called with a sentence if the pod has not started after a while.

    Returns:
        The exit code of the command, if the command has ended without an error message.

    Raises:
        HelperError: the command has ended with an error message.
        ConflictError: the pod cannot run; the reason is in the message.
        AccessDeniedError: you lack a right.
        WaitTimeoutError: the pod did not start in time, or its deadline passed.
    """
    basis = find_basis(api, request)
    request = replace(request, secret_keys=find_secret_keys(api, request.connection))
    name = f"safepoint-helper-{secrets.token_hex(5)}"
    with _created(api, name, request, helper_job(name, request, basis)) as job:
        pod = _started(api, job, basis.image, say)
        ending = _answer(api, job, pod, receive, request.memory)
    return code_of(ending)


def code_of(ending: Ending) -> int:
    """The exit code of a command that has ended without an error message.

    Raises:
        HelperError: the command has ended with an error message.
    """
    if ending.message:
        failed = HelperError(ending.message, hint=ending.hint)
        failed.exit_code = ExitCode(ending.code) if ending.code in _CODES else ExitCode.FAILED
        raise failed
    return ending.code


@contextlib.contextmanager
def _created(api: ClusterApi, name: str, request: HelperRequest, document: Object) -> Generator[Object]:
    """Create the Job and its config maps. At the end of the block, delete them."""
    is_over = threading.Event()
    try:
        job = create(api, "jobs", document)
        for config_map in config_maps(request, job):
            create(api, "configmaps", config_map)
        threading.Thread(
            target=_extend_deadline, args=(api, job, is_over), name="safepoint-helper", daemon=True
        ).start()
        yield job
    finally:
        is_over.set()
        with contextlib.suppress(SafepointError):  # if this fails, the cluster deletes the Job after its deadline
            api.delete("jobs", name)


def _extend_deadline(api: ClusterApi, job: Object, is_over: threading.Event) -> None:
    """Extend the Job's deadline regularly. If this process ends, the cluster ends the Job at its last deadline.

    If the user may not change Jobs, the first deadline remains.
    """
    begun_s = clock.monotonic_s()
    while not is_over.wait(_EXTEND_S):
        deadline_s = round(clock.monotonic_s() - begun_s) + DEADLINE_S
        try:
            api.patch("jobs", name_of(job), {"spec": {"activeDeadlineSeconds": deadline_s}})
        except (AccessDeniedError, NotFoundError):
            return
        except SafepointError:
            continue


# ---- start -----------------------------------------------------------------------------------------------------


def _started(api: ClusterApi, job: Object, image: str, say: Callable[[str], None]) -> Object:
    """Wait until the container of the pod runs or has run, and return the pod.

    Raises:
        SafepointError: the pod cannot start, or did not start in time.
    """
    begun_s, since_s, last = clock.monotonic_s(), 0.0, ""
    is_said = False
    while True:
        pod = _pod_of(api, job)
        if pod is not None and (has_started(pod) or is_over(pod)):
            return pod
        now_s = clock.monotonic_s()
        trouble = _trouble(api, job, pod, image, with_events=now_s - begun_s > _EVENTS_AFTER_S)
        reason = "" if trouble is None else type(trouble.error).__name__ + trouble.error.message[:40]
        if reason != last:
            since_s, last = now_s, reason
        if trouble is not None and now_s - since_s >= trouble.patience_s:
            raise trouble.error
        if now_s - begun_s > _STARTS_WITHIN_S:
            raise WaitTimeoutError(
                f"the pod did not start within {_STARTS_WITHIN_S:g} s; nothing was done", hint="try again later"
            )
        if now_s - begun_s > _SAY_AFTER_S and not is_said:
            is_said = True
            what = (
                "the cluster may be pulling its image"
                if trouble is None
                else trouble.error.message.removesuffix("; nothing was done")
            )
            say(f"the pod with the claim has not started yet: {what}")
        clock.sleep(_SHORT_LOOK_S if now_s - begun_s < _SOON_S else _LOOK_S)


def _trouble(api: ClusterApi, job: Object, pod: Object | None, image: str, *, with_events: bool) -> Trouble | None:
    events: list[Object] = []
    current = job
    if with_events:
        current = api.find("jobs", name_of(job)) or job
        with contextlib.suppress(AccessDeniedError):
            for name in filter(None, (name_of(job), name_of(pod))):
                events += api.objects("events", fields=f"involvedObject.name={name}")
    return trouble_of(current, pod, events, image=image)


def _pod_of(api: ClusterApi, job: Object) -> Object | None:
    """The pod of the helper's Job; None if there is none.

    Another person can add the label and the owner to any pod, but cannot change the name of a pod. So the name is
    checked too.
    """
    pattern = re.compile(rf"{re.escape(name_of(job))}-[a-z0-9]{{5}}")
    for pod in api.objects("pods", labels=f"{HELPER_LABEL}={name_of(job)}"):
        if uid_of(job) in owners_of(pod) and pattern.fullmatch(name_of(pod)):
            return pod
    return None


# ---- answer ----------------------------------------------------------------------------------------------------


def _answer(api: ClusterApi, job: Object, pod: Object, receive: Receive, memory: str) -> Ending:
    """Read the pod's log: pass the command's output to `receive`, and return the command's result.

    Raises:
        SafepointError: the pod has ended before it reported the result of the command, or the answer cannot be read.
    """
    said: deque[str] = deque(maxlen=_MOST_LINES)
    num_read = num_characters = 0
    reader = EndingReader()
    for _ in range(_TIMES_BROKEN):
        try:
            for frame in _frames(api, name_of(pod), said):
                if frame.number != num_read:  # skip frames that were read before the connection broke
                    continue
                num_read += 1
                num_characters += len(frame.text)
                if num_characters > _MOST_CHARACTERS:
                    raise StorageError(
                        f"the pod's answer has more than {_MOST_CHARACTERS:,} characters; it was cut off"
                    )
                ending = reader.read(frame)
                if ending is not None:
                    return ending
                if frame.part in {Part.STDOUT, Part.STDERR}:
                    receive(frame.part, frame.text)
        except NotFoundError:
            raise ending_without_answer(api.find("jobs", name_of(job)), None, said, memory=memory) from None
        except TransientError:
            clock.sleep(_LOOK_S)
            continue
        current = _pod_of(api, job)
        if current is None or is_over(current):
            found = api.find("jobs", name_of(job))
            raise ending_without_answer(found, current, said, memory=memory)
        clock.sleep(_SHORT_LOOK_S)
    raise TransientError("the connection to the pod's log broke again and again", hint="try again later")


def _frames(api: ClusterApi, pod: str, said: deque[str]) -> Iterator[Frame]:
    said.clear()
    num_characters = 0
    for line in api.log(pod, CONTAINER, follow=True):
        num_characters += max(len(line), _LEAST_PER_LINE)
        if num_characters > _MOST_LOG_CHARACTERS:
            raise StorageError(
                f"the pod has printed more than {_MOST_LOG_CHARACTERS:,} characters; no more of its answer was read"
            )
        frame = read_frame(line.rstrip("\r"))
        if frame is not None:
            yield frame
        elif line.strip():
            said.append(line.strip()[:_MOST_SHOWN])
