"""Requests a process image of the run in this pod.

`safepoint freeze --on` runs this module in the pod. The request is a file in the launcher's folder, in which only
this user can write. `watched_run`, which has started the launcher, makes the image, and writes the answer to a folder
of this module.

The module prints lines of JSON: `{"waits": …}` while it waits, so that the connection stays in use, and at the end
`{"image": …}` or `{"error": …, "hint": …}`. If it is killed, the processes run on.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safepoint.errors import ConflictError, NotFoundError, SafepointError, WaitTimeoutError
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.files import write_atomic
from safepoint.foundation.temporary_folders.places import private_parent
from safepoint.training.outcome.launcher_folder import running_launchers

HOLD_S = 60.0
"""How long the processes stay stopped after the answer to a request before they run on."""
_NAME, _ANSWER = "image-request", "answer.json"
_LOOK_S, _SIGN_S = 0.05, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """One request.

    Args:
        answer: the file for the answer. Its folder is deleted when the requester ends.
        is_running_after: whether the processes run on. Otherwise they stay stopped for `HOLD_S` after the answer, and
            end when a stop signal arrives in this time.
    """

    answer: str
    is_running_after: bool

    def reply(self, document: Mapping[str, Any]) -> None:
        """Answer the request.

        Raises:
            OSError: the requester has ended.
        """
        write_atomic(Path(self.answer), json.dumps(document).encode(), durable=False)


def take_request(folders: Iterable[Path]) -> ImageRequest | None:
    """The request in one of the launchers' folders, which is removed; None if there is no request."""
    for folder in folders:
        path = folder / _NAME
        with contextlib.suppress(OSError, ValueError, TypeError):
            document = read_object(path)
            path.unlink()  # otherwise it would be frozen with the folder
            return ImageRequest(**document)
    return None


def failure_of(error: SafepointError | OSError) -> dict[str, Any]:
    """The answer to a request that has failed."""
    if isinstance(error, SafepointError):
        return {"error": error.message, "hint": error.hint}
    return {"error": str(error), "hint": None}


def request_image(*, is_running_after: bool, within_s: float, sign: Callable[[str], None]) -> dict[str, Any]:
    """Request an image of the only run of this user on this machine, and wait for it.

    Args:
        is_running_after: see `ImageRequest`.
        within_s: how long to wait.
        sign: called every two seconds with a text that says what the request waits for.

    Returns:
        What the answer says of the image.

    Raises:
        NotFoundError: no run is there.
        ConflictError: several runs are there.
        SafepointError: the image was not made, and the processes run on.
        WaitTimeoutError: there was no answer in time.
    """
    running = running_launchers()
    if len(running) != 1:
        kind = ConflictError if running else NotFoundError
        raise kind(f"{len(running) or 'no'} processes of `safepoint run` are running here")
    with tempfile.TemporaryDirectory(prefix="safepoint_request_", dir=private_parent()) as place:
        answer = Path(place, _ANSWER)
        request = ImageRequest(answer=str(answer), is_running_after=is_running_after)
        path = running[0][0] / _NAME
        write_atomic(path, json.dumps(asdict(request)).encode(), durable=False)
        deadline_s, sign_at_s = clock.monotonic_s() + within_s, 0.0
        while not answer.exists():
            now_s = clock.monotonic_s()
            if now_s > deadline_s:
                path.unlink(missing_ok=True)
                raise WaitTimeoutError(f"no image was complete within {within_s:g} s")
            if now_s >= sign_at_s:
                sign_at_s = now_s + _SIGN_S
                sign("the image")
            clock.sleep(_LOOK_S)
        document = read_object(answer)
    if "error" in document:
        raise SafepointError(str(document["error"]), hint=document.get("hint"))
    return document


def main(arguments: list[str]) -> int:
    """Carry out one request.

    The arguments are the number of seconds that it may take, and `run-on` or `hold`; see `ImageRequest`.
    """
    is_running_after = arguments[1] == "run-on"

    def sign(what: str) -> None:
        _print(waits=what)

    try:
        image = request_image(is_running_after=is_running_after, within_s=float(arguments[0]), sign=sign)
    except (SafepointError, OSError) as error:
        _print(**failure_of(error))
        return error.exit_code if isinstance(error, SafepointError) else 1
    _print(image=image)
    return 0


def _print(**document: Any) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
