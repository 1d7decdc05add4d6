"""At the end of a training the ranks send the model straight to the object store (docs/adr/0015)."""

import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.storage.store import Store
from safepoint.testing.fault_proxy import Fault, FaultProxy, Kind, add_mixture
from tests.support.disk import DiskWatch
from tests.support.jobs import Job, no_orphans, safepoint, tiny
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

_FINAL = "final/"


@pytest.fixture(
    params=[
        "moto",
        pytest.param("rgw", marks=[pytest.mark.s3, pytest.mark.long]),
        pytest.param("minio", marks=[pytest.mark.s3, pytest.mark.minio, pytest.mark.long]),
    ]
)
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.getfixturevalue(request.param)


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(f"127.0.0.1:{server.port}", seed=3) as running:
        yield running


class Place:
    """A prefix of the store, reached through a proxy, and the local folder for it."""

    def __init__(self, server: S3Server, proxy: FaultProxy, output: Path) -> None:
        prefix = f"final-{uuid.uuid4().hex}"
        self.output = output
        self.location = str(server.location(prefix))
        self.store: Store = server.store(prefix)
        self.variables = server.variables
        self._proxied = {**server.variables, "AWS_ENDPOINT_URL_S3": proxy.endpoint}

    def start(self, *arguments: str, strategy: str = "fsdp", **env: str) -> Job:
        sharing = ("--strategy", strategy) if strategy else ()
        # Not the folder whose model would be taken for the final one.
        program = tiny(self.output, "--end", "end", "--max-steps", "2", *sharing, *arguments)
        options = ("--nproc-per-node", "2", "--output-dir", self.location, "--local-dir", str(self.output))
        return safepoint(self.output, *options, program=program, **self._proxied, **env)

    def names(self) -> list[str]:
        return [item.key for item in self.store.list("final")]

    def assert_complete(self, folder: Path) -> None:
        """`final/` matches its manifest, can be loaded and has the weights at the end; nothing else is left."""
        inventory, name = open_inventory(f"{self.location}/final")
        assert inventory.verify(inventory.item(name)) == ()
        for key in self.names():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(self.store.read(key))
        found, report = AutoModelForCausalLM.from_pretrained(folder / "final", output_loading_info=True)
        assert not report["missing_keys"]
        whole = torch.load(self.output / "end" / "whole.pt", weights_only=False)["weights"]
        ours = found.state_dict()
        assert all(torch.equal(tensor, whole[name]) for name, tensor in ours.items() if name in whole)
        assert len(ours.keys() & whole.keys()) >= len(ours) - 1
        assert not list(self.store.list(".safepoint/unfinished"))
        assert self.store.sweep() == 0


