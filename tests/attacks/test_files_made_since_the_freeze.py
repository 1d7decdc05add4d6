"""What frozen processes had in a shared folder was deleted since, and another user has made it, or its folder, again.

CRIU compares sizes and modes only. So the other user would decide what is in the memory of the restored process, or
would keep the files and sockets that CRIU makes in the folder.
"""

import os
import shutil
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from safepoint.errors import FreezeError, ImageError
from safepoint.transparent import planted
from safepoint.transparent.carried import carry, set_down
from safepoint.transparent.criu.records import open_paths, users_of
from safepoint.transparent.planted import refuse_planted_files, refuse_planted_paths
from tests.support.criu_images import message, varint

_STRANGER, _OWNER, _GROUP = 65533, 65532, 65531
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


def text(number: int, data: bytes) -> bytes:
    """A field with bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def opened(kind: int, number: int, *fields: bytes) -> bytes:
    """A record of CRIU for something that a process has open."""
    return record(message([(1, 1), (2, number)])[4:] + text(kind, message([(1, number)])[4:] + b"".join(fields)))


def regular(number: int, path: Path) -> bytes:
    return opened(3, number, text(6, bytes(path)))


def bound(address: bytes, folder: Path | None = None) -> bytes:
    """A Unix socket."""
    return opened(16, 50, text(11, address), text(14, bytes(folder)) if folder is not None else b"")


def watched(path: Path) -> bytes:
    """A watch of inotify."""
    return opened(13, 60, text(5, text(7, text(4, bytes(path)))))


def part(
    folder: Path,
    paths: Iterable[Path] = (),
    *,
    user: int = 0,
    deleted: Iterable[int] = (),
    others: Iterable[bytes] = (),
) -> Path:
    """The files of CRIU for a process that has these paths open."""
    folder.mkdir()
    files = [*(regular(number, path) for number, path in enumerate(paths, 1)), *others]
    (folder / "files.img").write_bytes(bytes(8) + b"".join(files))
    if deleted:
        (folder / "remap-fpath.img").write_bytes(bytes(8) + b"".join(message([(1, one), (2, 9)]) for one in deleted))
    # The real, the effective and the saved user and that of files; each with a group, which counts as no user.
    credentials = message((number, user if number % 2 else _GROUP) for number in range(1, 9))[4:]
    (folder / "core-7.img").write_bytes(bytes(8) + record(text(5, text(10, credentials))))
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def check(folder: Path) -> list[str]:
    return refuse_planted_files(folder, users_of(folder))


@pytest.mark.parametrize("inner", ["file", "folder/file"])
def test_a_file_of_another_user(inner: str, shared: Path, tmp_path: Path) -> None:
    """Also one in a folder of the other user. Files of this user and of the user of the process are used."""
    path = shared / inner
    path.parent.mkdir(exist_ok=True)
    path.touch()
    folder = part(tmp_path / "part", [path], user=_OWNER)
    assert users_of(folder) == {_OWNER}
    check(folder)
    os.chown(path, _OWNER, -1)
    check(folder)
    for other in (_STRANGER, _GROUP):
        os.chown(shared / Path(inner).parts[0], other, -1)
        with pytest.raises(
            FreezeError, match="was made by another user, and processes have it open; nothing was restored"
        ):
            check(folder)


def test_a_missing_file(shared: Path, tmp_path: Path) -> None:
    """Another user could make it before CRIU opens it."""
    paths = [shared / "missing", shared / "folder" / "missing"]
    for number, path in enumerate(paths):
        with pytest.raises(FreezeError, match="is missing, and other users could make it"):
            check(part(tmp_path / f"part-{number}", [path]))
    check(part(tmp_path / "elsewhere", [tmp_path / "missing"]))


@pytest.mark.parametrize("kind", ["deleted file", "socket", "relative socket", "watched folder"])
def test_the_folder_of_what_criu_makes(kind: str, shared: Path, tmp_path: Path) -> None:
    """The other user would keep the deleted file or the socket, and root would change modes of names there."""
    mine = shared / "mine"
    mine.mkdir()

    def made() -> Path:
        target = tmp_path / f"part-{len(list(tmp_path.iterdir()))}"
        if kind == "deleted file":
            return part(target, [mine / "file"], deleted=[1], user=_OWNER)
        address, folder = (b"socket", mine) if kind == "relative socket" else (bytes(mine / "socket"), None)
        other = watched(mine) if kind == "watched folder" else bound(address + b"\0", folder)
        return part(target, others=[other], user=_OWNER)

    for owner in (0, _OWNER):
        os.chown(mine, owner, -1)
        assert check(made()) == []
    os.chown(mine, _STRANGER, -1)
    with pytest.raises(FreezeError, match=r"made by another user.*nothing was restored"):
        check(made())


def test_a_missing_folder_of_what_criu_makes(shared: Path, tmp_path: Path) -> None:
    """It is made before another user can make it. In other folders, only the users who may write there could."""
    inner = shared / "outer" / "inner"
    missing = tmp_path / "missing"
    sockets = [bound(bytes(inner / "socket")), bound(b"\0/tmp/abstract"), bound(b"")]
    folder = part(tmp_path / "part", [inner / "a", missing / "b"], deleted=[1, 2], others=sockets, user=_OWNER)
    assert check(folder) == [str(inner.parent), str(inner)]
    assert (inner.stat().st_uid, inner.stat().st_mode & 0o777) == (_OWNER, 0o700)
    assert not missing.exists()
    assert check(folder) == []


def test_a_carried_folder_of_another_user(shared: Path, tmp_path: Path) -> None:
    """The launcher would read the records of its ranks there."""
    folder = shared / "safepoint-x"
    folder.mkdir()
    (folder / "file").touch()
    (tmp_path / "part").mkdir()
    carry([folder], tmp_path / "part")
    with set_down(tmp_path / "part") as restored:
        assert restored == []
    os.chown(folder, _STRANGER, -1)
    with pytest.raises(FreezeError, match="made by another user"), set_down(tmp_path / "part"):
        pass
    shutil.rmtree(folder)
    with set_down(tmp_path / "part") as restored:
        assert restored == [folder]


def test_a_carried_folder_below_one_of_another_user(shared: Path, tmp_path: Path) -> None:
    folder = shared / "mine" / "safepoint-x"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    (tmp_path / "part").mkdir()
    carry([folder], tmp_path / "part")
    shutil.rmtree(folder)
    os.chown(shared / "mine", _STRANGER, -1)
    with pytest.raises(FreezeError, match="made by another user"), set_down(tmp_path / "part"):
        pass
    assert list((shared / "mine").iterdir()) == []


_VARIABLES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR"),
    *("PYTHONPATH", "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH", "PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"),
    *("HF_MODULES_CACHE", "HOME", "TMPDIR", "TMP"),
)


@pytest.mark.parametrize("variable", _VARIABLES)
@pytest.mark.parametrize("name", ["code", "mine/code"])
def test_a_folder_for_code(
    variable: str, name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot it is missing. It is made before the processes run, and refused if it is another user's."""
    monkeypatch.setattr(planted, "user_of", lambda pid: _OWNER)
    cache = shared / name
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "environ").write_text(f"A=b\0{variable}=/usr/lib:{cache}\0MY_HOME=~\0")
    refuse_planted_paths([7], tmp_path / "proc")
    assert (cache.stat().st_uid, cache.stat().st_mode & 0o777) == (_OWNER, 0o700)
    refuse_planted_paths([7], tmp_path / "proc")
    os.chown(shared / Path(name).parts[0], _STRANGER, -1)
    with pytest.raises(FreezeError, match="a variable or an argument of the processes names it"):
        refuse_planted_paths([7], tmp_path / "proc")


