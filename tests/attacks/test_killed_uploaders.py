"""SIGKILL of the uploader's process at each of its requests: nothing is lost, and nothing is left."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import PARTS, UNFINISHED, Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader_process import UploaderPlan, plan_line
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.testing.fault_proxy import Fault, FaultProxy, Kind
from tests.support.checkpoints import commit, prepared
from tests.support.moto_server import MotoServer
from tests.support.patience import PATIENCE

FINISH = json.dumps({"newest_only": False, "deadline_s": None}).encode() + b"\n"
FIRST_REQUESTS = 60


class Killing(FaultProxy):
    """Kills the client when its request number `at` arrives. `has_lost` drops the answer to the one before."""

    def __init__(self, upstream: str, at: int, *, has_lost: bool) -> None:
        super().__init__(upstream)
        self.at, self.has_lost, self.count = at, has_lost, 0
        self.process: subprocess.Popen[bytes] | None = None

    def choose(self, method: str, target: str) -> Fault | None:
        self.count += 1
        if self.count == self.at and self.process is not None:
            self.process.kill()
        return Fault(kind=Kind.LOST_ANSWER) if self.has_lost and self.count == self.at - 1 else None


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    output = prepared(tmp_path / "out")
    commit(output, 3)
    return output


def start(plan: UploaderPlan, server: MotoServer, endpoint: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-m", "safepoint.checkpoint.remote.uploader_process"],
        env={**os.environ, **server.variables, "AWS_ENDPOINT_URL_S3": endpoint},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(plan_line(plan) + FINISH)
    process.stdin.flush()
    return process


def ended(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(120 * PATIENCE)
    finally:
        process.kill()
        process.communicate()


def claimed(server: MotoServer, prefix: str, attempt: int) -> RemoteFolder:
    remote = RemoteFolder(server.store(prefix))
    remote.claim(Claim(run_id="run", attempt=attempt, attempt_id=str(attempt), since="", host="h"))
    return remote


def is_alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(900)
@pytest.mark.parametrize("has_lost", [False, True])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_at_each_request(every: int, has_lost: bool, output: OutputFolder, moto: MotoServer) -> None:
    """The earlier checkpoint stays, the local one too, and the next attempt completes the newer one."""
    first, num_kills = f"kills/{uuid.uuid4().hex}", 0
    plan = UploaderPlan(folder=str(output.root), location="", attempt_id="1")
    commit(output, 4, {0: {"model.safetensors": os.urandom(18 << 20)}, 1: {"rng": b"1"}})
    for at in range(2, FIRST_REQUESTS, every):
        prefix = f"{first}/{at}"
        remote = claimed(moto, prefix, 1)
        upload_earlier(remote, output)
        plan = dataclasses.replace(plan, location=str(remote.store.location))
        proxy = Killing(f"127.0.0.1:{moto.port}", at, has_lost=has_lost)
        with proxy:
            proxy.process = process = start(plan, moto, proxy.endpoint)
            code = ended(process)
        if code == 0:  # it has sent fewer requests
            break
        num_kills += 1
        assert code == -signal.SIGKILL
        assert not is_alive(process.pid)
        assert (output.root / "checkpoint-4").is_dir()
        assert Inventory(remote.store).item("checkpoint-3").is_complete
        newest = Inventory(remote.store).item()
        assert newest.name in {"checkpoint-3", "checkpoint-4"}
        # The next attempt claims the location and cleans it, as a start does, and uploads what is missing.
        again = claimed(moto, prefix, 2)
        again.clean(keep={"checkpoint-4"} - {f"checkpoint-{step}" for step in again.steps()})
        assert ended(start(dataclasses.replace(plan, attempt_id="2"), moto, moto.endpoint)) == 0
        assert again.steps() == [4, 3]
        assert not list(again.store.list(UNFINISHED))
        assert not list(again.store.list(PARTS))
        assert again.store.sweep() == 0
        for name in ("checkpoint-3", "checkpoint-4"):
            inventory = Inventory(again.store)
            assert inventory.verify(inventory.item(name)) == ()
    assert num_kills >= 15 / every


def upload_earlier(remote: RemoteFolder, output: OutputFolder) -> None:
    for path in sorted((output.root / "checkpoint-3").rglob("*")):
        if path.is_file():
            key = f"checkpoint-3/{path.relative_to(output.root / 'checkpoint-3').as_posix()}"
            remote.store.write(key, path.read_bytes())
