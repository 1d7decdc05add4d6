"""An API server, a kubeconfig, a folder of code, or a neighbour of the namespace that mean harm.

The server speaks HTTP on loopback. It stands for one that someone else runs, or that answers for a proxy between.
"""

import contextlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.cli import job_answers, output
from safepoint.cli.on_cluster import zip_of
from safepoint.errors import NotFoundError, SafepointError, StorageError, TransientError, UsageError
from safepoint.foundation import clock
from safepoint.jobs.cluster import api as cluster_api
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.submission import repair
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.login import token_program
from safepoint.jobs.cluster.pod_archive import build_archive
from safepoint.jobs.cluster.spec import PLAN, ClusterSpec, plan_name
from safepoint.jobs.cluster.transport import client as transport
from safepoint.jobs.cluster.watches.job_watch import JobWatch
from safepoint.jobs.cluster.watches.pod_ends import PodEnds
from safepoint.jobs.model.connections import keys_of
from tests.support.cluster.plans import plan_for

Answer = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Notes each request, and leaves the answer to the test."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, dict[str, str]]]
    answer: Answer

    def do_GET(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.body: Any = json.loads(data or b"{}")
        self.seen.append((self.command, self.path, dict(self.headers)))
        try:
            type(self).answer(self)
        except ConnectionError:
            self.close_connection = True

    do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815  their names are the base class's

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name is the base class's
        """Write no log."""

    def send(self, document: object, code: int = 200, **headers: str) -> None:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(code)
        for name, text in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)


class Server:
    """A server that a test makes hostile by `answer`."""

    def __init__(self) -> None:
        self.handler = type("Bound", (Handler,), {"seen": []})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answers(self, answer: Answer) -> None:
        self.handler.answer = staticmethod(answer)  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def kubeconfig(folder: Path, url: str, user: dict[str, Any] | None = None) -> Path:
    path = folder / "config"
    path.parent.mkdir(exist_ok=True)
    document = {
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "TOKEN"} if user is None else user}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "ns"}}],
    }
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def api(server: Server, tmp_path: Path) -> Iterator[ClusterApi]:
    with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url))) as found:
        yield found


def job(name: str, **annotations: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "uid": name, "creationTimestamp": "2026-11-23T10:00:00Z"}
    return {"metadata": {**metadata, "annotations": annotations}, "spec": {"trainer": {"numNodes": 1}}}


def lists(**objects: list[Any]) -> Answer:
    """Answers each list with these objects."""

    def answer(request: Handler) -> None:
        kind = request.path.partition("?")[0].rpartition("/")[2]
        request.send({"items": objects.get(kind, []), "metadata": {}})

    return answer


