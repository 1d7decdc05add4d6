"""`safepoint checkpoints export` from and to object stores: the same model, nothing on a disk, complete or absent."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import UNFINISHED, Claim, RemoteFolder
from safepoint.checkpoint.tools import copy as copying
from safepoint.checkpoint.tools.atomic_export import MARK
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.errors import CheckpointError, ConflictError, StorageError
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store
from safepoint.testing.fault_proxy import Fault, FaultProxy, Kind, add_mixture
from tests.support.checkpoints import commit, prepared
from tests.support.disk import DiskWatch
from tests.support.memory import MEASURE
from tests.support.moto_server import MotoServer
from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server
from tests.unit.cli.commands.test_checkpoints import call

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Server = S3Server
_LONG = pytest.mark.long
_PIECES = "pytorch_model_fsdp_0"


@pytest.fixture
def reachable(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The variables with which commands reach the server."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def bucket(reachable: Server) -> str:
    """The URI of a new prefix."""
    return str(reachable.location(f"export/{uuid.uuid4().hex}"))


def store_at(text: str) -> Store:
    return open_store(parse_location(text))


def contents(text: str) -> dict[str, bytes]:
    store = store_at(text)
    return {item.key: bytes(store.read(item.key)) for item in store.list()}


def in_folder(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(num_mb: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    large = {f"layers.{number}.weight": torch.randn(1024, 1024) for number in range(num_mb // 4)}
    small = {"norm.weight": torch.randn(7), "embed.weight": torch.randn(300, 40).bfloat16(), "scale": torch.ones(())}
    return {**small, "odd": torch.randn(6, 4).t().contiguous(), **large}


def files_in_pieces(folder: Path, num_mb: int = 0) -> dict[str, bytes]:
    """The files of a checkpoint of FSDP."""
    dcp.save({"model": weights(num_mb)}, checkpoint_id=folder / _PIECES)
    return {
        **{f"{_PIECES}/{path.name}": path.read_bytes() for path in (folder / _PIECES).iterdir()},
        "config.json": b'{"model_type": "none"}',
        "tokenizer.json": b"{}",
        "optimizer_0/.metadata": b"not the model's",
    }


WHOLE = {
    "model-00001-of-00002.safetensors": os.urandom(20 << 20),
    "model-00002-of-00002.safetensors": os.urandom(100_000),
    "model.safetensors.index.json": b"{}",
    "config.json": b"{}",
    "optimizer.pt": b"training only",
}


@pytest.fixture(params=["whole", "pieces"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> OutputFolder:
    """An output folder with one checkpoint of step 10."""
    folder = prepared(tmp_path / "out")
    files = WHOLE if request.param == "whole" else files_in_pieces(tmp_path / "saved", num_mb=20)
    commit(folder, 10, {0: files})
    return folder


def uploaded(output: OutputFolder, where: str) -> str:
    """A copy of the checkpoint in an object store."""
    inventory, _ = open_inventory(str(output.root))
    copying.copy(inventory, inventory.item(), parse_location(where))
    return f"{where}/checkpoint-10"


@pytest.mark.parametrize("source", ["folder", "store"])
def test_the_model_is_the_same_wherever_it_goes(
    source: str, output: OutputFolder, bucket: str, tmp_path: Path
) -> None:
    """Each export equals the one from folder to folder, and has only the model."""
    checkpoint = str(output.root / "checkpoint-10")
    assert call("export", checkpoint, tmp_path / "reference")[0] == 0
    expected = in_folder(tmp_path / "reference")
    assert "config.json" in expected
    assert not any(name.startswith(("optimizer", _PIECES)) for name in expected)
    if source == "store":
        checkpoint = uploaded(output, f"{bucket}/run")
    code, text = call("export", checkpoint, f"{bucket}/model", "--json")
    assert code == 0, text
    assert json.loads(text)["files"] == sorted(expected)
    assert contents(f"{bucket}/model") == expected, "the model, and no mark"
    assert call("export", checkpoint, tmp_path / "model")[0] == 0
    assert in_folder(tmp_path / "model") == expected
    code, text = call("export", checkpoint, f"{bucket}/model")
    assert (code, "is not empty" in text) == (11, True)
    assert contents(f"{bucket}/model") == expected


def test_what_safepoint_has_not_written(bucket: str, tmp_path: Path) -> None:
    """A sharded checkpoint without a manifest is exported from a store and from a folder."""
    for name, data in files_in_pieces(tmp_path / "saved").items():
        (tmp_path / "foreign" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "foreign" / name).write_bytes(data)
        store_at(f"{bucket}/foreign").write(name, data)
        store_at(f"{bucket}/run/checkpoint-7").write(name, data)
    assert call("export", tmp_path / "foreign", tmp_path / "model")[0] == 0
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights().items())
    expected = in_folder(tmp_path / "model")
    for number, source in enumerate(
        (tmp_path / "foreign", f"{bucket}/foreign", f"{bucket}/foreign/{_PIECES}", f"{bucket}/run/checkpoint-7")
    ):
        code, text = call("export", source, f"{bucket}/{number}")
        assert code == 0, text
        assert contents(f"{bucket}/{number}").items() <= expected.items()
        assert "model.safetensors" in contents(f"{bucket}/{number}")


def test_what_is_being_uploaded_is_not_exported(bucket: str, tmp_path: Path) -> None:
    """A checkpoint that is being uploaded is refused: its files may be of two checkpoints."""
    for name, data in files_in_pieces(tmp_path / "saved").items():
        store_at(f"{bucket}/run/checkpoint-7").write(name, data)
    store_at(f"{bucket}/run").write(f"{UNFINISHED}/checkpoint-7", b"")
    assert call("export", f"{bucket}/run/checkpoint-7", f"{bucket}/model")[0] == 14
    assert contents(f"{bucket}/model") == {}


def test_what_is_being_uploaded_is_no_checkpoint_of_another_program(bucket: str) -> None:
    """`verify` says that the only checkpoint in the store is unfinished."""
    store_at(f"{bucket}/run").write("checkpoint-7/model.safetensors", b"a part")
    store_at(f"{bucket}/run").write(f"{UNFINISHED}/checkpoint-7", b"")
    code, text = call("verify", f"{bucket}/run")
    assert (code, text.endswith("/run, only 1 unfinished checkpoint")) == (14, True), text


@pytest.mark.parametrize("source", [pytest.param("folder", marks=_LONG), "store"])
def test_final_of_a_run_gets_its_manifest(source: str, output: OutputFolder, bucket: str) -> None:
    """An export to `final/` of a run has a manifest, as at the end of a training, and is written once."""
    checkpoint = str(output.root / "checkpoint-10") if source == "folder" else uploaded(output, f"{bucket}/run")
    code, text = call("export", checkpoint, f"{bucket}/run/final")
    assert code == 0, text
    assert call("verify", f"{bucket}/run/final", "--deep")[0] == 0
    manifest = RemoteFolder(store_at(f"{bucket}/run")).manifest_of("final")
    assert (manifest.step, manifest.trigger) == (10, Trigger.FINAL)
    assert not list(store_at(f"{bucket}/run").list(UNFINISHED))
    code, text = call("export", checkpoint, f"{bucket}/run/final")
    assert (code, "is not empty" in text) == (11, True)
    assert call("export", f"{bucket}/run/final", f"{bucket}/again")[0] == 0
    assert contents(f"{bucket}/again").keys() == contents(f"{bucket}/run/final").keys() - {MANIFEST_NAME}


@pytest.mark.parametrize("target", ["model", pytest.param("run/final", marks=_LONG)])
@pytest.mark.parametrize("where", [pytest.param("folder", marks=_LONG), "store"])
def test_one_flipped_bit_means_no_model(where: str, target: str, output: OutputFolder, bucket: str) -> None:
    """A flipped bit ends the export, and nothing is left; then a valid checkpoint is exported to the same place."""
    checkpoint = str(output.root / "checkpoint-10")
    stored = uploaded(output, f"{bucket}/run")
    large = max((output.root / "checkpoint-10").rglob("*"), key=lambda path: path.stat().st_size)
    key = str(large.relative_to(output.root / "checkpoint-10"))
    data = bytearray(large.read_bytes())
    data[len(data) // 2] ^= 1
    if where == "folder":
        large.write_bytes(data)
    else:
        checkpoint, stored = stored, checkpoint
        store_at(checkpoint).write(key, bytes(data))
    code, text = call("export", checkpoint, f"{bucket}/{target}")
    assert code == 14, text
    assert contents(f"{bucket}/{target}") == {}
    assert store_at(bucket).sweep() == 0
    assert call("export", stored, f"{bucket}/{target}")[0] == 0


def test_a_checkpoint_that_changes_while_it_is_read(bucket: str, output: OutputFolder, monkeypatch) -> None:
    """A run deletes or rewrites the checkpoint meanwhile: the model is never a mix of two checkpoints."""
    if not (output.root / "checkpoint-10" / _PIECES).is_dir():
        pytest.skip("the digest of each whole file is checked while it passes")
    checkpoint = uploaded(output, f"{bucket}/run")
    begin = RemoteFolder.fence

    def fence(*args, **kwargs) -> None:
        begin(*args, **kwargs)
        store = store_at(checkpoint)
        store.write(f"{_PIECES}/.metadata", bytes(store.read(f"{_PIECES}/.metadata")) + b" ")

    monkeypatch.setattr(RemoteFolder, "fence", fence)
    code, text = call("export", checkpoint, f"{bucket}/run/final")
    assert (code, "has changed while it was read" in text) == (14, True), text
    assert contents(f"{bucket}/run/final") == {}


# ---- killed -----------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(reachable: Server) -> Iterator[tuple[FaultProxy, dict[str, str]]]:
    """A connection to the server that takes a second for each 8 MB."""
    with FaultProxy(f"127.0.0.1:{reachable.port}", bytes_per_s=8e6) as proxy:
        yield proxy, {**os.environ, **reachable.variables, "AWS_ENDPOINT_URL_S3": proxy.endpoint}


def begin_export(source: str, target: str, variables: dict[str, str]) -> "subprocess.Popen[str]":
    # A shell may ignore SIGINT for processes in the background, and a program inherits that.
    heard = ["env", "--default-signal=INT"]
    command = [*heard, sys.executable, "-m", "safepoint.cli.main", "checkpoints", "export", source, target]
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60 * PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("target", ["model", pytest.param("run/final", marks=_LONG)])
def test_killed_in_the_middle(
    target: str, output: OutputFolder, slow: tuple[FaultProxy, dict[str, str]], bucket: str
) -> None:
    """The model of a killed export is absent for readers; the next export deletes it and is complete."""
    proxy, variables = slow
    checkpoint = str(output.root / "checkpoint-10")
    killed = begin_export(checkpoint, f"{bucket}/{target}", variables)
    wait_for(lambda: proxy.requests["PUT"] >= 3)  # the mark, and parts
    killed.kill()
    killed.communicate()
    found = contents(f"{bucket}/{target}")
    assert "config.json" not in found
    assert MANIFEST_NAME not in found
    store = store_at(bucket)
    marks = [
        item.key for item in store.list() if "/.safepoint/" in item.key and item.key.startswith(("run", "model"))
    ]
    assert marks == [f"{target}/{MARK}" if target == "model" else f"run/{UNFINISHED}/final"]
    assert call("export", checkpoint, f"{bucket}/{target}")[0] == 0
    assert {"config.json"} < contents(f"{bucket}/{target}").keys()
    assert not [item.key for item in store.list() if "/.safepoint/" in item.key]
    assert store.sweep() == 0


@pytest.mark.parametrize("target", ["model", pytest.param("run/final", marks=_LONG)])
def test_repair_takes_away_what_a_killed_export_has_left(
    target: str, slow: tuple[FaultProxy, dict[str, str]], bucket: str, tmp_path: Path
) -> None:
    """`repair` deletes what a killed export has left, if it is old enough."""
    proxy, variables = slow
    output = prepared(tmp_path / "out")
    commit(output, 10, {0: WHOLE})
    killed = begin_export(str(output.root / "checkpoint-10"), f"{bucket}/{target}", variables)
    wait_for(lambda: proxy.requests["PUT"] >= 3)
    killed.kill()
    killed.communicate()
    place = f"{bucket}/model" if target == "model" else f"{bucket}/run"
    store_at(place).write("notes.txt", b"somebody's")
    assert call("repair", place)[0] == 0
    assert len(contents(place)) > 1
    assert call("repair", place, "--idle", "0", "--dry-run")[0] == 0
    assert len(contents(place)) > 1
    assert call("repair", place, "--idle", "0")[0] == 0
    assert contents(place) == {"notes.txt": b"somebody's"}
    assert store_at(bucket).sweep() == 0


def test_interrupted_by_a_person(slow: tuple[FaultProxy, dict[str, str]], bucket: str, tmp_path: Path) -> None:
    """Ctrl-C deletes what was written."""
    proxy, variables = slow
    output = prepared(tmp_path / "out")
    commit(output, 10, {0: WHOLE})
    proxy.add(Fault(kind=Kind.STALL, method="PUT", contains="/model-00002", seconds=5))
    export = begin_export(str(output.root / "checkpoint-10"), f"{bucket}/model", variables)
    wait_for(lambda: proxy.injected[Kind.STALL])
    export.send_signal(signal.SIGINT)
    proxy.clear()
    proxy.up._bytes_per_s = None
    _, said = export.communicate(timeout=60 * PATIENCE)
    assert export.returncode == 130, said
    assert contents(f"{bucket}/model") == {}
    assert store_at(bucket).sweep() == 0


def test_of_two_exports_to_one_place_the_later_one_counts(bucket: str, tmp_path: Path) -> None:
    """The first export stops before its next file, and deletes nothing of the second one."""
    first, second = prepared(tmp_path / "first"), prepared(tmp_path / "second")
    commit(first, 10, {0: WHOLE})
    other = {**WHOLE, "model-00002-of-00002.safetensors": b"other"}
    commit(second, 10, {0: other})
    inventory, _ = open_inventory(str(first.root))
    target = parse_location(f"{bucket}/model")
    begun: list[int] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        if not begun:
            begun.append(done_bytes)
            assert call("export", second.root / "checkpoint-10", f"{bucket}/model")[0] == 0

    with pytest.raises((ConflictError, StorageError)):
        copying.export(inventory, inventory.item(), target, progress=progress)
    found = contents(f"{bucket}/model")
    assert found["model-00002-of-00002.safetensors"] == b"other"
    assert found.keys() == other.keys() - {"optimizer.pt"}


def test_a_run_that_begins_ends_an_export_to_its_final(bucket: str, tmp_path: Path) -> None:
    """A run that claims the location ends an export to its `final/`."""
    output = prepared(tmp_path / "out")
    commit(output, 10, {0: WHOLE})
    inventory, _ = open_inventory(str(output.root))

    def progress(done_bytes: int, total_bytes: int) -> None:
        claim = Claim(run_id="run", attempt=1, attempt_id="run-1", since="now", host="here")
        if done_bytes and RemoteFolder(store_at(f"{bucket}/run")).claimed_by() is None:
            RemoteFolder(store_at(f"{bucket}/run")).claim(claim)

    with pytest.raises(ConflictError, match="attempt 1"):
        copying.export(inventory, inventory.item(), parse_location(f"{bucket}/run/final"), progress=progress)
    assert MANIFEST_NAME not in contents(f"{bucket}/run/final")
    assert RemoteFolder(store_at(f"{bucket}/run"), attempt_id="run-1").clean(keep=()) >= 1
    assert contents(f"{bucket}/run/final") == {}


def test_a_network_that_breaks(output: OutputFolder, reachable: Server, bucket: str, tmp_path: Path, monkeypatch):
    """One request in ten fails, and the exported model is right."""
    stored = uploaded(output, f"{bucket}/run")
    assert call("export", output.root / "checkpoint-10", tmp_path / "model")[0] == 0
    with FaultProxy(f"127.0.0.1:{reachable.port}", seed=11) as proxy:
        add_mixture(proxy, 0.1)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        code, text = call("export", stored, f"{bucket}/model")
        assert code == 0, text
        assert proxy.injected
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", reachable.endpoint)
    assert contents(f"{bucket}/model") == in_folder(tmp_path / "model")


# ---- what it costs ----------------------------------------------------------------------------------------------

_MEASURED = f"""
{MEASURE}
import sys
import safepoint.checkpoint.tools.export, safepoint.storage.object_store
from safepoint.cli.commands.checkpoints import app
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
next(iter(open_store(parse_location(sys.argv[2])).list()), None)
begin_measure()
app(["export", *sys.argv[1:]], standalone_mode=False)
print(grown_mb())
"""
_TENSOR_MB = 1024 * 1024 * 4 / 1e6


@pytest.mark.parametrize("layout", ["pieces", pytest.param("whole", marks=_LONG)])
@pytest.mark.parametrize("source", ["folder", "store"])
def test_neither_disk_nor_memory(source: str, layout: str, reachable: Server, bucket: str, tmp_path: Path) -> None:
    """A model of 320 MB takes at most 5 % of that on any disk, and in memory the largest tensor and 64 MB."""
    if source == "store" and isinstance(reachable, MotoServer):
        pytest.skip("moto reads the whole object for each range of it")
    output = prepared(tmp_path / "out")
    files = files_in_pieces(tmp_path / "saved", num_mb=320)
    if layout == "whole":
        files = {"model.safetensors": os.urandom(320 << 20), "config.json": b"{}"}
    commit(output, 10, {0: files})
    checkpoint = str(output.root / "checkpoint-10")
    if source == "store":
        checkpoint = uploaded(output, f"{bucket}/run")
    temporary, home = tmp_path / "tmp", tmp_path / "home"
    temporary.mkdir()
    home.mkdir()
    with DiskWatch(temporary, home, output.root) as watch:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED, checkpoint, f"{bucket}/model"],
            env={**os.environ, **reachable.variables, "TMPDIR": str(temporary), "HOME": str(home)},
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    size_bytes = sum(item.size_bytes for item in store_at(f"{bucket}/model").list())
    assert size_bytes > 320e6
    assert watch.grown_bytes <= 0.05 * size_bytes
    grown_mb = float(done.stdout.splitlines()[-1])
    print(f"{source}, {layout}: {grown_mb:.1f} MB of memory, {watch.grown_bytes} bytes of disk")
    assert grown_mb <= _TENSOR_MB + 64


def test_the_measure_sees_memory() -> None:
    """The measurement sees the memory of the process, also when its parent has more."""
    ballast = bytes(300_000_000)
    program = f"{MEASURE}\nbegin_measure()\nx = bytearray(200_000_000)\nprint(grown_mb())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 190 < float(done.stdout) < 250, len(ballast)


def test_a_shortened_object_is_said_to_be(bucket: str, output: OutputFolder) -> None:
    """An object that is too short is reported before anything is written."""
    stored = uploaded(output, f"{bucket}/run")
    store = store_at(stored)
    key = max(store.list(), key=lambda item: item.size_bytes).key
    store.write(key, bytes(store.read(key, length=1000)))
    inventory, name = open_inventory(stored)
    with pytest.raises(CheckpointError):
        copying.export(inventory, inventory.item(name), parse_location(f"{bucket}/model"))
    assert call("export", stored, f"{bucket}/model")[0] == 14
    assert contents(f"{bucket}/model") == {}
