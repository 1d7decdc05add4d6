"""Who may read, who may change, and what hostile texts can do: for every route that the application has."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.routing import BaseRoute, Mount, Route

from safepoint.dashboard.access.sessions import Role, Sessions, load_key
from safepoint.dashboard.application import all_routes
from safepoint.dashboard.settings import DashboardSettings, networks
from safepoint.errors import StorageError, UsageError, printable
from safepoint.foundation import clock
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.states import JobState
from tests.support.dashboards import Sample, write_sample
from tests.support.hostile_texts import HOSTILE, Tags, write_hostile
from tests.support.patience import PATIENCE
from tests.unit.dashboard.conftest import BASE, Dashboard

RUNNING = Sample(name="tiny", state=JobState.RUNNING, step=40, steps=(10, 20, 30), num_points=40)
VALUES = {"{place}": "local", "{name}": "tiny", "{action}": "suspend", "{number}": "1"}


def routes() -> Iterator[tuple[str, str]]:
    """Every method and path of the application, with values for the parts of the path."""
    for route in all_routes():
        assert isinstance(route, Route | Mount)
        if isinstance(route, Mount):
            yield "GET", f"{route.path}/dashboard.css"
            continue
        path = route.path
        for part, value in VALUES.items():
            path = path.replace(part, value)
        assert "{" not in path, f"{path}: give this part a value in VALUES"
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, path


ROUTES = list(routes())
PUBLIC = {("GET", "/enter"), ("GET", "/static/dashboard.css")}


def test_without_a_session_every_route_is_refused(home: Path, dashboard: Dashboard) -> None:
    """With 401 and without content, but for the exchange of a link and the static files; in JSON too."""
    write_sample(home, RUNNING)
    assert len(ROUTES) > 15
    for method, path in ROUTES:
        for cookie in (None, "nonsense", "v1.operator.x.9999999999.", f"v1.operator.x.9999999999.{'A' * 43}"):
            headers = {} if cookie is None else {"cookie": f"{dashboard.cookie}={cookie}"}
            answer = dashboard.client.request(method, path, headers=headers, follow_redirects=False)
            expected = 401 if (method, path) != ("GET", "/static/dashboard.css") else 200
            assert answer.status_code == expected, (method, path)
            assert "tiny" not in answer.text
    for path in ("/jobs.json", "/jobs/local/tiny.json"):
        assert dashboard.get(path).json()["code"] == 12


def test_every_answer_has_the_headers_that_protect_it(home: Path, dashboard: Dashboard) -> None:
    """Pages, refusals and static files; a policy without inline scripts, evaluated code or other origins."""
    write_sample(home, RUNNING)
    for is_in in (False, True):
        if is_in:
            dashboard.visitor()
        for method, path in ROUTES:
            if path == "/live" and is_in:
                continue
            answer = dashboard.client.request(method, path, follow_redirects=False)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert not re.search(r"unsafe|https?:|\*|data:", policy)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "same-origin"
            assert answer.headers["x-frame-options"] == "DENY"
            if not path.startswith("/static"):
                assert answer.headers["cache-control"] == "no-store"


def test_a_link_works_once(dashboard: Dashboard) -> None:
    """It gives a cookie that scripts cannot read and other sites cannot use; a second use is refused."""
    token = dashboard.sessions.new_link(Role.OPERATOR)
    assert dashboard.client.head(f"/enter?token={token}").status_code == 401  # a program that looks first
    first = dashboard.get(f"/enter?token={token}")
    cookie = first.headers["set-cookie"].lower()
    assert (first.status_code, dashboard.used) == (200, ["operator"])
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert token not in first.text
    assert dashboard.get("/jobs").status_code == 200
    dashboard.leave()
    assert dashboard.get(f"/enter?token={token}").status_code == 401
    for wrong in ("", "x", token[:-1], "\u20ac" * 40):
        assert dashboard.get("/enter", params={"token": wrong}).status_code == 401


def test_a_session_ends(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """After twelve hours, and when the key has changed."""
    dashboard.visitor()
    assert dashboard.get("/jobs").status_code == 200
    now_s = clock.wall_s()
    monkeypatch.setattr(clock, "wall_s", lambda: now_s + 12 * 3600 + 1)
    assert dashboard.get("/jobs").status_code == 401
    monkeypatch.undo()
    other = Sessions(b"o" * 32, is_read_only=False)
    visitor = other.exchange(other.new_link(Role.OPERATOR))
    assert visitor is not None
    assert dashboard.sessions.visitor_of(other.cookie_of(visitor)) is None


def test_the_key_is_private_and_stays(tmp_path: Path) -> None:
    """A dashboard that is started again accepts older cookies. A key that others can read is refused."""
    path = tmp_path / "state" / "dashboard.key"
    key = load_key(path)
    assert load_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["dashboard.key"]
    path.chmod(0o644)
    with pytest.raises(StorageError, match="other users can read it"):
        load_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(StorageError, match="is not a key"):
        load_key(path)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8765", "localhost@evil.example", "", "[::2]"]
)
def test_another_host_is_refused(dashboard: Dashboard, host: str) -> None:
    """With DNS rebinding, a stranger's page would reach the dashboard under the stranger's name."""
    dashboard.visitor()
    for path in ("/jobs", "/static/dashboard.css", "/enter"):
        assert dashboard.get(path, headers={"host": host}).status_code == 421


def test_own_names_are_accepted(start: Callable[..., Dashboard]) -> None:
    """Those of loopback, and those that were named; with and without a port, in any case of letters."""
    dashboard = start(names=("jobs.example",))
    dashboard.visitor()
    for host in ("localhost:9", "127.0.0.1", "[::1]:8765", "Jobs.Example", "jobs.example:443"):
        headers = {"host": host, "cookie": f"{dashboard.cookie}={dashboard.client.cookies[dashboard.cookie]}"}
        assert dashboard.get("/jobs", headers=headers).status_code == 200, host


POSTS = [path for method, path in ROUTES if method == "POST"]


def test_a_form_of_another_site_is_refused(home: Path, dashboard: Dashboard) -> None:
    """Without the token, with that of another session, and with any sign of another origin; nothing changes."""
    write_sample(home, RUNNING)
    visitor = dashboard.visitor()
    token = dashboard.sessions.form_token(visitor)
    viewer = dashboard.sessions.form_token(dashboard.visitor(Role.VIEWER))
    dashboard.visitor()
    assert len(POSTS) >= 6
    for path in POSTS:
        for data, headers in (
            ({}, {}),
            ({"form_token": ""}, {}),
            ({"form_token": viewer}, {}),
            ({"form_token": f"{token}x"}, {}),
            ({"form_token": token}, {"origin": "https://evil.example"}),
            ({"form_token": token}, {"origin": "null"}),
            ({"form_token": token}, {"origin": "http://["}),
            ({"form_token": token}, {"origin": "http://127.0.0.1:9999"}),
            ({"form_token": token}, {"sec-fetch-site": "cross-site"}),
            ({"form_token": token}, {"sec-fetch-site": "same-site"}),
        ):
            answer = dashboard.client.post(path, data=data, headers=headers, follow_redirects=False)
            assert answer.status_code == 403, (path, data, headers)
    for body, kind, status in (
        (b"{}", "application/json", 415),
        (b"a=" + b"x" * (1 << 17), "application/x-www-form-urlencoded", 413),
        (b"&".join(b"a=1" for _ in range(60)), "application/x-www-form-urlencoded", 400),
        (b"target=/tmp/%FF", "application/x-www-form-urlencoded", 400),  # another path would be written
    ):
        answer = dashboard.client.post(POSTS[0], content=body, headers={"content-type": kind})
        assert answer.status_code == status
    with History() as history:
        assert history.job("tiny").wanted is RequestedAction.RUN
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert dashboard.client.request(method, "/jobs").status_code == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "empty"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": BASE}, 200),
    ],
)
def test_a_page_of_another_port_reads_nothing(
    home: Path, dashboard: Dashboard, headers: dict[str, str], status: int
) -> None:
    """A browser sends it the cookie, because all ports of an address are one site. Links still lead to the pages."""
    write_sample(home, RUNNING)
    dashboard.visitor()
    for method, path in ROUTES:
        if method == "GET" and path not in {"/", "/live", "/enter", "/actions/1"}:
            assert dashboard.get(path, headers=headers).status_code == status, path


def test_a_viewer_changes_nothing(home: Path, start: Callable[..., Dashboard]) -> None:
    """Neither by a form nor by the cookie of an operator in a read-only dashboard; and is not offered to."""
    write_sample(home, RUNNING)
    viewer, read_only = start(), start(is_read_only=True)
    for dashboard, role in ((viewer, Role.VIEWER), (read_only, Role.OPERATOR)):
        for path in POSTS:
            answer = dashboard.post(path, {"nnodes": "2", "checkpoint": "checkpoint-10", "sure": "on"}, role=role)
            assert answer.status_code == 403, path
        dashboard.visitor(role)
        for path in ("/jobs", "/jobs/local/tiny", "/jobs/local/tiny/suspend", "/jobs/local/tiny/checkpoints"):
            assert '<form method="post"' not in dashboard.get(path).text
    viewer.visitor(Role.VIEWER)
    assert viewer.get(f"/checkpoints?location={home / 'out' / 'tiny'}").status_code == 200
    assert "may only see the locations of jobs" in viewer.get("/checkpoints?location=/").text
    with History() as history:
        assert history.job("tiny").wanted is RequestedAction.RUN
    assert (home / "out" / "tiny" / "checkpoint-10").is_dir()


def test_a_viewer_sees_no_actions_at_other_locations(home: Path, dashboard: Dashboard) -> None:
    """The page of an action names the files of a checkpoint. Viewers see those of jobs, also as JSON."""
    write_sample(home, RUNNING)
    output = str(home / "out" / "tiny")
    places: list[str] = []
    for form, path in (({"location": output}, "/checkpoints"), ({}, "/jobs/local/tiny/checkpoints")):
        answer = dashboard.post(f"{path}/verify", {**form, "checkpoint": "checkpoint-10"})
        assert answer.status_code == 303
        places.append(answer.headers["location"])
    pages = [f"{place}{kind}" for place in places for kind in ("", ".json")]
    assert [dashboard.get(page).status_code for page in pages] == [200, 200, 200, 200]
    dashboard.visitor(Role.VIEWER)
    assert [dashboard.get(page).status_code for page in pages] == [404, 404, 200, 200]
    for number in ("9" * 5000, "-1", "\u0663", "1.0", ""):
        assert dashboard.get(f"/actions/{number}").status_code == 404


def test_a_header_counts_only_from_a_configured_proxy(start: Callable[..., Dashboard]) -> None:
    """From any other peer it has no effect; two headers are refused; the users that are named are operators."""
    proxies = networks(["10.1.0.0/16"])
    proxied = start(peer="10.1.2.3", proxies=proxies, operators=("ada",))
    assert proxied.get("/jobs").status_code == 401
    seen = proxied.get("/jobs", headers={"x-forwarded-user": "grace"})
    assert (seen.status_code, ">grace<" in seen.text) == (200, True)
    assert proxied.get("/jobs", headers=[("X-Forwarded-User", "ada"), ("X-Forwarded-User", "eve")]).status_code == 400
    assert proxied.get("/jobs", headers={"x-forwarded-user": "a" * 300}).status_code == 401
    assert proxied.client.post("/links", headers={"x-forwarded-user": "ada"}).status_code == 403  # no form token
    for peer, fields in (("10.2.0.1", {"proxies": proxies}), ("127.0.0.1", {"proxies": proxies}), ("10.1.2.3", {})):
        stranger = start(peer=peer, **fields)
        assert stranger.get("/jobs", headers={"x-forwarded-user": "ada"}).status_code == 401


def test_an_address_of_other_machines_needs_tls(tmp_path: Path) -> None:
    """Every address but loopback is refused without a certificate, before anything listens."""
    for host in ("0.0.0.0", "::", "192.168.1.5", "jobs.example"):
        with pytest.raises(UsageError, match="without TLS"):
            DashboardSettings(host=host)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert DashboardSettings(host=host).is_loopback
    pem = tmp_path / "tls.pem"
    pem.touch()
    assert DashboardSettings(host="0.0.0.0", tls_certificate=pem, tls_key=pem).has_tls
    for fields in ({"tls_key": pem}, {"operators": ("ada",)}, {"user_header": "a b"}, {"names": ("http://x",)}):
        with pytest.raises(UsageError):
            DashboardSettings(**fields)
    with pytest.raises(UsageError, match="--proxy-address"):
        networks(["10.0.0.1/8"])


HOSTILE_PAGES = (
    "/jobs",
    "/jobs/local/tiny",
    "/jobs/local/tiny/events",
    "/jobs/local/tiny/logs",
    "/jobs/local/tiny/checkpoints",
    "/jobs/local/tiny/resume",
    "/jobs/local/tiny/delete",
    "/storage",
    "/costs",
)


def _elements(dashboard: Dashboard, path: str, *others: int) -> Tags:
    tags = Tags()
    answer = dashboard.get(path)
    assert answer.status_code in {200, *others}, (path, answer.text)
    tags.feed(answer.text)
    tags.close()
    return tags


def test_hostile_texts_are_shown_as_text(
    home: Path, start: Callable[..., Dashboard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They add no element, attribute or link of another kind, and show no credentials or control characters."""
    assert len(HOSTILE) >= 50
    usual: dict[str, Tags] = {}
    for index, text in enumerate(("harmless", *HOSTILE)):
        monkeypatch.setenv("XDG_STATE_HOME", str(home / f"state-{index}"))
        write_hostile(home / f"{index}", text)
        dashboard = start()
        dashboard.visitor()
        for path in HOSTILE_PAGES:
            tags = _elements(dashboard, path)
            if text == "harmless":
                usual[path] = tags
                continue
            assert tags.found <= usual[path].found | {("time", ("datetime", "title"))}, (path, text)
            assert all(link.startswith(("/", "#", "?")) for link in tags.links), (path, text)
            shown = "".join(tags.text)
            if path == "/jobs/local/tiny" and "://" not in text and not text.isspace():
                assert printable(text)[:40] in shown, text
            assert "secret" not in shown
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", shown), (path, text)
        for path in (
            "/jobs.json",
            "/jobs/local/tiny.json",
            "/jobs/local/tiny/metrics",
            "/jobs/local/tiny/events.json",
        ):
            assert dashboard.get(path).headers["content-type"] == "application/json"
            if path == "/jobs.json":
                assert "secret" not in dashboard.get(path).text


