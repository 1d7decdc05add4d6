"""Runs with an object store: interrupted, the local disk emptied, resumed; and a store that fails."""

import copy
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from safepoint.testing.fault_proxy import FaultProxy, add_mixture
from tests.support.ceph_rgw import CephRgw
from tests.support.commands import safepoint as run_command
from tests.support.equality import assert_same_run
from tests.support.jobs import Job, committed_steps, no_orphans, read_events, safepoint, tiny
from tests.support.moto_server import MotoServer, moto_server
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

_ARGUMENTS = ("--step-ms", "50", "--epochs", "3")


@pytest.fixture
def server(moto: MotoServer) -> MotoServer:
    return moto


@pytest.fixture(
    params=[
        pytest.param("moto", marks=pytest.mark.long),  # RGW does the same in `make test-s3`
        pytest.param("rgw", marks=pytest.mark.s3),
        pytest.param("minio", marks=[pytest.mark.s3, pytest.mark.minio]),
        pytest.param("bad", marks=[pytest.mark.s3, pytest.mark.long]),
    ]
)
def any_server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """moto, Ceph RGW, and Ceph RGW over a network in which one request in twenty fails."""
    if request.param != "bad":
        yield request.getfixturevalue(request.param)
        return
    rgw: CephRgw = request.getfixturevalue("rgw")
    with FaultProxy(f"127.0.0.1:{rgw.port}", seed=5) as proxy:
        add_mixture(proxy, 0.05)
        broken = copy.copy(rgw)
        broken.endpoint = proxy.endpoint
        yield broken
        assert proxy.injected


def start(
    server: MotoServer,
    prefix: str,
    output: Path,
    *options: str,
    arguments: tuple[str, ...] = _ARGUMENTS,
    **variables: str,
) -> Job:
    return safepoint(
        output,
        *("--nproc-per-node", "2", "--output-dir", str(server.location(prefix)), "--local-dir", str(output)),
        *options,
        program=tiny(output, *arguments),
        **server.variables,
        **variables,
    )


def in_store(server: S3Server, prefix: str) -> list[int]:
    keys = [item.key for item in server.store(prefix).list() if item.key.endswith("safepoint-manifest.json")]
    return sorted(int(key.split("/")[0].split("-")[1]) for key in keys if key.startswith("checkpoint-"))


def test_resumed_on_an_emptied_disk(any_server: S3Server, tmp_path: Path) -> None:
    """All local files are deleted: the checkpoint is fetched, the result is bit-equal, `final/` loads."""
    prefix = f"emptied-{uuid.uuid4().hex}"
    reference = tmp_path / "reference"
    job = safepoint(reference, "--nproc-per-node", "2", program=tiny(reference, *_ARGUMENTS))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    output = tmp_path / "run"
    job = start(any_server, prefix, output, "--save-steps", "5")
    with no_orphans(job):
        job.wait_for_step(8)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait() == 75, job.text
    step = read_events(output, "saved")[-1]["step"]
    assert read_events(output, "uploaded")[-1]["step"] == step
    assert in_store(any_server, prefix)[-1] == step
    shutil.rmtree(output)
    job = start(any_server, prefix, output, "--save-steps", "5")
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert [event["step"] for event in read_events(output, "fetched")] == [step]
    assert_same_run(output, reference)
    final = tmp_path / "final"
    store = any_server.store(prefix)
    for item in store.list("final"):
        (final / item.key).parent.mkdir(parents=True, exist_ok=True)
        (final / item.key).write_bytes(store.read(item.key))
    ours = AutoModelForCausalLM.from_pretrained(final / "final").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(reference / "final").state_dict()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.long