class TestAnswers:
    """Answers without end, and answers of other shapes."""

    def test_a_body_without_end(self, api: ClusterApi, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is read to the limit only, also when it is said to be compressed."""
        monkeypatch.setattr(transport, "_MOST_ANSWER_BYTES", 1 << 20)

        def endless(request: Handler) -> None:
            request.send_response(200)
            request.end_headers()
            while True:
                request.wfile.write(b" " * (1 << 16))

        server.answers(endless)
        with pytest.raises(StorageError, match="more than 1,048,576 bytes"):
            api.get("trainjobs", "a")

    def test_a_compressed_body_is_not_expanded(self, api: ClusterApi, server: Server) -> None:
        """A small one could become larger than the memory."""
        server.answers(lambda request: request.send(b"\x1f\x8b", content_encoding="gzip"))
        assert api.objects("trainjobs") == []
        assert server.handler.seen[0][2]["accept-encoding"] == "identity"

    def test_a_body_that_drips(self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that sends a byte now and then does not hold the command for ever."""
        monkeypatch.setattr(transport, "_ANSWER_S", 0.3)
        connection = connect_to("c", file=kubeconfig(tmp_path, server.url))
        stop = threading.Event()

        def drip(request: Handler) -> None:
            request.send_response(200)
            request.send_header("content-length", "1000000")
            request.end_headers()
            while not stop.wait(0.02):
                request.wfile.write(b" ")
                request.wfile.flush()

        server.answers(drip)
        with ClusterApi(connection, within_s=0.1) as api, pytest.raises(TransientError, match="took more than"):
            api.get("trainjobs", "a")
        stop.set()

    def test_pages_without_end(self, api: ClusterApi, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """A list has a limit."""
        monkeypatch.setattr(cluster_api, "_MOST_OBJECTS", 20)
        page = {"items": [job("a")] * 5, "metadata": {"continue": "more"}}
        server.answers(lambda request: request.send(page))
        with pytest.raises(StorageError, match="more than 20 trainjobs"):
            api.objects("trainjobs")

    def test_pages_that_always_expire(self, api: ClusterApi, server: Server) -> None:
        """The list does not start over for ever."""
        server.answers(lambda request: request.send({"message": "expired"}, 410))
        with pytest.raises(TransientError, match="expired"):
            api.objects("trainjobs")
        assert len(server.handler.seen) < 10

    @pytest.mark.parametrize(
        "item",
        ["x", 5, None, [], {}, {"metadata": 5}, {"metadata": {"name": "a", "labels": [1], "annotations": "z"}}],
    )
    def test_items_of_other_shapes(self, item: Any, api: ClusterApi, server: Server) -> None:
        """They do not hide the job beside them."""
        server.answers(lists(trainjobs=[item, job("good")], pods=[item], jobsets=[item], workloads=[item]))
        assert "good" in [found.name for found in ClusterJobs(api).jobs()]

    @pytest.mark.parametrize("time", ["x", "", 5, None, "9999-99-99T00:00:00Z", "2026-11-23T10:00:00+99:00"])
    def test_times_of_other_shapes(self, time: Any, api: ClusterApi, server: Server) -> None:
        """They do not hide the job beside them."""
        bad = job("bad")
        bad["metadata"]["creationTimestamp"] = time
        server.answers(lists(trainjobs=[bad, job("good")]))
        assert sorted(found.created_at.year for found in ClusterJobs(api).jobs()) == [1970, 2026]

    @pytest.mark.parametrize(
        "line", [b"x\n", b'{"type":"ADDED"}\n', b"[" * 100_000 + b"\n", b'{"type":"ERROR","object":5}\n', b"5\n"]
    )
    def test_events_of_other_shapes(self, line: bytes, api: ClusterApi, server: Server) -> None:
        """They end the watch with an error that callers know."""
        server.answers(lambda request: request.send(line))
        with pytest.raises(SafepointError, match="watch pods"):
            list(api.watch("pods", timeout_s=3))

    def test_a_line_without_end(self, api: ClusterApi, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is cut."""
        monkeypatch.setattr(transport, "_MOST_LINE_BYTES", 1000)
        server.answers(lambda request: request.send(b"x" * 500_000))
        longest = max(map(len, api.log("pod", "node")))
        assert longest < 200_000

    def test_a_permission_that_is_no_answer(self, api: ClusterApi, server: Server) -> None:
        """It is no permission."""
        server.answers(lambda request: request.send({"status": None}))
        assert not api.may("create", "secrets")


class TestNames:
    """Names that lead to another object."""

    @pytest.mark.parametrize("name", ["../secrets/x", "..", "a?b=c", "a#b", "a%2fb", "a/b", "a\r\nb"])
    def test_of_a_job(self, name: str, api: ClusterApi, server: Server) -> None:
        server.answers(lists())
        with pytest.raises(UsageError, match="not a valid name"):
            ClusterJobs(api).delete(name)
        assert server.handler.seen == []

    @pytest.mark.parametrize("namespace", ["a/../b", "..", "a?b", "a#b"])
    def test_of_a_namespace(self, namespace: str, server: Server, tmp_path: Path) -> None:
        connection = connect_to("c", namespace=namespace, file=kubeconfig(tmp_path, server.url))
        with ClusterApi(connection) as api, pytest.raises(UsageError, match="not a valid name"):
            api.objects("trainjobs")
        assert server.handler.seen == []


class TestNeighbours:
    """Someone else who may write to the namespace."""

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "1e308", "-1", "9" * 400, [], {}, None, "x"])
    def test_numbers_of_one_job_do_not_hide_the_others(self, value: Any, api: ClusterApi, server: Server) -> None:
        names = ("currentStep", "totalSteps", "currentEpoch", "totalEpochs", "estimatedRemainingSeconds")
        status = {**dict.fromkeys(names, value), "trainMetrics": {"loss": value, "safeStep": value, "attempt": value}}
        posted = job("posted")
        metrics = [{"name": name, "value": value} for name in (*names, "safeStep", "attempt")]
        posted["status"] = {"trainerStatus": {"metrics": metrics, "estimatedRemainingSeconds": value}}
        annotated = job("annotated", **{"trainer.opendatahub.io/trainerStatus": json.dumps(status)})
        huge = job("huge", **{"trainer.opendatahub.io/trainerStatus": json.dumps({**status, "totalSteps": 1})})
        server.answers(lists(trainjobs=[job("good"), posted, annotated, huge]))
        found = ClusterJobs(api).jobs()
        assert sorted(one.name for one in found) == ["annotated", "good", "huge", "posted"]
        assert all(one.progress is None or isinstance(one.progress.step, int) for one in found)
        assert all(job_answers.row(one, one.progress) for one in found)

    def test_a_config_map_does_not_create_a_job(self, api: ClusterApi, server: Server) -> None:
        """Its writer may create no TrainJobs, and the user who lists the jobs may."""
        data = {"old": "gone", "nodes": "2", "actor": "x", "successor": json.dumps(job("planted"))}
        label = {"safepoint.dev/successor-of": "planted"}
        planted = [
            {"metadata": {"name": name, "uid": "u", "labels": label, "annotations": {PLAN: content}}, "data": data}
            for content in (json.dumps({**data, "successor": job("planted")}), "")
            for name in ("planted-successor", plan_name(content))
        ]
        everything = lists(configmaps=planted, trainjobs=[job("good")])

        def answer(request: Handler) -> None:
            is_one = request.path.rpartition("/")[2].startswith("planted")
            request.send({}, 404) if is_one else everything(request)

        server.answers(answer)
        jobs = ClusterJobs(api)
        assert [one.name for one in jobs.jobs()] == ["good"]
        with pytest.raises(NotFoundError):
            jobs.job("planted")
        assert {method for method, _, _ in server.handler.seen} == {"GET"}

    @pytest.mark.parametrize(
        "successor",
        [
            *([], "x", 1, {}, {"metadata": []}, {"metadata": {"name": "j"}, "spec": 1}),
            *(
                {"metadata": {"name": "j", "annotations": {f"safepoint.dev/{note}": value}}, "spec": {}}
                for note in ("job", "nodes", "history", "safe-step")
                for value in (5, [], {"a": 1})
            ),
            {"metadata": {"name": "j", "labels": {"kueue.x-k8s.io/queue-name": 5}}, "spec": {}},
        ],
    )
    def test_a_plan_of_another_shape_does_nothing(self, successor: Any, api: ClusterApi, server: Server) -> None:
        plan = plan_for(successor, job="j", old_uid="gone")
        server.answers(lists(trainjobs=[plan, job("good")]))
        assert [one.name for one in ClusterJobs(api).jobs()] == ["good"]
        assert {method for method, _, _ in server.handler.seen} == {"GET"}

    def test_large_objects_do_not_stop_a_submit(self, api: ClusterApi, server: Server) -> None:
        """Only the metadata of config maps and secrets are read, whatever is in them."""
        orphan = {"metadata": {"name": "a", "creationTimestamp": clock.utc_now()}}
        server.answers(lists(configmaps=[orphan]))
        repair(api)
        asked = {path.partition("?")[0].rpartition("/")[2]: headers for _, path, headers in server.handler.seen}
        for kind in ("configmaps", "secrets", "trainingruntimes"):
            assert "as=PartialObjectMetadataList" in asked[kind]["accept"]

    def test_what_a_pod_prints_does_not_move_the_cursor(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a terminal, only colours are printed as they are."""
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        output.print_log_line("10%\r\x1b[31mred\x1b[0m \x1b]52;c;aGk=\x07\x1b[2J\x1b[1A\x9b2J\u202e\tend")
        printed = capsys.readouterr().out
        assert printed.replace("\x1b[31m", "").replace("\x1b[0m", "").strip().isprintable()
        assert "\\x1b]52;c;aGk=\\x07" in printed


class TestKubeconfig:
    """Files that name programs and addresses."""

    def test_a_program_is_relative_to_its_file(self, server: Server, tmp_path: Path) -> None:
        """As for kubectl; the current folder may be someone else's."""
        token = '#!/bin/sh\necho \'{"status": {"token": "%s"}}\'\n'
        for folder in ("own", "hostile"):
            program = tmp_path / folder / "bin" / "login"
            program.parent.mkdir(parents=True)
            program.write_text(token % folder)
            program.chmod(0o755)
        login = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./bin/login"}}
        path = kubeconfig(tmp_path / "own", server.url, login)
        server.answers(lists())
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path / "hostile")
            with ClusterApi(connect_to("c", file=path)) as api:
                api.objects("trainjobs")
        assert server.handler.seen[0][2]["Authorization"] == "Bearer own"

    @pytest.mark.parametrize("printed", ["[]", "x", '{"status": null}', '{"status": {}}'])
    def test_a_program_that_gives_no_token(self, printed: str, server: Server, tmp_path: Path) -> None:
        command = {"command": "echo", "args": [printed]}
        path = kubeconfig(
            tmp_path, server.url, {"exec": {"apiVersion": "client.authentication.k8s.io/v1", **command}}
        )
        with ClusterApi(connect_to("c", file=path)) as api, pytest.raises(SafepointError, match="gives your token"):
            api.objects("trainjobs")

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
    def test_a_file_of_another_user(self, tmp_path: Path) -> None:
        """In a home that everyone may write to, such as /tmp: it could run any program as the user."""
        tmp_path.chmod(0o1777)
        path = kubeconfig(tmp_path / ".kube", "https://x:6443")
        os.chown(path.parent, 65533, 65533)
        with pytest.raises(UsageError, match="another user"):
            connect_to(environ={"HOME": str(tmp_path)})

    @pytest.mark.parametrize("url", ["http://cluster.example:8080", "http://127.0.0.1.example:8080"])
    def test_a_token_is_not_sent_unencrypted(self, url: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="unencrypted"):
            connect_to("c", file=kubeconfig(tmp_path, url))

    def test_a_token_does_not_pass_a_proxy_unencrypted(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`kubectl proxy` and tests use http on loopback."""
        proxy = Server()
        server.answers(lists())
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url))) as api:
            assert api.objects("trainjobs") == []
        proxy.close()
        assert proxy.handler.seen == []

    @pytest.mark.parametrize(
        "text", ["current-context: [1]", "current-context: {a: b}", "contexts: x\nusers: 5", "a: " + "[" * 5000]
    )
    def test_files_of_other_shapes(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "config"
        path.write_text(text)
        with pytest.raises(SafepointError):
            connect_to(file=path)


class TestWhatIsSent:
    """What a job brings along can be read by others in the namespace."""

    def test_a_link_out_of_the_folder(self, tmp_path: Path) -> None:
        """A folder that someone else made could name the user's keys."""
        (tmp_path / "key").write_text("PRIVATE")
        folder = tmp_path / "code"
        folder.mkdir()
        (folder / "train.py").write_text("")
        (folder / "inside").symlink_to("train.py")
        with zipfile.ZipFile(io.BytesIO(zip_of(folder))) as archive:
            assert sorted(archive.namelist()) == ["inside", "train.py"]
        (folder / "data.bin").symlink_to(tmp_path / "key")
        with pytest.raises(UsageError, match=r"data\.bin is a link"):
            zip_of(folder)

    def test_a_link_that_appears_after_a_look(self, tmp_path: Path) -> None:
        """Another user who owns the folder swaps a file and a link to the user's key all the time."""
        (tmp_path / "key").write_text("PRIVATE" * 1000)
        folder = tmp_path / "code"
        folder.mkdir()
        swap = "import os,sys;f,k=sys.argv[1:];open(f,'w').close()\nwhile 1:\n"
        swap += " os.symlink(k,f+'.l');os.replace(f+'.l',f);open(f+'.f','w').close();os.replace(f+'.f',f)"
        command = [sys.executable, "-P", "-c", swap, str(folder / "data"), str(tmp_path / "key")]
        with subprocess.Popen(command) as swapping:
            try:
                until_s = time.monotonic() + 3
                packed = 0
                while time.monotonic() < until_s or not packed:
                    with contextlib.suppress(UsageError), zipfile.ZipFile(io.BytesIO(zip_of(folder))) as archive:
                        packed += 1
                        assert not any(b"PRIVATE" in archive.read(name) for name in archive.namelist())
            finally:
                swapping.kill()

    def test_a_file_that_would_fill_the_memory(self, tmp_path: Path) -> None:
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(UsageError, match="more than 536,870,912 bytes"):
            zip_of(tmp_path)

    def test_a_name_that_is_no_text(self, tmp_path: Path) -> None:
        Path(os.fsdecode(bytes(tmp_path) + b"/a\xff.py")).write_text("")
        with pytest.raises(UsageError, match="cannot be printed"):
            zip_of(tmp_path)

    @pytest.mark.parametrize(
        "given",
        [
            {"packages": ("https://me:SECRET@host/a.whl",)},
            {"package_indexes": ("https://me:SECRET@host/simple",)},
            {"packages": ("--index-url=https://host",)},
            {"env": {"AZURE_STORAGE_SAS_TOKEN": "SECRET"}},
            {"env": {"azure_storage_account_key": "SECRET"}},
        ],
    )
    def test_passwords_of_package_indexes_and_keys(self, given: dict[str, Any]) -> None:
        """The job would have them in its annotation and in its variables."""
        with pytest.raises(UsageError) as caught:
            ClusterSpec(name="a", program=("train.py",), **given)
        assert "SECRET" not in str(caught.value)

    def test_packages_are_installed_where_no_path_is_set(self, tmp_path: Path) -> None:
        """The pod's program reads PYTHONPATH, which most images do not set."""
        archive, pip = tmp_path / "safepoint.pyz", tmp_path / "pip.py"
        archive.write_bytes(build_archive())
        pip.write_text("")
        environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        environ["SAFEPOINT_PACKAGES"] = "[]"
        code = (
            "import runpy, subprocess, sys\n"
            "subprocess.run = lambda *_, **__: subprocess.CompletedProcess([], 0)\n"
            "sys.argv = ['safepoint', '--version']\n"
            f"sys.path.insert(0, {str(archive)!r})\n"
            f"runpy.run_path({str(archive)!r}, run_name='__main__')\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_connections_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that everyone may write to: its store would receive the checkpoints."""
    tmp_path.chmod(0o1777)
    path = tmp_path / "safepoint" / "connections.toml"
    path.parent.mkdir()
    path.write_text('[minio]\nAWS_ACCESS_KEY_ID = "a"\nAWS_SECRET_ACCESS_KEY = "b"\n')
    path.chmod(0o600)
    os.chown(path.parent, 65533, 65533)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="another user"):
        keys_of("minio")


class TestWithoutEnd:
    """Each read of the connection ends in time, and the answer does not."""

    @pytest.fixture(autouse=True)
    def _limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transport, "_EXCHANGE_S", 1.0)
        monkeypatch.setattr(cluster_api, "_LIST_S", 1.0)

    @pytest.mark.parametrize(
        ("begin", "again"),
        [
            (b"HTTP/1.1 200 OK\r\nx: ", b"a"),
            (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"t: x\r\n"),
        ],
        ids=["headers", "interim answers", "trailers"],
    )
    def test_what_is_around_the_body(self, begin: bytes, again: bytes, server: Server, tmp_path: Path) -> None:
        def drip(request: Handler) -> None:
            request.wfile.write(begin)
            while True:
                request.wfile.write(again)
                time.sleep(0.05)

        server.answers(drip)
        with (
            ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url)), within_s=0) as api,
            pytest.raises(TransientError, match="did not answer within"),
        ):
            api.objects("trainjobs")

    def test_empty_pages(self, server: Server, tmp_path: Path) -> None:
        server.answers(lambda request: request.send({"items": [], "metadata": {"continue": "more"}}))
        with (
            ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url)), within_s=0) as api,
            pytest.raises(TransientError, match="took more than"),
        ):
            api.objects("trainjobs")

    def test_a_watch_that_ends_at_once_is_not_opened_all_the_time(self, api: ClusterApi, server: Server) -> None:
        everything = lists()

        def answer(request: Handler) -> None:
            request.send(b"") if "watch=true" in request.path else everything(request)

        server.answers(answer)
        with JobWatch(api) as watch:
            time.sleep(1)
            watch.jobs()
        assert len(server.handler.seen) < 20


