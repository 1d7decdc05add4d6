"""Packages of a job: from a folder of wheels, with the real pip."""

import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.errors import SafepointError
from safepoint.foundation.processes import processes_of
from safepoint.jobs.local.attempt.packages import install_packages
from safepoint.jobs.local.attempt.steps import JobStoppedError
from tests.support.job_values import job_spec

RECORD = "greeting-1.0.dist-info/RECORD"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel of `greeting`, and a pip that looks nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting.py", "TEXT = 'hello'\n")
        wheel.writestr("greeting-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(
            "greeting-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        names = ["greeting.py", *(f"greeting-1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD"))]
        wheel.writestr(RECORD, "".join(f"{name},,\n" for name in names))
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "logs")


def test_without_packages_nothing_is_done(folder: Path) -> None:
    """No pip, no folder, no log."""
    assert install_packages(job_spec(), folder) is None
    assert os.listdir(folder) == []


def test_a_package_is_there_for_this_job_only(wheels: Path, folder: Path) -> None:
    """In a folder that its interpreter looks into first; a second start uses it again."""
    spec = job_spec(packages=("greeting==1.0",))
    target = install_packages(spec, folder)
    assert target is not None
    code = "import greeting; print(greeting.TEXT)"
    environ = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "hello\n"
    (wheels / "greeting-1.0-py3-none-any.whl").unlink()
    assert install_packages(spec, folder) == target
    with pytest.raises(SafepointError):
        install_packages(replace(spec, packages=("greeting>=1.0",)), folder)
    assert install_packages(spec, folder) == target, "another wish spoils nothing"


def test_an_index_of_the_job_is_asked_first(wheels: Path, folder: Path, tmp_path: Path) -> None:
    """The folder of an index, by `file://`; its first one replaces the default."""
    index = tmp_path / "index" / "greeting"
    index.mkdir(parents=True)
    wheel = wheels / "greeting-1.0-py3-none-any.whl"
    wheel.rename(index / wheel.name)
    (index / "index.html").write_text(
        f'<!DOCTYPE html><html><body><a href="{wheel.name}">{wheel.name}</a></body></html>'
    )
    os.environ.pop("PIP_NO_INDEX")
    spec = job_spec(packages=("greeting",), package_indexes=((tmp_path / "index").as_uri(),))
    target = install_packages(spec, folder)
    assert target is not None
    assert (target / "greeting.py").exists(), (folder / "logs" / "packages.log").read_text()


def test_a_failure_leaves_nothing_but_what_pip_says(wheels: Path, folder: Path) -> None:
    """The message names the package and the log."""
    with pytest.raises(SafepointError, match=r"installing missing-thing failed.*packages.log"):
        install_packages(job_spec(packages=("missing-thing",)), folder)
    assert left(folder) == []
    assert "missing-thing" in (folder / "logs" / "packages.log").read_text()


def test_what_looks_like_an_option_is_none(wheels: Path, folder: Path, tmp_path: Path) -> None:
    """A requirement cannot tell pip to write or to load from somewhere else, should a job have one all the same."""
    spec = job_spec(packages=("greeting",))
    object.__setattr__(spec, "packages", (f"--target={tmp_path / 'there'}", "greeting"))
    with pytest.raises(SafepointError, match="failed"):
        install_packages(spec, folder)
    assert not (tmp_path / "there").exists()
    assert left(folder) == []


def test_what_was_killed_halfway_is_begun_anew(wheels: Path, folder: Path) -> None:
    """Only a folder with its last name counts."""
    spec = job_spec(packages=("greeting",))
    target = install_packages(spec, folder)
    assert target is not None
    unfinished = target.rename(target.with_suffix(".unfinished"))
    (unfinished / "greeting.py").write_text("broken(")
    assert install_packages(spec, folder) == target
    assert (target / "greeting.py").read_text() == "TEXT = 'hello'\n"
    assert left(folder) == [target.name]


def test_a_job_that_is_not_wanted_any_more_waits_for_no_pip(wheels: Path, folder: Path) -> None:
    """An installation can take very long; pip and what it has started end, as processes of the job."""
    (wheels / "slow-1.0").mkdir()
    (wheels / "slow-1.0" / "setup.py").write_text("import time; time.sleep(60)\n")
    began = time.monotonic()
    seen: list[int] = []

    def may_continue() -> bool:
        seen.extend(processes_of(folder))
        return not seen

    spec = job_spec(packages=(f"slow @ {(wheels / 'slow-1.0').as_uri()}",))
    with pytest.raises(JobStoppedError):
        install_packages(spec, folder, may_continue=may_continue)
    assert seen, "pip can be found when the job is ended"
    assert time.monotonic() - began < 50
    assert processes_of(folder) == []
    assert left(folder) == []