def test_texts_of_a_request_are_shown_as_text(dashboard: Dashboard) -> None:
    """In the query of a search, and in a location of checkpoints."""
    dashboard.visitor()
    usual = {path: _elements(dashboard, f"{path}=harmless", 400) for path in ("/jobs?q", "/checkpoints?location")}
    for text in HOSTILE:
        for path, tags in usual.items():
            found = _elements(dashboard, f"{path}={quote(text)}", 400)
            assert found.found <= tags.found | {("input", ("name", "type", "value"))}, (path, text)
            assert all(link.startswith(("/", "#", "?")) for link in found.links), (path, text)


def test_every_route_is_one_of_the_kinds_above() -> None:
    """A route of another kind, such as a WebSocket, would not be in these tests."""
    kinds: set[type[BaseRoute]] = {type(route) for route in all_routes()}
    assert kinds == {Route, Mount}


def test_readers_of_outputs_leave_threads_for_other_pages(
    home: Path, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A viewer searches in the outputs of jobs again and again, and each search takes long."""
    write_sample(home, RUNNING)
    dashboard.visitor(Role.VIEWER)
    go_on = threading.Event()

    def logs(*_: object, **__: object) -> Iterator[object]:
        go_on.wait()
        return iter(())

    monkeypatch.setattr(LocalJobs, "logs", logs)
    threads = [threading.Thread(target=dashboard.get, args=["/jobs/local/tiny/logs?q=x"]) for _ in range(40)]
    answered = threading.Thread(target=dashboard.get, args=["/jobs/local/tiny"])
    try:
        for thread in threads:
            thread.start()
        answered.start()
        answered.join(20 * PATIENCE)
        assert not answered.is_alive()
    finally:
        go_on.set()
        for thread in (*threads, answered):
            thread.join()
