"""What process images need, with programs that answer as CRIU and util-linux do."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from safepoint.doctor import process_images
from safepoint.doctor.finding import Status
from safepoint.doctor.process_images import examine_criu, examine_locks, examine_namespaces
from safepoint.errors import FreezeError, SafepointError
from safepoint.foundation.files import FolderLock
from safepoint.transparent import self_test
from safepoint.transparent.criu.program import Criu
from tests.unit.doctor.test_programs import programs, write

__all__ = ["programs"]


def test_criu_is_not_needed(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed it must work, and this process must be allowed to use it."""
    monkeypatch.delenv("SAFEPOINT_CRIU", raising=False)
    tried: list[SafepointError] = []

    def try_out(criu: Criu) -> None:
        if tried:
            raise tried[0]

    monkeypatch.setattr(self_test, "try_out", try_out)
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCapEff:\t{1 << 40:016x}\n")
    assert examine_criu(status).status is Status.OK
    version = 'if test "$1" = --version; then echo Version: 4.2.1; exit; fi;'
    write(programs, "criu", f'{version} test "$1" = check')
    assert "CRIU 4.2.1, with CAP_CHECKPOINT_RESTORE; a small program was frozen" in examine_criu(status).found
    assert examine_criu(status).status is Status.OK
    tried.append(FreezeError("io_uring is on", hint="turn it off"))
    assert examine_criu(status).status is Status.WARNING
    assert "succeeds, but a small program could not be frozen and restored: io_uring" in examine_criu(status).found
    assert examine_criu(status).fix == "turn it off"
    tried.clear()
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda _: None)
        assert "safepoint[transparent]" in examine_criu(status).fix
    write(programs, "criu", "echo Version: 3.17.1")
    assert "CRIU 3.17.1, which fails" in examine_criu(status).found
    write(programs, "criu", f"{version} echo 'Error: no PAGEMAP_SCAN' >&2; exit 1")
    assert "no PAGEMAP_SCAN" in examine_criu(status).found
    assert examine_criu(status).status is Status.WARNING
    write(programs, "criu", f"{version} exit 0")
    status.write_text("CapEff:\t0000000000000000\n")
    assert examine_criu(status).status is Status.WARNING
    assert "without" in examine_criu(tmp_path / "no-status").found


def test_a_namespace_is_tried(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where CRIU is; without `unshare`, or if it fails, the finding says what to do."""
    monkeypatch.delenv("SAFEPOINT_CRIU", raising=False)
    assert examine_namespaces().status is Status.OK
    write(programs, "criu", "exit 0")
    assert "not installed" in examine_namespaces().found
    assert examine_namespaces().fix == "install util-linux"
    write(programs, "unshare", "echo 'unshare failed: Operation not permitted' >&2; exit 1")
    assert "Operation not permitted" in examine_namespaces().found
    assert "root" in examine_namespaces().fix
    write(programs, "unshare", 'test "$1" = --pid')
    assert examine_namespaces().status is Status.OK


def test_locks_are_tried_where_images_will_be(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the nearest folder that exists; nothing is left there."""
    monkeypatch.delenv("SAFEPOINT_CRIU", raising=False)
    images = tmp_path / "state" / "jobs"
    assert examine_locks(images).status is Status.OK
    write(programs, "criu", "exit 0")
    assert examine_locks(images).fix == "install util-linux"
    write(programs, "flock", "exit 0")
    before = sorted(tmp_path.iterdir())
    assert examine_locks(images).status is Status.OK
    assert str(tmp_path) in examine_locks(images).found
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.setattr(FolderLock, "acquire", lambda *_: None)
    assert "does not support" in examine_locks(images).found

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process_images, "secret_folder", fail)
    assert "No space left" in examine_locks(images).found


@pytest.mark.parametrize("has_space", [True, False], ids=["no-locks", "no-space"])
def test_the_fix_names_the_variable_of_the_folder(
    has_space: bool, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG_STATE_HOME moves the images, and TMPDIR the temporary files."""
    monkeypatch.delenv("SAFEPOINT_CRIU", raising=False)
    for name in ("criu", "flock"):
        write(programs, name, "exit 0")
    images, temporary = tmp_path / "images", tmp_path / "temporary"
    images.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(process_images, "private_parent", lambda *, prefers_memory: temporary)
    make, acquire = process_images.secret_folder, FolderLock.acquire
    for bad, variable in ((images, "XDG_STATE_HOME"), (temporary, "TMPDIR")):

        def secret_folder(place: Path, prefix: str, bad: Path = bad) -> AbstractContextManager[Path]:
            if place == bad and not has_space:
                raise OSError(28, "No space left on device")
            return make(place, prefix)

        def lock(path: Path, record: dict[str, object], bad: Path = bad) -> FolderLock | None:
            return None if path.is_relative_to(bad) and has_space else acquire(path, record)

        monkeypatch.setattr(process_images, "secret_folder", secret_folder)
        monkeypatch.setattr(FolderLock, "acquire", lock)
        finding = examine_locks(images)
        assert (finding.status, str(bad) in finding.found) == (Status.WARNING, True)
        assert finding.fix == f"set {variable} to a folder on a local disk"