class TestClosing:
    """A thread that reads a stream, or sends a request later, gets an error of Safepoint and no other."""

    NAMES = ("safepoint-trainjobs", "safepoint-pods", "safepoint-workloads")

    def test_a_stream_that_another_thread_reads(self, server: Server, api: ClusterApi) -> None:
        def never_ends(request: Handler) -> None:
            request.send(b"", content_length=str(1 << 30))
            time.sleep(30)

        server.answers(never_ends)
        failures: list[BaseException] = []

        def read() -> None:
            try:
                list(api.watch("pods"))
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        api.close()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        assert len(failures) == 8
        assert all(isinstance(error, SafepointError) for error in failures), failures

    def test_requests_after_it(self, server: Server, api: ClusterApi) -> None:
        server.answers(lists())
        api.close()
        for use in (lambda: api.get("pods", "a"), lambda: list(api.watch("pods")), lambda: list(api.log("a", "b"))):
            with pytest.raises(StorageError, match="was closed"):
                use()

    @pytest.mark.parametrize("watch", [JobWatch, lambda api: PodEnds(api, "a")])
    def test_the_threads_of_watches(
        self, watch: Callable[[ClusterApi], Any], server: Server, api: ClusterApi
    ) -> None:
        server.answers(lambda request: request.send(b"") if "watch=true" in request.path else lists()(request))
        earlier = set(threading.enumerate())
        with watch(api):
            time.sleep(0.5)
            threads = [one for one in threading.enumerate() if one not in earlier and one.name in self.NAMES]
            assert threads
            api.close()
            time.sleep(2)  # they send the next request
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()


