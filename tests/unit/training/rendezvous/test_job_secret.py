"""The secret by which the nodes of a job recognize each other."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from safepoint.errors import StorageError, UsageError
from safepoint.settings.run_settings import RunSettings
from safepoint.training.rendezvous.job_secret import SECRET_FILE, agree_on_secret


def test_nodes_that_share_a_folder_have_one_secret(tmp_path: Path) -> None:
    """Whichever node is first; only its user can read the file, which has no second name."""
    settings = RunSettings(output_dir=str(tmp_path / "out"))
    with ThreadPoolExecutor(8) as pool:
        found = {secret.value for secret in pool.map(lambda _: agree_on_secret(settings, environ={}), range(32))}
    assert len(found) == 1
    status = (tmp_path / "out" / ".safepoint" / "job-secret").stat()
    assert (status.st_mode & 0o777, status.st_nlink, status.st_size) == (0o600, 1, 64)


def test_a_named_file_comes_first(tmp_path: Path) -> None:
    """It is the same on every node, so no other node is admitted."""
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    settings = RunSettings(output_dir=str(tmp_path / "out"))
    secret = agree_on_secret(settings, environ={SECRET_FILE: str(tmp_path / "secret")})
    assert (secret.value, secret.is_common) == (b"0123456789abcdef", True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, "short", "x" * 5000])
def test_a_named_file_that_cannot_be_used(content: str | None, tmp_path: Path) -> None:
    """A secret that can be guessed is none."""
    if content is not None:
        (tmp_path / "secret").write_text(content)
    with pytest.raises(UsageError, match=SECRET_FILE):
        agree_on_secret(RunSettings(), environ={SECRET_FILE: str(tmp_path / "secret")})


def test_without_a_common_place_each_node_has_its_own() -> None:
    """Node 0 then knows that others may come without it."""
    first, second = (agree_on_secret(RunSettings(), environ={}) for _ in range(2))
    assert first.value != second.value
    assert not first.is_common


@pytest.mark.parametrize("what", ["control", "secret"])
def test_links_in_the_folder_lead_nowhere(what: str, tmp_path: Path) -> None:
    """A folder of a stranger neither gets a file written elsewhere nor a file read from there."""
    outside, output = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    (outside / "job-secret").write_text("x" * 64)
    output.mkdir()
    if what == "control":
        (outside / "job-secret").unlink()
        (output / ".safepoint").symlink_to(outside)
    else:
        (output / ".safepoint").mkdir()
        (output / ".safepoint" / "job-secret").symlink_to(outside / "job-secret")
    with pytest.raises(StorageError):
        agree_on_secret(RunSettings(output_dir=str(output)), environ={})
    assert not (what == "control" and list(outside.iterdir()))


@pytest.mark.parametrize(
    ("mode", "of_folder", "is_warned"), [(0o644, 0o755, True), (0o640, 0o755, False), (0o644, 0o750, False)]
)
def test_a_file_that_every_user_of_the_machine_can_read(
    mode: int, of_folder: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `openssl rand -hex 32 > secret` makes it. With the secret, they could join the job and run code in it."""
    monkeypatch.setattr("safepoint.training.rendezvous.job_secret.is_seeing_all", lambda: True)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # other users may not enter `tmp_path`
        path = Path(folder, "secret")
        path.write_text("s" * 32)
        path.chmod(mode)
        Path(folder).chmod(of_folder)
        secret = agree_on_secret(RunSettings(), environ={SECRET_FILE: str(path)})
    assert secret.value == b"s" * 32
    assert ("chmod 600" in caplog.text) == is_warned