def test_a_damaged_newest_in_the_store_means_the_older_one(
    server: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped byte or a missing file is found, and the older checkpoint is used."""
    local, output = tmp_path / "local", tmp_path / "run"
    job = safepoint(local, "--nproc-per-node", "2", "--save-steps", "4", program=tiny(local, *_ARGUMENTS))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    # Brought there as a whole: the uploader of a training leaves out what a newer one has superseded.
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    copied = run_command("checkpoints", "copy", local, server.location("damaged"))
    assert copied.code == 0, copied.stderr
    steps = in_store(server, "damaged")
    assert len(steps) >= 3
    store = server.store("damaged")
    key = f"checkpoint-{steps[-1]}/model.safetensors"
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 1
    store.write(key, bytes(data))
    store.delete(f"checkpoint-{steps[-2]}/optimizer.pt")
    job = start(server, "damaged", output, "--save-steps", "4")
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert [event["step"] for event in read_events(output, "fetched")] == [steps[-3]]
    rejected = {event["path"].rsplit("/", 1)[1] for event in read_events(output, "checkpoint_rejected")}
    assert rejected == {f"checkpoint-{steps[-1]}", f"checkpoint-{steps[-2]}"}
    assert in_store(server, "damaged")[-1] == steps[-1], "trained again and published in place of the damaged one"


@pytest.mark.long
def test_a_store_that_goes_away_stops_nothing(tmp_path: Path) -> None:
    """Uploads fail and training continues; the message names the local checkpoint; the next run uploads it."""
    with moto_server(tmp_path) as server:
        output = tmp_path / "run"
        options = ("--save-steps", "5", "--grace", "8")
        job = start(server, "away", output, *options, arguments=("--step-ms", "100", "--epochs", "30"))
        with no_orphans(job):
            job.wait_for_event("uploaded")
            server.stop()
            reached = committed_steps(output)[-1]
            job.wait_for_step(reached + 7)
            job.signal()
            assert job.wait() == 75, job.text
        step = read_events(output, "saved")[-1]["step"]
        assert step > reached
        assert read_events(output, "upload_unfinished")[-1]["folder"] == str(output)
        assert "the newest checkpoint was not uploaded to" in job.text
        server.start()
        job = start(server, "away", output, *options, arguments=("--step-ms", "20", "--max-steps", str(step + 3)))
        with no_orphans(job):
            assert job.wait() == 0, job.text
        assert read_events(output, "resumed")[-1]["step"] == step
        assert in_store(server, "away")[-1] == step + 3


def test_upload_failure_stops_the_run_when_asked_to(server: MotoServer, tmp_path: Path) -> None:
    """Another run claims the location: with `stop` this run saves and exits with 13."""
    output = tmp_path / "run"
    job = start(
        server, "taken", output, "--on-upload-failure", "stop", arguments=("--step-ms", "100", "--epochs", "50")
    )
    with no_orphans(job):
        job.wait_for_step(3)
        server.store("taken").write(".safepoint/attempt.json", b"{}")
        os.kill(job.rank_pids()[0], signal.SIGUSR1)
        assert job.wait() == 13, job.text
    assert "stopping, because uploads fail" in job.text
    assert committed_steps(output)


@pytest.mark.long
def test_a_killed_uploader_is_started_again(server: MotoServer, tmp_path: Path) -> None:
    """The uploader is killed: training continues, and everything is uploaded with the keys of a connection."""
    output = tmp_path / "run"
    connections = tmp_path / "safepoint" / "connections.toml"
    connections.parent.mkdir()
    connections.touch(mode=0o600)
    connections.write_text("[store]\n" + "".join(f'{name} = "{text}"\n' for name, text in server.variables.items()))
    job = safepoint(
        output,
        *("--output-dir", str(server.location("killed")), "--local-dir", str(output), "--connection", "store"),
        *("--nproc-per-node", "2", "--save-steps", "5"),
        program=tiny(output, "--step-ms", "150", "--max-steps", "30"),
        XDG_CONFIG_HOME=str(tmp_path),
    )
    with no_orphans(job):
        job.wait_for_event("uploaded")
        for pid in _uploaders(job):
            os.kill(pid, signal.SIGKILL)
        assert job.wait() == 0, job.text
    assert in_store(server, "killed")[-1] == 30


def _uploaders(job: Job) -> list[int]:
    children = Path(f"/proc/{job.rank_pids()[0]}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if b"uploader_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("location", "changes", "code", "said"),
    [
        ("s3://no-such-bucket/run", {}, 13, "no such bucket"),
        pytest.param(
            *("s3://checkpoints/run", {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}, 13, "cannot be reached"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("s3://checkpoints/run", {"AWS_ENDPOINT_URL_S3": "ftp://127.0.0.1"}, 2, "must begin with http"),
            marks=pytest.mark.long,
        ),
        pytest.param("S4://bucket/run", {}, 2, "unknown scheme", marks=pytest.mark.long),
        ("pvc://claim/run", {}, 2, "can only be used in a pod"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_training(
    location: str, changes: dict[str, str], code: int, said: str, server: MotoServer, tmp_path: Path
) -> None:
    """Each cause has its message and exit code, before a model is loaded."""
    output = tmp_path / "run"
    variables = {**server.variables, **changes}
    options = ("--output-dir", location, "--local-dir", str(output))
    job = safepoint(output, *options, program=tiny(output, *_ARGUMENTS), **variables)
    with no_orphans(job):
        assert job.wait() == code, job.text
    assert said in job.text
    assert "Traceback" not in job.text
    assert not read_events(output, "attempt_started")


@pytest.mark.long
def test_from_scratch_is_refused_where_nothing_can_be_moved_aside(server: MotoServer, tmp_path: Path) -> None:
    """The bucket is unchanged; exit code 11, and the message says what to do."""
    output = tmp_path / "run"
    job = start(server, "scratch", output, "--save-steps", "5")
    with no_orphans(job):
        assert job.wait() == 0, job.text
    before = in_store(server, "scratch")
    job = start(server, "scratch", output, "--from-scratch")
    with no_orphans(job):
        assert job.wait() == 11, job.text
    assert "name another location" in job.text
    assert in_store(server, "scratch") == before


def test_a_pod_that_replaces_another_does_not_start_from_scratch_again(server: MotoServer, tmp_path: Path) -> None:
    """All pods of a job have the same options; the folder of the second one is empty."""
    for folder in ("first", "second"):
        output = tmp_path / folder
        job = start(server, "replaced", output, "--from-scratch", "--save-steps", "4", SAFEPOINT_FIRST_START="a1")
        with no_orphans(job):
            if folder == "first":
                job.wait_for_step(8)
                os.kill(job.rank_pids()[1], signal.SIGTERM)
            assert job.wait() == (75 if folder == "first" else 0), job.text
    step = read_events(tmp_path / "first", "saved")[-1]["step"]
    assert [event["step"] for event in read_events(tmp_path / "second", "resumed")] == [step]
