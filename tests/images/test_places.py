"""Images in object stores, copies and keys: processes go on bit for bit from each of them, or are not restored."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images.test_one_tree import Trainings, reference, safepoint
from tests.support.s3_server import S3Server


@pytest.fixture
def trainings(tmp_path: Path) -> Iterator[Trainings]:
    found = Trainings(tmp_path)
    yield found
    found.end()


def test_a_training_goes_on_from_a_bucket_and_from_a_copy(
    trainings: Trainings, bucket_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encrypted, a chain of two: thawed from the bucket, frozen into it again, copied to a folder, thawed there."""
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(temporary))
    place = f"{bucket_server.location('places')}"
    expected = reference(trainings, "200", "lora")
    pid = trainings.start("out", "200", "lora", "0.1")
    trainings.has_reached("out", 5)
    safepoint("freeze", "--pid", pid, "--to", place, "--encrypt")
    trainings.reap()
    num_lines = len(trainings.output("out"))
    restored = safepoint("thaw", place)
    trainings.restored.append(restored["pid"])
    trainings.has_reached("out", num_lines + 5)
    frozen = safepoint("freeze", "--pid", restored["pid"], "--to", place, "--encrypt")
    assert frozen["needs"] == ["image-1"]
    assert frozen["num_stored"] / frozen["num_pages"] <= 0.11
    assert len(trainings.output("out")) < 200
    copied = safepoint("images", "copy", f"{place}/image-2", tmp_path / "copied")
    assert [one["name"] for one in copied] == ["image-1", "image-2"]
    trainings.restored.append(safepoint("thaw", tmp_path / "copied")["pid"])
    assert trainings.has_ended("out") == expected
    assert list(temporary.glob("safepoint-images-*")) == []


def test_an_image_of_another_key_needs_trust(
    trainings: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For this user, it might be that of any other user. Nothing is restored without `--trust`."""
    expected = reference(trainings, "400")
    pid = trainings.start("out", "400", "0.1")
    trainings.has_reached("out", 5)
    safepoint("freeze", "--pid", pid, "--to", tmp_path / "images")
    trainings.reap()
    own = tmp_path / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    for words in ([], ["--key", make_key(tmp_path / "key")]):
        error = safepoint("thaw", tmp_path / "images", *words, code=14)
        assert "another user may have made it" in error["message"]
        assert not Path(f"/proc/{pid}").exists()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own))
    safepoint("images", "verify", tmp_path / "images", "--deep")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    trainings.restored.append(safepoint("thaw", tmp_path / "images", "--trust")["pid"])
    assert trainings.has_ended("out") == expected


def make_key(path: Path) -> Path:
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path