class TestLogins:
    """No message shows what logs in, and no program for it is waited for without end."""

    @pytest.mark.parametrize("line", ["token: PRIVATE: x", "token: *PRIVATE", "token: !PRIVATE x", 'token: "PRIVATE'])
    def test_a_kubeconfig_that_is_no_yaml(self, line: str, tmp_path: Path) -> None:
        path = tmp_path / "config"
        path.write_text(f"users:\n- name: u\n  user:\n    {line}\n")
        with pytest.raises(UsageError) as caught:
            connect_to(file=path)
        assert "line 4" in str(caught.value) or "line 5" in str(caught.value)
        assert "PRIVATE" not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize("of_file", [True, False])
    def test_a_token_that_no_header_can_have(self, of_file: bool, server: Server, tmp_path: Path) -> None:
        server.answers(lists())
        (tmp_path / "token").write_text("PRIVATE\nx")
        user = {"tokenFile": str(tmp_path / "token")} if of_file else {"token": "PRIVATE\nx"}
        path = kubeconfig(tmp_path, server.url, user)
        with ClusterApi(connect_to("c", file=path), within_s=0) as api:
            with pytest.raises(SafepointError) as caught:
                api.objects("trainjobs")
            assert "PRIVATE" not in str(caught.value)
            with pytest.raises(SafepointError) as caught, contextlib.closing(api.watch("pods")) as watch:
                next(watch)
            assert "PRIVATE" not in str(caught.value)

    @pytest.mark.parametrize(
        ("script", "expected"),
        [
            ("sleep 600", "gave no token within"),
            ("exec head -c 900000000 /dev/zero", "printed more than"),
            ("printf '%0100000d' 0 | tr 0 '['", "nested too deep"),
            ('echo \'{"status": {"token": "PRIVATE\\\\nx"}}\'', "no valid token"),
            ('echo \'{"status": {"token": ["PRIVATE"]}}\'', "no valid token"),
        ],
        ids=["silent", "endless", "deep", "lines", "list"],
    )
    @pytest.mark.timeout(30)
    def test_a_program(
        self, script: str, expected: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(token_program, "_WITHIN_S", 1.0)
        server.answers(lists())
        with (
            ClusterApi(connect_to("c", file=self._with_program(tmp_path, server, script))) as api,
            pytest.raises(SafepointError, match=expected) as caught,
        ):
            api.objects("trainjobs")
        assert "PRIVATE" not in str(caught.value)
        assert server.handler.seen == []

    @pytest.mark.timeout(30)
    def test_a_program_that_leaves_a_process_behind(self, server: Server, tmp_path: Path) -> None:
        server.answers(lists())
        script = 'sleep 60 & echo "{\\"status\\": {\\"token\\": \\"T\\"}}"'
        with ClusterApi(connect_to("c", file=self._with_program(tmp_path, server, script))) as api:
            assert api.objects("trainjobs") == []
        assert server.handler.seen[0][2]["Authorization"] == "Bearer T"

    def _with_program(self, folder: Path, server: Server, script: str) -> Path:
        login = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script]}
        return kubeconfig(folder, server.url, {"exec": login})
