"""Someone who may delete and create config maps changes a pod's program after the pod has compared it.

The person first creates the config map with the same content, but so that it can be changed. The pod compares it and
starts. Then the person changes it, and the kubelet brings the change into the running pod.
"""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.jobs.cluster.manifests import SHIPPED_TO, Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.pod_archive import NAME, module_command
from safepoint.jobs.cluster.spec import ClusterSpec
from tests.support.cluster.workspace import runtime
from tests.support.patience import PATIENCE

PROGRAM = b"""
import json, os, signal, sys, time

state = os.environ["STATE"]
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"{state}/seen-{restart}", "w") as file:
    json.dump({"environ": dict(os.environ), "path": sys.path, "argv": sys.argv, "file": __file__}, file)
if restart == "0":
    import safepoint.training.engine  # so that the archive is in use
    while not os.path.exists(f"{state}/swapped"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
import needed_later
with open(os.environ["AWS_CA_BUNDLE"]) as file:
    print("certificates:", file.read())
"""
FILES = {"train.py": PROGRAM, "needed_later.py": b"print('the submitted module')", "ca-bundle.pem": b"submitted"}


class Volume:
    """A config map as the kubelet mounts it: it replaces all files at once, through a link."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def hold(self, files: Mapping[str, bytes]) -> None:
        version = self.folder / f"..{time.time_ns()}"
        version.mkdir()
        for name, data in files.items():
            (version / name).write_bytes(data)
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self.folder / "..data")
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


def made(**changes: Any) -> Manifests:
    fields: dict[str, Any] = {"name": "a", "program": ("train.py",), "files": FILES, "max_restarts": 1}
    fields |= {"env": {"AWS_CA_BUNDLE": f"{SHIPPED_TO}/ca-bundle.pem"}, **changes}
    return manifests_for(ClusterSpec(**fields), Runtime(document=runtime()))


def content(manifests: Manifests) -> dict[str, bytes]:
    config_map = dict(manifests.before)["configmaps"]
    return {name: base64.b64decode(text) for name, text in config_map["binaryData"].items()}


def evil(mark: Path, before: Mapping[str, bytes]) -> dict[str, bytes]:
    """Each file of the config map, and what Python could import beside it, so that it writes `mark`."""
    code = f"open({os.fspath(mark)!r}, 'a').write(__name__)\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(before[NAME])) as old, zipfile.ZipFile(packed, "w") as new:
        for name in old.namelist():
            new.writestr(name, code + old.read(name) if b"from __future__" not in old.read(name) else old.read(name))
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as new:
        new.writestr("main.py", code)
    other = {name: zipped.getvalue() if name.endswith(".zip") else code for name in before}
    return {**other, "json.py": code, "sitecustomize.py": code, NAME: packed.getvalue()}


def start(manifests: Manifests, volume: Volume, folder: Path) -> "subprocess.Popen[str]":
    """The pod's own command, with the volume in another place."""
    place = os.fspath(volume.folder)
    trainer = manifests.trainjob["spec"]["trainer"]
    texts = {one["name"]: one["value"].replace(SHIPPED_TO, place) for one in trainer["env"] if "value" in one}
    (folder / "tmp").mkdir()
    env = {**os.environ, **texts, "STATE": str(folder), "TMPDIR": str(folder / "tmp"), "SAFEPOINT_OUTPUT_DIR": ""}
    env.pop("PYTHONPATH", None)
    command = [sys.executable, *(text.replace(SHIPPED_TO, place) for text in trainer["command"][1:])]
    return subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until_exists(path: Path, process: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + 60 * PATIENCE
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def ended(process: "subprocess.Popen[str]") -> str:
    try:
        return process.communicate(timeout=60 * PATIENCE)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise


@pytest.mark.timeout(240)
@pytest.mark.parametrize("has_code", [False, True])
def test_a_restart_runs_what_was_compared(has_code: bool, tmp_path: Path) -> None:
    """The launcher, the ranks, what they import later, and the files that variables name."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("train.py", "needed_later.py"):
            archive.writestr(name, FILES[name])
    files = {"ca-bundle.pem": FILES["ca-bundle.pem"]} if has_code else FILES
    manifests = made(files=files, code=packed.getvalue() if has_code else None)
    volume = Volume(tmp_path / "mount")
    volume.hold(content(manifests))
    pod = start(manifests, volume, tmp_path)
    until_exists(tmp_path / "seen-0", pod)
    volume.hold(evil(tmp_path / "evil", content(manifests)))
    (tmp_path / "swapped").touch()
    said = ended(pod)
    assert pod.returncode == 0, said
    assert not (tmp_path / "evil").exists(), said
    assert "the submitted module" in said
    assert "certificates: submitted" in said
    for restart in (0, 1):  # nothing that a process could use later names the volume
        assert str(volume.folder) not in json.dumps(json.loads((tmp_path / f"seen-{restart}").read_text()))


def test_what_a_suspension_starts_in_the_pod(tmp_path: Path) -> None:
    """It imports modules while it waits for the save."""
    manifests = made()
    volume = Volume(tmp_path / "mount")
    volume.hold(content(manifests))
    given = manifests.trainjob["spec"]["trainer"]["command"]
    command = module_command(given, "safepoint.training.launcher.save_request", "1")
    assert command is not None
    text = command[3].replace("runpy.run_module", "os.environ['SWAP'] and swap(); runpy.run_module")
    # What is between the comparison and the first import is the moment of the change.
    swap = f"import time\ndef swap():\n    open({str(tmp_path / 'seen')!r}, 'w').close()\n"
    swap += f"    while not os.path.exists({str(tmp_path / 'swapped')!r}):\n        time.sleep(0.05)\n"
    words = [sys.executable, "-P", "-c", swap + text, str(volume.folder), *command[5:]]
    env = {**os.environ, "SWAP": "1", "TMPDIR": str(tmp_path)}
    env.pop("PYTHONPATH", None)
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until_exists(tmp_path / "seen", process)
    volume.hold(evil(tmp_path / "evil", content(manifests)))
    (tmp_path / "swapped").touch()
    said = ended(process)
    assert "no process of `safepoint run`" in said
    assert not (tmp_path / "evil").exists()
    assert not list(tmp_path.glob("safepoint_program_*"))


def test_the_copy_is_private_and_holds_what_was_compared(tmp_path: Path) -> None:
    """A change between the comparison and the copy would not be seen: the bytes that were compared are written."""
    manifests = made(program=("show.py",), files={"show.py": b"x"})
    command = manifests.trainjob["spec"]["trainer"]["command"]
    volume = Volume(tmp_path / "mount")
    volume.hold(content(manifests))
    script = f"{volume.folder}/show.py"
    program = command[3].partition("archive = ")[0] + "print(copy, oct(os.stat(copy).st_mode))\n"
    program = program.replace("    copy = tempfile", f"    os.unlink({script!r})\n    copy = tempfile")
    program += "print(open(os.path.join(copy, 'show.py')).read(), sys.argv[3:], os.environ['A'])"
    env = {**os.environ, "TMPDIR": str(tmp_path), "A": f"/x:{script}:{volume.folder}"}
    words = [sys.executable, "-P", "-c", program, str(volume.folder), command[5], script, "show.py"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    folder, mode, *_ = done.stdout.split()
    assert mode == "0o40700"
    assert f"x ['{folder}/show.py', 'show.py'] /x:{folder}/show.py:{folder}" in done.stdout
    assert not Path(folder).exists()


def test_without_a_folder_for_temporary_files(tmp_path: Path) -> None:
    """One message, and nothing of the volume runs."""
    manifests = made()
    volume = Volume(tmp_path / "mount")
    volume.hold(content(manifests))
    command = manifests.trainjob["spec"]["trainer"]["command"]
    program = "import tempfile\ntempfile._candidate_tempdir_list = lambda: []\n" + command[3]
    words = [sys.executable, "-P", "-c", program, str(volume.folder), command[5], "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (13, "")
    assert len(done.stderr.splitlines()) == 1
    assert "no folder for temporary files can be written" in done.stderr
    assert "mount an emptyDir at /tmp" in done.stderr
