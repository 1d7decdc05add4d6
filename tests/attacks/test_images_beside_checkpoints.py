"""Process images in the output folder of a run hold passwords, and are not uploaded with its other files.

Neither to the bucket of the run, nor to the Hugging Face Hub.
"""

import os
from pathlib import Path

import pytest

from safepoint.checkpoint.remote import extra_files
from safepoint.checkpoint.remote.extra_files import ExtraFiles, private_patterns
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import MANIFEST_NAME
from tests.support.checkpoints import prepared
from tests.support.criu_images import add_image
from tests.support.stores import FaultyStore


def test_they_are_not_uploaded(tmp_path: Path) -> None:
    """Neither those of the folder itself, nor those below it, nor by a link, nor what a killed freeze has left."""
    output = prepared(tmp_path / "out")
    for number, folder in enumerate((output.root, output.root / "snapshots")):
        location = ImageLocation(folder)
        add_image(location, tmp_path / f"dump-{number}", {100: b"password" * 512})
        left = location.control_folder() / "work-1" / "image" / "part-0"
        left.mkdir(parents=True)
        (left / "core-100.img").write_bytes(b"password")
    os.symlink("image-1/part-0/core-100.img", output.root / "link.txt")
    (output.root / "image-2").mkdir()
    (output.root / "image-2" / "plot.png").write_bytes(b"no process image")
    (output.root / "image.json").write_text("{}")
    store = FaultyStore(tmp_path / "bucket")
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=1, attempt_id="run-1", since="now", host="node"))
    files = ExtraFiles(output, remote, limit_bytes=1 << 30, is_first_node=True, report=lambda event: None)
    files.upload(progress=lambda count: None, deadline_s=None)
    found = sorted(item.key for item in store.list() if not item.key.startswith(".safepoint/"))
    assert found == ["image-2/plot.png", "image.json"]


def test_they_are_not_pushed_to_the_hub(tmp_path: Path) -> None:
    """`safepoint run --freeze-as-last-resort` makes them in the folder `images` of the output folder."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import filter_repo_objects

    output = prepared(tmp_path / "out[1]")
    names = ["model.safetensors", "image-2/plot.png", "images/list.json"]
    for name in names:
        (output.root / name).parent.mkdir(exist_ok=True)
        (output.root / name).write_text("of the user")
    for number, folder in enumerate((output.root, output.root / "images")):
        location = ImageLocation(folder)
        add_image(location, tmp_path / f"dump-{number}", {100: b"password" * 512})
        left = location.control_folder() / "work-1" / "image"
        left.mkdir(parents=True)
        (left / "core-100.img").write_bytes(b"password")
    os.symlink("images/image-1/part-0/core-100.img", output.root / "plot.png")
    os.symlink("image-2/plot.png", output.root / "own.png")
    every = [path.relative_to(output.root).as_posix() for path in output.root.rglob("*") if path.is_file()]
    assert len(every) > 10
    pushed = filter_repo_objects(every, ignore_patterns=list(private_patterns(output.root)))
    assert sorted(pushed) == sorted([*names, "own.png"])


def test_the_name_of_the_record_is_that_of_images() -> None:
    """The uploader does not import the room of process images."""
    assert extra_files.IMAGE_RECORD == MANIFEST_NAME