_OTHERS = ("LD_AUDIT", "PYTHONUSERBASE", "VIRTUAL_ENV", "BASH_ENV", "NCCL_NET_PLUGIN", "SSL_CERT_FILE", "hf_home")


def named(tmp_path: Path, *variables: str, arguments: str = "") -> Path:
    """What the kernel says of a process with these variables and arguments."""
    process = tmp_path / "proc" / "7"
    process.mkdir(parents=True, exist_ok=True)
    (process / "environ").write_text("".join(f"{one}\0" for one in variables))
    (process / "cmdline").write_text(arguments)
    return process.parent


@pytest.mark.parametrize("variable", [*_OTHERS, ""])
@pytest.mark.parametrize("name", ["file", "mine/file"])
def test_other_variables_and_arguments(
    variable: str, name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries and programs that are loaded at the next start, and the script that a launcher starts again.

    If the folder of a file is missing, it is made. What the file itself would be is not known.
    """
    monkeypatch.setattr(planted, "user_of", lambda pid: _OWNER)
    path, top = shared / name, shared / Path(name).parts[0]
    if variable:
        proc = named(tmp_path, f"{variable}=1,{path}")
    else:
        proc = named(tmp_path, arguments=f"python\0-u\0{path}\0--data=/srv\0")
    refuse_planted_paths([7], proc)
    assert not path.exists()
    assert top.exists() == (name != "file")
    if top.exists():
        assert (top.stat().st_uid, top.stat().st_mode & 0o777) == (_OWNER, 0o700)
    path.touch()
    os.chown(path, _OWNER, -1)
    refuse_planted_paths([7], proc)
    os.chown(top, _STRANGER, -1)
    with pytest.raises(FreezeError, match="names it; nothing was restored"):
        refuse_planted_paths([7], proc)


def test_a_link_to_a_missing_folder(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a cache in the home folder that the user has moved to /tmp."""
    monkeypatch.setattr(planted, "user_of", lambda pid: _OWNER)
    (tmp_path / "cache").symlink_to(shared / "cache")
    refuse_planted_paths([7], named(tmp_path, f"TRITON_CACHE_DIR={tmp_path}/cache"))
    assert (shared / "cache").stat().st_uid == _OWNER


@pytest.mark.parametrize(("user", "is_accepted"), [(0, True), (_OWNER, False)])
def test_the_user_who_has_become_root(
    user: int, is_accepted: bool, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables name the sockets and files of this user, such as those of an agent and of a display."""
    monkeypatch.setattr(planted, "user_of", lambda pid: user)
    (shared / "agent").touch()
    os.chown(shared / "agent", _STRANGER, -1)
    proc = named(tmp_path, f"SUDO_UID={_STRANGER}", f"SSH_AUTH_SOCK={shared}/agent")
    if is_accepted:
        refuse_planted_paths([7], proc)
    else:
        with pytest.raises(FreezeError, match="was made by another user"):
            refuse_planted_paths([7], proc)
    for text in ("", "0", "-1", "\u0663", "x", "9" * 5000):
        with pytest.raises(FreezeError, match="was made by another user"):
            refuse_planted_paths([7], named(tmp_path, f"SUDO_UID={text}", f"SSH_AUTH_SOCK={shared}/agent"))


@pytest.mark.parametrize("data", [bytes(8) + b"\x05\0\0\0ab", bytes(8) + b"\x01\0\0", bytes(8) + record(b"\x1a\x7f")])
def test_malformed_files(data: bytes, tmp_path: Path) -> None:
    """Such as those of a forger whose image is restored with `--trust`."""
    (tmp_path / "files.img").write_bytes(data)
    with pytest.raises(ImageError, match="cannot be read"):
        open_paths(tmp_path)
    (tmp_path / "carried-0.img").write_bytes(b"x" * 2048)
    with pytest.raises((ImageError, tarfile.TarError)), set_down(tmp_path):
        pass


_SEVERAL = {
    "a list of libraries": "LD_PRELOAD=/usr/lib/a.so {path}",
    "the first of a list": "LD_PRELOAD={path} /usr/lib/a.so",
    "options": "XLA_FLAGS=--xla_gpu_cuda_data_dir={path} --xla_other=1",
    "options of a compiler": "NVCC_APPEND_FLAGS=-O2 -I{path} -L /usr/lib",
    "JSON": 'TF_CONFIG={{"a": 1, "dir": "{path}"}}',
    "quotes": "OPTIONS=--dir '{path}' --other",
    "lines": "OPTIONS=a\n{path}\nb",
    "a file of arguments": "ARGUMENTS=@{path}",
    "the first of two values": "TRITON_CACHE_DIR={path}\0TRITON_CACHE_DIR=/usr/lib",
}


@pytest.mark.parametrize("text", _SEVERAL.values(), ids=_SEVERAL)
@pytest.mark.parametrize("name", ["file", "mine/file"])
def test_values_with_several_paths(
    text: str, name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with options, quotes or brackets around a path. No other folder is made than that of the file."""
    monkeypatch.setattr(planted, "user_of", lambda pid: _OWNER)
    path, top = shared / name, shared / Path(name).parts[0]
    proc = named(tmp_path, text.format(path=path))
    refuse_planted_paths([7], proc)
    assert set(os.listdir(shared)) <= {Path(name).parts[0]}
    path.parent.mkdir(exist_ok=True)
    path.touch()
    refuse_planted_paths([7], proc)
    os.chown(top, _STRANGER, -1)
    with pytest.raises(FreezeError, match="names it; nothing was restored"):
        refuse_planted_paths([7], proc)


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [
        ("A=b", "python\0-P\0mine/train.py\0"),
        ("A=b", "python\0./mine/../mine/train.py\0"),
        ("A=b", "cc\0-I./mine\0"),
        ("A=b", "sh\0-c\0cd mine && exec python train.py\0"),
        ("PYTHONPATH=/usr/lib:mine", "python\0"),
    ],
)
def test_paths_that_start_at_the_current_folder(
    variable: str, arguments: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the script that a launcher in /tmp starts again."""
    monkeypatch.setattr(planted, "user_of", lambda pid: _OWNER)
    proc = named(tmp_path, variable, arguments=arguments)
    (proc / "7" / "cwd").symlink_to(shared)
    (shared / "mine").mkdir()
    (shared / "mine" / "train.py").touch()
    refuse_planted_paths([7], proc)
    os.chown(shared / "mine", _STRANGER, -1)
    with pytest.raises(FreezeError, match="names it; nothing was restored"):
        refuse_planted_paths([7], proc)


def test_arguments_that_are_too_long_for_a_name(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a text for a model, or code: no file can have this name, so another user cannot have made it."""
    monkeypatch.setattr(planted, "user_of", lambda pid: _OWNER)
    proc = named(tmp_path, f"TEXT_PATH={'x' * 300}", arguments=f"python\0-c\0{'x' * 300}\0{'x' * 5000}\0")
    (proc / "7" / "cwd").symlink_to(shared)
    refuse_planted_paths([7], proc)
    assert not os.listdir(shared)
