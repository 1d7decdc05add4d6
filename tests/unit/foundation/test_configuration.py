"""Settings in files: which one is used, and what the message about an invalid one says."""

import os
import tomllib  # noqa: F401  not from a folder that the user of a test may not enter
from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.foundation.configuration import Configuration, LocalMachine, user_file


def load(folder: Path) -> Configuration:
    return Configuration.load(folder, {"XDG_CONFIG_HOME": str(folder / "config")})


def write(folder: Path, text: str, name: str = "safepoint.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_no_file_is_no_setting(tmp_path: Path) -> None:
    assert load(tmp_path) == Configuration()


def test_the_first_file_that_names_a_setting_decides(tmp_path: Path) -> None:
    """safepoint.toml before pyproject.toml before the user's; what only a later one names counts too."""
    write(tmp_path, "[run]\nsave-steps = 1\n")
    write(
        tmp_path, "[project]\nname = 'x'\n[tool.safepoint.run]\nsave_steps = 2\nkeep = 'newest=1'\n", "pyproject.toml"
    )
    write(tmp_path, "[run]\nkeep = 'newest=3'\ngrace = 60\n[run.deeper]\nx = 1\n", "config/safepoint/config.toml")
    configuration = load(tmp_path)
    found = configuration.settings("run")
    assert {name: (setting.value, setting.line) for name, setting in found.items()} == {
        "save-steps": (1, 2),
        "keep": ("newest=1", 5),
        "grace": (60, 3),
    }
    assert found["keep"].place == f"{tmp_path / 'pyproject.toml'}, line 5"
    assert configuration.settings("run", "deeper")["x"].value == 1
    assert configuration.settings("submit") == {}


def test_a_line_is_said_only_where_it_is_certain(tmp_path: Path) -> None:
    """A value over several lines, or a look-alike inside a text, has none."""
    write(tmp_path, '[other]\nx = """\n[run]\nsave-steps = 7\n"""\n[run]\nsave-steps = 8\nkeep = [\n1]\n')
    found = load(tmp_path).settings("run")
    assert found["save-steps"].value == 8
    assert found["save-steps"].line is None
    assert found["keep"].line is None


def test_dotted_keys_and_quotes_have_lines_too(tmp_path: Path) -> None:
    write(tmp_path, 'run.save-steps = 5\n[checkpoints."list"]\ndeep = true # yes\n')
    configuration = load(tmp_path)
    assert configuration.settings("run")["save-steps"].line == 1
    assert configuration.settings("checkpoints", "list")["deep"].line == 3


def test_claims_and_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are relative to their file, `~` is the user's; keys of different files add up."""
    monkeypatch.setenv("HOME", "/home/somebody")
    write(tmp_path, '[pvc]\ndata = "volumes/data"\n"my-claim.2" = "x"\n')
    write(
        tmp_path, '[pvc]\ndata = "/elsewhere"\nhome = "~/h"\n[local]\ncpu-slots = 4\n', "config/safepoint/config.toml"
    )
    configuration = load(tmp_path)
    assert configuration.pvc == {
        "data": tmp_path / "volumes" / "data",
        "my-claim.2": tmp_path / "x",
        "home": Path("/home/somebody/h"),
    }
    assert configuration.local == LocalMachine(cpu_slots=4)
    assert configuration.origins["local", "cpu-slots"].line == 5


def test_the_users_file_is_where_xdg_says() -> None:
    """A relative XDG_CONFIG_HOME is no place, as its specification says."""
    home = {"HOME": "/home/me"}
    assert user_file(home) == Path("/home/me/.config/safepoint/config.toml")
    assert user_file({**home, "XDG_CONFIG_HOME": "relative"}) == user_file(home)
    assert user_file({**home, "XDG_CONFIG_HOME": "/etc/me"}) == Path("/etc/me/safepoint/config.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run\nx = 1", ["not valid TOML", "line 1"]),
        ("[run]\nx = newest\n", ["not valid TOML", "line 2"]),
        ("save-steps = 3\n", ["line 1", "save-steps = 3", "no table", "[run]"]),
        ("[run]\nsave-steps = 3\nsave_steps = 4\n", ["line 3", "save_steps = 4", "delete one"]),
        ("[local]\ncpu_slots = '4'\n", ["line 2", "[local]", 'cpu_slots = "4"', "whole number"]),
        ("[local]\ncpu_slots = true\n", ["cpu_slots = true", "whole number"]),
        ("[local]\ngpu_slots = -1\n", ["gpu_slots = -1"]),
        ("[local]\ncpu_slot = 1\n", ["cpu_slot = 1", "did you mean cpu-slots?"]),
        ("[local.deeper]\nx = 1\n", ["line 1", "[local.deeper]"]),
        ("[pvc]\nmy.claim = '/x'\n", ["[pvc.my]", "write its settings below [pvc]"]),
        ("[pvc]\ndata = 3\n", ["line 2", "data = 3", "folder"]),
        ("[pvc]\ndata = ' '\n", ["data = "]),
        ("[pvc]\ndata = '/a,b'\n", ["comma"]),
        ("[pvc]\n'a=b' = '/x'\n", ["name of a claim"]),
        ("[run]\nx = '\x1b[2J'\n", ["not valid TOML"]),
    ],
)
def test_what_cannot_be_meant_is_named_with_its_place(text: str, words: list[str], tmp_path: Path) -> None:
    name = "config/safepoint/config.toml" if text.startswith("[local") else "safepoint.toml"
    path = write(tmp_path, text, name)
    with pytest.raises(UsageError) as caught:
        load(tmp_path)
    for word in [str(path), "nothing was done", *words]:
        assert word in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(("name", "prefix"), [("safepoint.toml", ""), ("pyproject.toml", "tool.safepoint.")])
