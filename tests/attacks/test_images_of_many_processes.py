"""A process tree of many processes, or a chain of images that names many page files, meets a limit of descriptors."""

import os
import resource
from collections.abc import Generator
from pathlib import Path

import pytest

from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.materialise import materialise
from tests.support.criu_images import add_image

_NUM_PROCESSES = 120


@pytest.fixture
def few_descriptors() -> Generator[None]:
    """200 more than this process has open: nearly as many as some machines grant to a process of a shell."""
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(usual, used + 200), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


def test_a_chain_of_many_page_files_can_be_restored(tmp_path: Path, few_descriptors: None) -> None:
    """Three images with 360 page files, of which 240 would not have a descriptor."""
    location = ImageLocation(tmp_path / "images")
    memory = {1000 + number: bytes([number + 1]) * 4096 for number in range(_NUM_PROCESSES)}
    for number in range(3):
        memory = {pid: pages + bytes([number + 1, pid % 251]) * 2048 for pid, pages in memory.items()}
        add_image(location, tmp_path / f"dump-{number}", memory)
    target = tmp_path / "restored"
    target.mkdir()
    assert len(materialise(location, "image-3", target).sources) == 2
    for path in (tmp_path / "dump-2").glob("pages-*.img"):
        assert (target / "part-0" / path.name).read_bytes() == path.read_bytes()