@pytest.fixture
def place(server: S3Server, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    return Place(server, proxy, tmp_path / "run")


def end(job: Job, code: int = 0) -> None:
    with no_orphans(job):
        assert job.wait(240) == code, job.text


def memory_mb(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


@pytest.mark.long
def test_neither_disk_nor_memory(place: Place, proxy: FaultProxy, tmp_path: Path) -> None:
    """At most 5 % of the model on disk; on the first rank the largest tensor and 64 MB in memory."""
    hidden = 2048  # with a smaller model the bound would be more than all of it
    job = place.start("--hidden", str(hidden))
    with no_orphans(job):
        job.wait_for_event("finished")
        proxy.up._bytes_per_s = 30e6 * hidden / 512  # slow enough to look
        first = job.rank_pids()[0]
        Path(f"/proc/{first}/clear_refs").write_text("5")  # resets the peak
        before_mb, peak_mb = memory_mb(first, "VmRSS"), 0.0
        with DiskWatch(place.output / ".safepoint") as watch:
            while job.process.poll() is None and not job.events("uploaded"):
                peak_mb = max(peak_mb, memory_mb(first, "VmHWM"))
                time.sleep(0.02)
        proxy.up._bytes_per_s = None
        assert job.wait(240) == 0, job.text
    place.assert_complete(tmp_path / "found")
    size_bytes = place.store.stat("final/model.safetensors").size_bytes
    largest_mb = hidden * 2 * hidden * 4 / 1e6
    print(f"{size_bytes} bytes; disk {watch.grown_bytes}, memory {peak_mb - before_mb:.1f} MB")
    assert watch.grown_bytes <= 0.05 * size_bytes
    assert peak_mb - before_mb <= largest_mb + 64
    assert size_bytes / 1e6 > 1.5 * (largest_mb + 64), "the bound says something"


@pytest.mark.parametrize("how", ["killed", pytest.param("asked to stop", marks=pytest.mark.long)])
def test_ended_in_the_middle(how: str, place: Place, proxy: FaultProxy, tmp_path: Path) -> None:
    """`final/` is absent; the same command again completes it, and nothing of the first try is left."""
    proxy.add(Fault(kind=Kind.STALL, method="PUT", contains="/final/model.safetensors", seconds=20))
    job = place.start("--hidden", "1024", "--save-strategy", "steps", "--save-steps", "2")
    with no_orphans(job):
        job.wait_for("part of the final model", lambda: proxy.injected[Kind.STALL] >= 1)
        if how == "killed":
            job.kill_everything()
        else:
            job.signal()
            assert job.wait() == 75, job.text
    assert MANIFEST_NAME not in " ".join(place.names())
    assert [item.key for item in place.store.list(".safepoint/unfinished")] == [".safepoint/unfinished/final"]
    proxy.clear()
    end(place.start("--hidden", "1024", "--save-strategy", "steps", "--save-steps", "2"))
    place.assert_complete(tmp_path / "found")


@pytest.mark.long
def test_a_store_that_refuses(place: Place, proxy: FaultProxy, tmp_path: Path) -> None:
    """After half a minute the run exits with 13; the command that the message names exports the model."""
    proxy.add(Fault(kind=Kind.STATUS, status=403, method="PUT", contains="/final/model.safetensors"))
    job = place.start()
    end(job, 13)
    assert proxy.injected[Kind.STATUS] >= 3, "tried again"
    assert job.events("final_missing")
    assert MANIFEST_NAME not in " ".join(place.names())
    command = re.search(r"`safepoint (checkpoints export [^`]+)`", job.text)
    assert command is not None, job.text
    proxy.clear()
    done = subprocess.run(
        [sys.executable, "-m", "safepoint.cli.main", *shlex.split(command[1])],
        env={**os.environ, **place.variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    place.assert_complete(tmp_path / "found")


@pytest.mark.long
def test_a_network_that_breaks(place: Place, proxy: FaultProxy, tmp_path: Path) -> None:
    """One request in ten fails, and an upload is started again: the model is complete."""
    add_mixture(proxy, 0.1)
    # Beyond what is repeated by itself: the upload ends, and goes on where it was.
    proxy.add(Fault(kind=Kind.STATUS, status=400, method="PUT", contains="/final/model.safetensors", nth=3))
    job = place.start("--hidden", "1024")
    end(job)
    proxy.clear()
    assert [event["name_in_store"] for event in job.events("upload_failed")] == ["final"]
    place.assert_complete(tmp_path / "found")


@pytest.mark.long
def test_ranks_that_have_nothing_to_send_wait(place: Place, proxy: FaultProxy) -> None:
    """The upload takes longer than the time limit for silent ranks, and no rank counts as silent."""
    job = place.start("--hidden", "1024", strategy="", SAFEPOINT_PEER_TIMEOUT="20")
    with no_orphans(job):
        job.wait_for_event("finished")
        proxy.up._bytes_per_s = 1.2e6
        began_s = time.monotonic()
        job.wait_for_event("uploaded", location=f"{place.location}/final")
        assert time.monotonic() - began_s > 22
        proxy.up._bytes_per_s = None
        assert job.wait(240) == 0, job.text
    assert f"{_FINAL}{MANIFEST_NAME}" in place.names()
