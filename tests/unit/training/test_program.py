"""Which files `safepoint run` accepts as a script, and how a script is run."""

import sys
import zipfile
from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.foundation.environment import is_importable
from safepoint.training.program import find_script, run_program


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first.ipynb", "first.ipynb is a notebook.*nbconvert --to script first.ipynb"),
        ("start.sh", "start.sh is a shell script.*that start.sh starts"),
        ("absent.py", "there is no script absent.py"),
    ],
)
def test_what_is_no_python_script_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, and says what to do."""
    monkeypatch.chdir(tmp_path)
    for other in ("first.ipynb", "start.sh"):
        (tmp_path / other).touch()
    with pytest.raises(UsageError, match=message):
        find_script(name)


@pytest.mark.parametrize(
    "beginning",
    ["#!/venv/bin/python3\n", "#!/bin/sh\n'''exec' \"/my venv/bin/python3\" \"$0\" \"$@\"\n' '''\n"],
)
def test_a_command_beside_python_is_found(beginning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an environment whose path has a space; a program in another language is not found."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "trl").write_text(f"{beginning}import sys\n")
    (tmp_path / "other").write_text("#!/bin/sh\nexit 0\n")
    assert find_script("trl") == tmp_path / "trl"
    with pytest.raises(UsageError, match="there is no script other"):
        find_script("other")


def test_only_a_package_has_modules_in_it(tmp_path: Path) -> None:
    """`python -m train.py` would import `train`, and only then fail."""
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    assert is_importable("train", str(tmp_path))
    assert is_importable("package.module", str(tmp_path))
    assert not is_importable("train.py", str(tmp_path))


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what a program changes in the interpreter."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])


@pytest.mark.usefixtures("restored")
def test_a_script_knows_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under plain Python, `sys.argv[0]` is the path as it was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import sys; print(__file__, sys.argv, sys.modules[__name__].__file__)")
    run_program(["script.py", "--lr"], is_module=False)
    path = tmp_path / "script.py"
    assert capsys.readouterr().out == f"{path} ['script.py', '--lr'] {path}\n"


@pytest.mark.usefixtures("restored")
def test_an_archive_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its `__main__.py` is the script, as under plain Python."""
    path = tmp_path / "app.pyz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", "print(__name__)")
    run_program([str(path)], is_module=False)
    assert capsys.readouterr().out == "__main__\n"
