"""`safepoint.pyz` in the environments of OpenShift AI's images, without a network: only an object store is there.

`make test-openshift-images` makes the environments. A training's reference is the same script in the same
environment, started by `python` or by torch's own launcher: Safepoint has no part in it.
"""

import functools
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.ranks.test_strategies import assert_same_state
from tests.support import ceph_rgw, networks
from tests.support.certificates import make_certificates
from tests.support.images import Image
from tests.support.jobs import Job, no_orphans, tiny
from tests.support.networks import Network
from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server
from tests.support.tls_proxy import tls_in_front_of

_UNAVAILABLE = ceph_rgw.unavailable() or networks.unavailable()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.s3,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_UNAVAILABLE is not None, reason=f"the images are NOT tested: {_UNAVAILABLE}"),
]

_SHARDED = {"oldest": "fsdp1", "cuda-image": "fsdp1", "rocm-image": "fsdp1", "universal-image": "fsdp"}
_CASES = [(image, way) for image, sharded in _SHARDED.items() for way in ("single", "ddp", sharded)]
# Not the folder whose model would be taken for the final one.
_SCRIPT = ("--epochs", "3", "--eval-strategy", "steps", "--eval-steps", "5", "--end", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What a pod is here: an environment, a network with an object store in it, and its own home."""

    image: Image
    network: Network
    archive: Path
    home: Path
    variables: dict[str, str]

    def start(self, output: Path, *words: str) -> Job:
        """Start Python there, with nothing of this process's environment."""
        env = {
            "PATH": f"{self.image.python.parent}:/usr/bin:/bin",
            "HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SAFEPOINT_GRACE": f"{30 * PATIENCE:g}",
            **self.variables,
        }
        command = self.network.command(str(self.image.python), *words)
        return Job(command, output, log=self.home / f"{output.name}.log", env=env)

    def run(self, output: Path, *words: str) -> str:
        """What the command has printed when it has ended without an error."""
        job = self.start(output, *words)
        with no_orphans(job):
            assert job.wait(240) == 0, job.text
        return job.text


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "safepoint.pyz"
    subprocess.run([sys.executable, "-m", "safepoint.cli.main", "pack", "-o", str(path)], check=True)
    return path


@contextmanager
def _pod(name: str, archive: Path, folder: Path, server: S3Server) -> Iterator[Pod]:
    """The variables are those of a data connection of OpenShift AI, and the authority of the server's certificate."""
    image = Image(name=name)
    if (reason := image.unavailable()) is not None:
        pytest.skip(reason)
    (folder / "home").mkdir()
    make_certificates(folder)
    with (
        networks.loopback_alone() as network,
        tls_in_front_of(server.port, host="127.0.0.1", certificates=folder, network=network) as endpoint,
    ):
        variables = {
            "AWS_ACCESS_KEY_ID": server.keys[0],
            "AWS_SECRET_ACCESS_KEY": server.keys[1],
            "AWS_S3_ENDPOINT": endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_S3_BUCKET": server.bucket,
            "AWS_CA_BUNDLE": str(folder / "ca.pem"),
        }
        yield Pod(image=image, network=network, archive=archive, home=folder / "home", variables=variables)


@pytest.mark.parametrize("name", _SHARDED)
def test_the_environment_has_nothing_else(name: str) -> None:
    """The releases of the image and what they require; neither Safepoint nor what it would like to have."""
    image = Image(name=name)
    if (reason := image.unavailable()) is not None:
        pytest.skip(reason)
    found = image.distributions(*image.pins)
    assert image.pins.items() <= {package: found.get(package) for package in image.pins}.items()
    assert [package for package, release in found.items() if not release] == []
    assert image.cannot_import("safepoint", "obstore", "kubeflow", "boto3", "pytest")


@pytest.mark.parametrize(("name", "way"), _CASES)
def test_interrupted_is_uninterrupted(name: str, way: str, archive: Path, rgw: S3Server, tmp_path: Path) -> None:
    """SIGTERM to the launcher, an upload, a resume without the local folder, and the same weights at the end."""
    with _pod(name, archive, tmp_path, rgw) as pod:
        assert pod.run(tmp_path / "networks", "-c", "import socket; print(socket.if_nameindex())") == "[(1, 'lo')]\n"
        reference, output = tmp_path / "reference", tmp_path / "run"
        num_ranks = "1" if way == "single" else "2"
        sharing = ("--strategy", way) if way.startswith("fsdp") else ()
        launcher = () if way == "single" else ("-m", "torch.distributed.run", "--nproc-per-node", num_ranks)
        pod.run(reference, *launcher, *tiny(reference, *_SCRIPT, *sharing))

        prefix = f"images-{uuid.uuid4().hex}"
        location = str(rgw.location(prefix))
        options = ("--nproc-per-node", num_ranks, "--output-dir", location, "--local-dir", str(output))
        start = functools.partial(pod.start, output, str(archive), "run", *options)
        job = start(*tiny(output, *_SCRIPT, *sharing, "--step-ms", "60"))
        with no_orphans(job):
            job.wait_for_step(7)
            job.signal()
            assert job.wait() == 75, job.text
        step = job.events("uploaded")[-1]["step"]
        assert step == job.events("interrupted")[-1]["step"]
        assert f"checkpoint-{step}" in pod.run(tmp_path / "verify", str(archive), "checkpoints", "verify", location)
        shutil.rmtree(output)
        job = start(*tiny(output, *_SCRIPT, *sharing))
        with no_orphans(job):
            assert job.wait(240) == 0, job.text
        assert [event["step"] for event in job.events("fetched")] == [step]
        assert [event["step"] for event in job.events("resumed")] == [step]
        assert_same_state(output, reference)
        final = safetensors.torch.load(bytes(rgw.store(prefix).read("final/model.safetensors")))
        assert same_weights(final, reference / "end")


def same_weights(weights: dict[str, torch.Tensor], end: Path) -> bool:
    """Whether the weights are those that the script has saved at its end."""
    if (end / "whole.pt").exists():
        theirs = torch.load(end / "whole.pt", weights_only=True)["weights"]
    else:
        theirs = safetensors.torch.load_file(end / "model.safetensors")
    return weights.keys() == theirs.keys() and all(torch.equal(weights[name], theirs[name]) for name in theirs)