def test_slots_are_the_machines_and_no_projects(tmp_path: Path, name: str, prefix: str) -> None:
    """Supervisors that are started in different folders would count differently."""
    write(tmp_path, f"[{prefix}local]\ncpu-slots = 4\n", name)
    with pytest.raises(UsageError, match=r"a setting of the machine.*move it to .*config.toml") as caught:
        load(tmp_path)
    assert "line 1: [local]" in str(caught.value)


def test_the_users_own_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the project's say, if they can be read at all."""
    write(tmp_path, "[local]\ncpu-slots = 4\n")
    write(tmp_path, "[local]\ncpu-slots = 3\n", "config/safepoint/config.toml")
    monkeypatch.chdir(tmp_path)
    assert Configuration.of_user({"XDG_CONFIG_HOME": str(tmp_path / "config")}).local.cpu_slots == 3


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """A folder, a pipe, another encoding, too much: never a hang, never a traceback."""
    path = tmp_path / "safepoint.toml"
    path.mkdir()
    with pytest.raises(UsageError, match=r"is not a file|Is a directory"):
        load(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(UsageError, match="not a file"):
        load(tmp_path)
    path.unlink()
    path.write_bytes(b"[run]\n\nkeep = '\xff'\n")
    with pytest.raises(UsageError, match="line 3 is not UTF-8"):
        load(tmp_path)
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="bytes"):
        load(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "safepoint.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path)


def test_a_home_that_may_not_be_entered_has_no_file(tmp_path: Path) -> None:
    """Pods run as users whose HOME is somebody else's; a file that is seen and may not be read is an error."""
    is_root = os.geteuid() == 0
    locked = write(tmp_path, "[run]\ngrace = 60\n", "config/safepoint/config.toml").parent
    shown = write(tmp_path, "[run]\ngrace = 60\n")
    os.chmod(locked, 0)
    if is_root:
        # Each folder above is looked at: another pytest may have closed pytest's common one meanwhile.
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o001:
                os.chmod(folder, 0o711)
        os.seteuid(65534)
    try:
        assert load(tmp_path).settings("run")["grace"].file == str(shown)
        if is_root:
            os.seteuid(0)
        os.chmod(shown, 0)
        if is_root:
            os.seteuid(65534)
        with pytest.raises(UsageError, match="Permission denied"):
            load(tmp_path)
    finally:
        if is_root:
            os.seteuid(0)
        os.chmod(locked, 0o700)


def test_another_tools_broken_pyproject_is_its_own_business(tmp_path: Path) -> None:
    write(tmp_path, "[tool.other\n", "pyproject.toml")
    assert load(tmp_path) == Configuration()
    write(tmp_path, "[project]\nname = 'safepoint'\n", "pyproject.toml")
    assert load(tmp_path) == Configuration()
    write(tmp_path, "[tool]\nsafepoint = 3\n", "pyproject.toml")
    with pytest.raises(UsageError, match=r"tool\.safepoint is not a table"):
        load(tmp_path)
