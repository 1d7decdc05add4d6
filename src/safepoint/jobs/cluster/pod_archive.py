"""The modules of Safepoint that a pod needs, in one file: `python safepoint.pyz run …`.

The config map of each job contains this file, so container images need no Safepoint. The file is a zip. Python can
run this zip, and import modules from it. The same sources give the same bytes.
"""

import functools
import hashlib
import io
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from safepoint._version import __version__

NAME = "safepoint.pyz"
_CONTROL_SIDE = frozenset(
    {
        # A pod uses only `answers/versions.py`, for the answers about checkpoints.
        "safepoint/answers/consequence.py",
        "safepoint/answers/costs.py",
        "safepoint/answers/details.py",
        "safepoint/answers/freezing.py",
        "safepoint/answers/job_documents.py",
        "safepoint/answers/process_images.py",
        "safepoint/answers/receipts.py",
        "safepoint/answers/situation.py",
        "safepoint/cli/cluster_options.py",
        "safepoint/cli/commands/dashboard.py",
        "safepoint/cli/commands/doctor.py",
        "safepoint/cli/commands/images",
        "safepoint/cli/commands/jobs.py",
        "safepoint/cli/commands/pack.py",
        "safepoint/cli/commands/plan",
        "safepoint/cli/commands/submit.py",
        "safepoint/cli/commands/watch.py",
        "safepoint/cli/job_answers.py",
        "safepoint/cli/on_cluster.py",
        "safepoint/dashboard",
        "safepoint/doctor",
        "safepoint/foundation/events/image_events.py",
        "safepoint/foundation/shared_folders/secret_keys.py",
        "safepoint/jobs",
        "safepoint/notebook",
        "safepoint/planning",
        "safepoint/presentation",
        "safepoint/sdk",
        "safepoint/testing",
        "safepoint/transparent",
    }
)
"""The packages and modules that a pod does not import."""
_FOR_IMAGES = frozenset(
    {
        "safepoint/foundation/events/image_events.py",
        "safepoint/foundation/shared_folders/secret_keys.py",
        "safepoint/jobs/__init__.py",
        "safepoint/jobs/local/__init__.py",
        "safepoint/jobs/local/attempt/__init__.py",
        "safepoint/jobs/local/attempt/node.py",
        "safepoint/jobs/local/attempt/thaw_watch.py",
        "safepoint/jobs/local/images/__init__.py",
        "safepoint/jobs/local/images/image_request.py",
        "safepoint/jobs/local/images/last_resort.py",
        "safepoint/jobs/local/images/output_copy.py",
        "safepoint/jobs/local/images/watched_run.py",
        "safepoint/jobs/local/newest_state.py",
        "safepoint/transparent",
    }
)
"""The packages and modules of `_CONTROL_SIDE` with which a pod makes and restores process images."""
_FOR_IMAGE_COMMANDS = frozenset(
    {
        "safepoint/cli/commands/images/__init__.py",
        "safepoint/cli/commands/images/common.py",
        "safepoint/cli/commands/images/images.py",
        "safepoint/foundation/events/image_events.py",
        "safepoint/foundation/shared_folders/secret_keys.py",
        "safepoint/transparent",
    }
)
"""The packages and modules of `_CONTROL_SIDE` with which a pod runs `safepoint images list`, `show` and `verify`."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_COMMENT = re.compile(rb"^[ \t]*#.*$", re.MULTILINE)
_DOCSTRING = re.compile(rb'^([ \t]*)"""(?=\S)(?:[^"\\]|\\.|"(?!""))*"""[ \t]*$', re.MULTILINE | re.DOTALL)
# `safepoint run` starts further Python processes. PYTHONPATH lets them import Safepoint from the same file.
_MAIN = """\
import os
import sys

archive = os.path.abspath(sys.path[0])


def new_folder(kind):
    import tempfile

    from safepoint.errors import SafepointError
    from safepoint.foundation.environment import temporary_folder

    try:
        return tempfile.mkdtemp(prefix=f"safepoint_{kind}_", dir=temporary_folder())
    except SafepointError as error:
        print(f"safepoint: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


code = os.environ.pop("SAFEPOINT_CODE", "")
if code:
    import zipfile

    digest = os.environ.pop("SAFEPOINT_CODE_DIGEST", "")
    if digest:
        import io

        from safepoint.checkpoint.remote.code import read_code
        from safepoint.errors import SafepointError

        try:
            code = io.BytesIO(read_code(code, digest))
        except SafepointError as error:
            print(f"safepoint: error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
    folder = new_folder("code")
    with zipfile.ZipFile(code) as files:
        files.extractall(folder)
    os.chdir(folder)
folders = []
packages = os.environ.pop("SAFEPOINT_PACKAGES", "")
if packages:
    import json
    import subprocess

    folder = new_folder("packages")
    install = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--target", folder, *json.loads(packages)]
    if subprocess.run(install, check=False).returncode != 0:
        sys.exit("safepoint: the packages of the job could not be installed; nothing was trained")
    folders.append(folder)
sys.path[0] = archive
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (archive, os.environ.get("PYTHONPATH"), *folders)))

if os.environ.pop("SAFEPOINT_HELPER", ""):
    from safepoint.cli.claims.pod_side import main
else:
    from safepoint.cli.main import main

main()
"""


# Every command that a pod runs contains this program, and the digest of the files in the config map. The program
# reads each of these files once, compares the contents with the digest, and writes them into a private folder. All
# later processes of the pod use only this folder. So a person who may only replace the config map cannot make the
# pods run other code. Some arguments and variables name a file of the config map: the script, the zip of the code,
# the certificates. They are changed to the path of the copy.
#
# The name of the folder does not begin with `safepoint-`, because a launcher removes folders with such names if they
# contain a lock.
_CHECK = """\
import atexit
import hashlib
import os
import runpy
import shutil
import sys
import tempfile

place, expected = sys.argv[1:3]
digest = hashlib.sha256()
contents = {}
for name in sorted(os.listdir(place)):
    if not name.startswith(".."):  # names of the kubelet
        with open(os.path.join(place, name), "rb") as file:
            data = contents[name] = file.read()
        digest.update(f"{name} {len(data)} ".encode() + data)
if digest.hexdigest() != expected:
    sys.exit(f"safepoint: error: the config map at {place} has changed since the job was submitted; nothing was run")
try:
    copy = tempfile.mkdtemp(prefix="safepoint_program_")
    for name, data in contents.items():
        with open(os.path.join(copy, name), "xb") as file:
            file.write(data)
except OSError as error:
    print(
        f"safepoint: error: no folder for temporary files can be written: {error.strerror or error}; nothing was "
        "started \\N{EM DASH} in a pod, mount an emptyDir at /tmp",
        file=sys.stderr,
    )
    sys.exit(13)
process = os.getpid()
atexit.register(lambda: os.getpid() == process and shutil.rmtree(copy, ignore_errors=True))
copies = {place: copy, **{os.path.join(place, name): os.path.join(copy, name) for name in contents}}
sys.argv[3:] = [copies.get(text, text) for text in sys.argv[3:]]
for name, text in list(os.environ.items()):
    parts = text.split(os.pathsep)
    if not copies.keys().isdisjoint(parts):
        os.environ[name] = os.pathsep.join(copies.get(part, part) for part in parts)
archive = os.path.join(copy, "safepoint.pyz")
"""
_RUN = """\
sys.argv[:] = [archive, *sys.argv[3:]]
runpy.run_path(archive, run_name="__main__")
"""
_RUN_MODULE = """\
sys.path.insert(0, archive)
sys.argv[:] = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_PYTHON = ("python3", "-P", "-c")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def command_of(place: str, files: Mapping[str, bytes]) -> list[str]:
    """The command of a pod that runs `safepoint`. The caller appends the arguments.

    The pod first copies the files, and compares the copies with the digest in the command. An argument or a variable
    whose value is the path of one of the files becomes the path of its copy.

    Args:
        place: the folder where the files are mounted.
        files: all files in that folder, by name; one of them is the archive.
    """
    return [*_PYTHON, _CHECK + _RUN, place, digest_of_files(files)]


def module_command(command: Sequence[Any], module: str, *arguments: str) -> list[str] | None:
    """The command that runs a module of Safepoint in a pod, with the same check as the pod's own command.

    Args:
        command: the pod's own command, see `command_of`.
        module: the name of the module.
        arguments: its arguments.

    Returns:
        The command; None if `command` has no digest. Commands of earlier releases have no digest.
    """
    digest = digest_in(command)
    return None if digest is None else [*_PYTHON, _CHECK + _RUN_MODULE, command[4], digest, module, *arguments]


def digest_in(command: Sequence[Any]) -> str | None:
    """The digest in the command of a pod, see `command_of`; None if the command has no digest."""
    place, digest = command[4:6] if len(command) >= 6 else (None, None)
    is_valid = isinstance(place, str) and isinstance(digest, str) and _DIGEST.fullmatch(digest)
    return digest if is_valid else None


def digest_of_files(files: Mapping[str, bytes]) -> str:
    """The SHA-256 over the names and contents of files."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


@functools.cache  # cached, because this takes 60 ms, most of the processor time of a submit
def build_archive(*, with_images: bool = False, with_image_commands: bool = False) -> bytes:
    """The archive of this release, made once in a process.

    Args:
        with_images: also the modules with which a pod makes and restores process images.
        with_image_commands: also the modules of the commands that list, show and check process images.
    """
    more = (_FOR_IMAGES if with_images else frozenset[str]()) | (
        _FOR_IMAGE_COMMANDS if with_image_commands else frozenset[str]()
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for name, data in _modules(resources.files("safepoint"), "safepoint", more):
            _add(archive, name, data)
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    """The version of Safepoint and the first 12 hexadecimal digits of the SHA-256 of `data`."""
    return f"{__version__}-{hashlib.sha256(data).hexdigest()[:12]}"


def _modules(
    folder: Traversable, name: str, more: Collection[str], *, is_left_out: bool = False
) -> Iterator[tuple[str, bytes]]:
    """The modules in a folder, without those of the control side that are not in `more`."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        path = f"{name}/{item.name}"
        is_absent = (is_left_out or path in _CONTROL_SIDE) and path not in more
        if item.is_dir() and item.name != "__pycache__":
            yield from _modules(item, path, more, is_left_out=is_absent)
        elif item.name.endswith(".py") and not is_absent:
            yield path, _without_comments(path, item.read_bytes())


def _without_comments(path: str, source: bytes) -> bytes:
    """The source without comments and docstrings. It has about two thirds of the size of the full source. Tracebacks
    still show the right line numbers.

    Regular expressions are ten times as fast as a parser. A test parses all modules, and compares the results.
    """
    bare = _COMMENT.sub(b"", source)
    # The modules in `safepoint/cli` keep their docstrings, because Typer makes the help of a command from its
    # docstring. In the other modules, a placeholder replaces each docstring: if a class had no docstring, `dataclass`
    # would make a docstring, which is slow.
    return bare if path.startswith("safepoint/cli/") else _DOCSTRING.sub(_placeholder, bare)


def _placeholder(docstring: re.Match[bytes]) -> bytes:
    return docstring[1] + b'"."' + b"\n" * docstring[0].count(b"\n")


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o644 << 16
    entry.create_system = 3  # Unix, also when another system makes the archive
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data, compresslevel=9)
