"""Red Hat's guides in an environment with nothing but Safepoint: their code runs when its imports are changed.

`make test-openshift-images` makes the environment, from Safepoint's own wheel. What this machine does not have is in
the environment of the processes (`tests/programs/guides/machine`), not in the guides' code.
"""

import difflib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from tests.docs.markdown import blocks
from tests.support import ceph_rgw
from tests.support.certificates import make_certificates
from tests.support.images import Image
from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server
from tests.support.tiny_model import save_tiny_model
from tests.support.tls_proxy import tls_in_front_of

_ENVIRONMENT = Image(name="guide")
_GUIDES = Path(__file__).parent.parent / "programs" / "guides"
_KUBEFLOW = re.compile(r"^from kubeflow\.trainer[.\w]* import ", re.MULTILINE)
_UNAVAILABLE = _ENVIRONMENT.unavailable() or ceph_rgw.unavailable()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.s3,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_UNAVAILABLE is not None, reason=f"Red Hat's guides are NOT tested: {_UNAVAILABLE}"),
]

# Of each program: its guide, the blocks of it, the ranks, the steps, and the steps of checkpoints that may be left at
# the end, beside that of the interruption.
_PROGRAMS = {
    "the article, on a claim": ("article", (0, 1, 2), 2, 240, [240, 220]),
    "the article, in a bucket": ("article", (0, 1, 3), 2, 240, [*range(20, 241, 20)]),
    "chapter 6, on a claim": ("chapter_6", (0,), 4, 160, [160]),
    "chapter 6, in a bucket": ("chapter_6", (1,), 4, 160, [160]),
    "chapter 6, with periodic checkpoints": ("chapter_6", (2,), 4, 160, [50, 100, 150, 160]),
}


def test_the_environment_has_nothing_else(tmp_path: Path) -> None:
    """What `pip install safepoint[sdk,trl]` brings; Safepoint is that of this source, and not from its folder."""
    found = _ENVIRONMENT.distributions("safepoint[sdk,trl]")
    assert [package for package, release in found.items() if not release] == []
    pack = ("-m", "safepoint.cli.main", "pack", "--json", "-o", str(tmp_path / "safepoint.pyz"))
    ours, theirs = (
        json.loads(subprocess.run([python, *words, *pack], capture_output=True, check=True).stdout)["digest"]
        for python, words in ((sys.executable, ("-P",)), (_ENVIRONMENT.python, ("-I",)))
    )
    assert ours == theirs, "the environment is older than the source: `make test-openshift-images` makes it"


@pytest.fixture(scope="module")
def ingredients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and 640 rows of text."""
    folder = tmp_path_factory.mktemp("ingredients")
    texts = [f"line {number}: {number**3}" for number in range(640)]
    save_tiny_model(folder / "model", texts)
    Dataset.from_dict({"text": texts}).save_to_disk(folder / "data")
    return folder


@pytest.fixture
def reader(tmp_path: Path, ingredients: Path, rgw: S3Server) -> Iterator[dict[str, str]]:
    """The environment of a new user, whose connections lead to a server with a certificate of its own authority."""
    make_certificates(tmp_path)
    with tls_in_front_of(rgw.port, host="127.0.0.1", certificates=tmp_path) as endpoint:
        connections = tmp_path / "home" / ".config" / "safepoint" / "connections.toml"
        connections.parent.mkdir(parents=True)
        connections.touch(mode=0o600)
        keys = {
            "AWS_ACCESS_KEY_ID": rgw.keys[0],
            "AWS_SECRET_ACCESS_KEY": rgw.keys[1],
            "AWS_S3_ENDPOINT": endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        lines = [f'{name} = "{text}"' for name, text in keys.items()]
        names = ("s3-storage-connection", "my-s3-checkpoint-storage")
        connections.write_text("\n".join(line for name in names for line in (f"[{name}]", *lines)))
        yield {
            "PATH": f"{_ENVIRONMENT.python.parent}:/usr/bin:/bin",
            "HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SAFEPOINT_GRACE": f"{30 * PATIENCE:g}",
            "AWS_CA_BUNDLE": str(tmp_path / "ca.pem"),
            "PYTHONPATH": str(_GUIDES / "machine"),
            "MODEL_LOCAL_PATH": str(ingredients / "model"),
            "DATASET_LOCAL_PATH": str(ingredients / "data"),
            "OUTPUT_DIR": "output",
        }


def _changed(theirs: str, ours: str) -> list[str]:
    """The lines that differ, with their signs."""
    lines = list(difflib.unified_diff(theirs.splitlines(), ours.splitlines(), "guide", "run", lineterm="", n=0))
    print("\n".join(lines))
    return [line for line in lines[2:] if not line.startswith("@@")]


def _run(folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """What `submit.py` has seen."""
    command = [_ENVIRONMENT.python, "submit.py"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", _PROGRAMS)
def test_another_import_is_enough(program: str, reader: dict[str, str], rgw: S3Server, tmp_path: Path) -> None:
    """Submitted, paused, resumed and completed."""
    guide, chosen, num_ranks, num_steps, steps = _PROGRAMS[program]
    found = blocks(_GUIDES / f"{guide}.md")
    theirs = "\n".join(found[number].text for number in chosen)
    ours = _KUBEFLOW.sub("from safepoint import ", theirs)
    for line in (changed := _changed(theirs, ours)):
        assert re.match(r"[-+]from (kubeflow\.trainer[.\w]*|safepoint) import \w+(, \w+)*$", line)
    assert changed
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / "guide.py").write_text(ours)
    for name in ("submit.py", "training.py"):
        shutil.copy(_GUIDES / name, folder)
    where = re.findall(r'output_dir="(.*)"', theirs)[0]
    if where.startswith("s3://"):
        location = parse_location(where)
        rgw.make_bucket(location.bucket)
        store = open_store(location, StorageOptions.from_environment(rgw.variables))
        for item in list(store.list()):  # of another program of the guide, in the same place
            store.delete(item.key)
    if "verify_cloud_storage_ssl=False" in theirs:
        del reader["AWS_CA_BUNDLE"]
    seen = _run(folder, reader)
    assert seen["status"] == ["Suspended", "Complete"]
    assert seen["is_resumed"]
    assert (seen["world_size"], seen["steps"]) == (num_ranks, [num_steps, num_steps])
    names = [Path(path).name for path in seen["checkpoints"]]
    assert names[0] == f"checkpoint-{num_steps}"
    assert ("final" in names) == where.startswith("s3://")
    # Steps are short here: a save or an upload that waits is replaced by the next one.
    assert {*names} - {"final"} <= {f"checkpoint-{step}" for step in (*steps, seen["saved_step"])}
