"""Status updates to a controller: an encrypted server on this machine, with a certificate that no client trusts."""

import http.server
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.progress.record import Progress, State
from safepoint.training.launcher import status_post
from safepoint.training.launcher.status_post import StatusPost, StatusTarget
from tests.support.certificates import encrypted, make_certificates
from tests.unit.progress.test_record import FULL

TOKEN = "a-very-secret-token"


class Controller:
    """What the server has got, and what it answers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.tokens: list[str | None] = []
        self.answers: list[int] = []
        self.changed = threading.Condition()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.bodies) >= count, 20), self.bodies


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def url(controller: Controller, certificates: Path) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with controller.changed:
                code = controller.answers.pop(0) if controller.answers else 200
                controller.bodies.append(body)
                controller.tokens.append(self.headers.get("Authorization"))
                controller.changed.notify_all()
            self.send_response(code)
            if code == 302:
                self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Write no log of requests."""

    server = encrypted(Handler, certificates)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}/apis/status"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def target(url: str, certificates: Path, tmp_path: Path) -> StatusTarget:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    environ = {
        "KUBEFLOW_TRAINER_SERVER_URL": url,
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificates / "ca.pem"),
    }
    target = StatusTarget.from_environment(environ)
    assert target is not None
    return target


class Known:
    now: tuple[Progress, bool] | None = (FULL, False)

    def look(self) -> tuple[Progress, bool] | None:
        return self.now


def percentages(controller: Controller) -> list[object]:
    return [body["trainerStatus"]["progressPercentage"] for body in controller.bodies]  # type: ignore[index]


def test_news_are_posted_and_the_last_word_arrives(controller: Controller, target: StatusTarget) -> None:
    """The first at once; the end at once too, however short the time since, with the token of its moment."""
    known = Known()
    post = StatusPost(known.look, target)
    controller.wait_for(1)
    target.token.write_text("renewed")
    known.now = (replace(FULL, state=State.FINISHED, step=500, time="later"), True)
    assert post.finish(20)
    assert percentages(controller) == [24, 100]
    assert controller.tokens == [f"Bearer {TOKEN}", "Bearer renewed"]


def test_what_fails_is_tried_again_later_and_said_once(
    controller: Controller, target: StatusTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Less and less often; neither the token nor the address is in what is said."""
    monkeypatch.setattr(status_post, "_INTERVAL_S", 0.01)
    controller.answers += [503, 500, 403]
    with caplog.at_level(logging.WARNING, "safepoint"):
        post = StatusPost(Known().look, target)
        controller.wait_for(4)
        assert post.finish(20)
    assert len(caplog.messages) == 1
    assert "the controller answered with HTTP status 503" in caplog.text
    assert TOKEN not in caplog.text
    assert target.url not in caplog.text


def test_the_last_word_is_tried_twice(controller: Controller, target: StatusTarget) -> None:
    """A controller that restarts just then."""
    known = Known()
    known.now = None
    post = StatusPost(known.look, target)
    known.now = (FULL, True)
    controller.answers.append(503)
    assert post.finish(20)
    assert len(controller.bodies) == 2


def test_a_controller_that_cannot_be_reached_is_given_up_in_time(target: StatusTarget) -> None:
    """Nothing is raised."""
    post = StatusPost(Known().look, replace(target, url="https://127.0.0.1:1/"))
    assert not post.finish(0.3)


@pytest.mark.parametrize("case", ["another authority", "no authority", "no token", "empty token", "plain", "moved"])
def test_the_token_goes_nowhere_else(case: str, controller: Controller, target: StatusTarget, tmp_path: Path) -> None:
    """Only to a server with a trusted certificate, only encrypted, and only to the given address."""
    other = tmp_path / "other"
    other.mkdir()
    changed = {
        "another authority": lambda: replace(target, ca=make_certificates(other) / "ca.pem"),
        "no authority": lambda: replace(target, ca=tmp_path / "missing"),
        "no token": lambda: replace(target, token=tmp_path / "missing"),
        "empty token": lambda: replace(target, token=other / "token"),
        "plain": lambda: replace(target, url="http://controller.example/status"),
        "moved": lambda: target,
    }[case]()
    (other / "token").write_text(" \n")
    controller.answers.append(302)
    with pytest.raises(OSError):
        changed.send(b"{}")
    assert len(controller.bodies) == (1 if case == "moved" else 0)


def test_without_a_controller_nothing_is_posted() -> None:
    """Both variables are needed; the authority may be one of the system's."""
    assert StatusTarget.from_environment({}) is None
    assert StatusTarget.from_environment({"KUBEFLOW_TRAINER_SERVER_URL": "https://x"}) is None
    both = {"KUBEFLOW_TRAINER_SERVER_URL": "https://x", "KUBEFLOW_TRAINER_SERVER_TOKEN": "/t"}
    assert StatusTarget.from_environment(both) == StatusTarget(url="https://x", token=Path("/t"))
