"""Someone who can write to a bucket puts another image of the same user under the name of a job's image.

The image is authentic. Its processes are not those of the job, which would go on with another program.
"""

import contextlib
import os
from pathlib import Path

import pytest

from safepoint.errors import FreezeError
from safepoint.jobs.local.images.job_images import images_folder
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.states import JobState
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import ImageManifest
from safepoint.transparent.images.store_dump import Dump, store_dumps
from tests.support.criu_images import MACHINE, dump
from tests.unit.jobs.local.images.test_job_images import freeze, place, restored, start, thaw
from tests.unit.jobs.local.test_supervisor import Place, wait_until

__all__ = ["place", "restored"]
_FREE = 4_000_050
"""A number that no process has, so that no PID namespace is needed."""


def replace_image(tmp_path: Path, *, num_parts: int) -> ImageManifest:
    """Put another complete image in the place of `image-1` of the job `a`."""
    (images_folder("a") / "image-1").rename(tmp_path / "away")
    dumps = [
        Dump(folder=dump(tmp_path / f"other-{part}", {_FREE + part: bytes(4096)}), root_pid=_FREE + part, program="x")
        for part in range(num_parts)
    ]
    with ImageLocation(images_folder("a")).writing(1) as image:
        manifest = store_dumps(image, dumps, MACHINE)
        image.commit(manifest)
    return manifest


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason="the folder of an image must be private")
@pytest.mark.parametrize(("num_parts", "owner"), [(1, "b"), (2, "a")], ids=["another program", "more processes"])
def test_the_job_does_not_go_on_with_it(place: Place, tmp_path: Path, num_parts: int, owner: str) -> None:
    start(place, "wait 75")
    freeze()
    replace_image(tmp_path, num_parts=num_parts)
    with pytest.raises(FreezeError, match="is not the image of job a"):
        thaw(restored=owner)
    assert place.job().state is JobState.SUSPENDED
    pids = [int(path.read_text()) for path in tmp_path.glob("restored-?")]
    assert pids
    wait_until(lambda: not any(map(is_running, pids)))
    assert job_folder("a").exists()
