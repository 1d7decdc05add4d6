"""Two agents as two nodes with a folder each, and one object store (docs/adr/0008)."""

import shutil
import signal
import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import checkpoint_name, list_checkpoints
from safepoint.checkpoint.format.manifest import PART_NAME
from safepoint.checkpoint.format.verify import read_part, verify, verify_part
from safepoint.checkpoint.tools.inventory import Kind, open_inventory
from tests.support.disk import small_disk
from tests.support.equality import assert_same_run
from tests.support.jobs import Job, no_orphans, read_events, safepoint, tiny
from tests.support.moto_server import MotoServer
from tests.support.ports import free_port
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

_ARGUMENTS = ("--step-ms", "50", "--epochs", "3")


@pytest.fixture
def prefix() -> str:
    return f"separate-{uuid.uuid4().hex}"


@pytest.fixture
def server(moto: MotoServer) -> MotoServer:
    return moto


@pytest.fixture(
    params=[
        "moto",
        pytest.param("rgw", marks=pytest.mark.s3),
        pytest.param("minio", marks=[pytest.mark.s3, pytest.mark.minio, pytest.mark.long]),
    ]
)
def any_server(request: pytest.FixtureRequest) -> S3Server:
    return request.getfixturevalue(request.param)


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of the two nodes."""
    return tmp_path / "node-0", tmp_path / "node-1"


def start(
    server: S3Server,
    prefix: str,
    nodes: tuple[Path, Path],
    *options: str,
    arguments: tuple[str, ...] = _ARGUMENTS,
) -> tuple[Job, Job]:
    port = str(free_port())
    first, second = (
        safepoint(
            folder,
            *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port),
            *("--output-dir", str(server.location(prefix)), "--local-dir", str(folder)),
            *options,
            program=tiny(folder, *arguments),
            **server.variables,
        )
        for rank, folder in enumerate(nodes)
    )
    return first, second


def wait(jobs: tuple[Job, Job]) -> list[int]:
    codes = [job.wait() for job in jobs]
    print(jobs[0].text, jobs[1].text, sep="\n--\n")
    return codes


def preempted(server: S3Server, prefix: str, nodes: tuple[Path, Path]) -> int:
    """A run that was asked to stop on its second node; returns the step that was saved."""
    jobs = start(server, prefix, nodes, "--save-steps", "5")
    with no_orphans(*jobs):
        jobs[0].wait_for_step(8)
        jobs[1].signal()
        assert wait(jobs) == [75, 75]
    return read_events(nodes[0], "saved")[-1]["step"]


def finish(server: S3Server, prefix: str, nodes: tuple[Path, Path]) -> None:
    jobs = start(server, prefix, nodes, "--save-steps", "5")
    with no_orphans(*jobs):
        assert wait(jobs) == [0, 0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training without an interruption."""
    output = tmp_path_factory.mktemp("reference") / "run"
    job = safepoint(output, "--nproc-per-node", "2", program=tiny(output, *_ARGUMENTS))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    return output


@pytest.mark.long
@pytest.mark.parametrize("emptied", ["none", "the second", "both"])
def test_every_node_keeps_its_part_and_the_store_the_whole(
    emptied: str,
    any_server: S3Server,
    prefix: str,
    nodes: tuple[Path, Path],
    reference: Path,
) -> None:
    """The resumed run is bit-equal, and fetches only files that no node has."""
    step = preempted(any_server, prefix, nodes)
    name = checkpoint_name(step)
    parts = [read_part(folder / name) for folder in nodes]
    whole = parts[0].manifest
    assert parts[1].manifest == whole
    assert [verify_part(folder / name, part) for folder, part in zip(nodes, parts, strict=True)] == [(), ()]
    assert {entry.path for entry in whole.files} == {path for part in parts for path in part.paths}
    assert "rng_state_1.pth" in parts[1].paths
    assert not verify(nodes[0] / name).is_valid, "a part is not a checkpoint"
    with pytest.MonkeyPatch.context() as environment:
        for variable, value in any_server.variables.items():
            environment.setenv(variable, value)
        inventory = open_inventory(str(any_server.location(prefix)))[0]
        newest = inventory.items()[0]
        assert (newest.name, newest.kind, inventory.verify(newest)) == (name, Kind.CHECKPOINT, ())
    expected_bytes = 0
    if emptied in {"the second", "both"}:
        expected_bytes += sum(entry.size_bytes for entry in parts[1].files)
        shutil.rmtree(nodes[1])
    if emptied == "both":
        expected_bytes = whole.size_bytes
        shutil.rmtree(nodes[0])
    finish(any_server, prefix, nodes)
    assert read_events(nodes[0], "resumed")[-1]["step"] == step
    assert sum(event["size_bytes"] for event in read_events(nodes[0], "fetched")) == expected_bytes
    for folder in nodes:
        found = verify(folder / name)
        assert found.manifest == whole, "put together on every node"
        assert found.is_valid
    assert_same_run(nodes[0], reference)
    store = any_server.store(prefix)
    assert list(store.list(".safepoint/parts")) == list(store.list(".safepoint/unfinished")) == []
    assert {item.key for item in store.list("final")} >= {"final/model.safetensors", "final/safepoint-manifest.json"}


@pytest.mark.long
def test_a_damaged_part_comes_from_the_store(
    server: MotoServer, prefix: str, nodes: tuple[Path, Path], reference: Path
) -> None:
    """One bit is flipped in a file of one node: only that file is fetched."""
    step = preempted(server, prefix, nodes)
    path = nodes[0] / checkpoint_name(step) / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    finish(server, prefix, nodes)
    assert read_events(nodes[0], "resumed")[-1]["step"] == step
    assert read_events(nodes[0], "fetched")[-1]["size_bytes"] == len(data)
    assert_same_run(nodes[0], reference)


@pytest.mark.long
def test_what_one_node_alone_has_is_not_a_checkpoint(
    server: MotoServer, prefix: str, nodes: tuple[Path, Path], reference: Path
) -> None:
    """A part of the newest checkpoint is lost: the older one is used, with a warning."""
    step = preempted(server, prefix, nodes)
    older = int(list_checkpoints(nodes[0])[1].name.split("-")[1])
    shutil.rmtree(nodes[1] / checkpoint_name(step))
    store = server.store(prefix)
    for item in list(store.list(checkpoint_name(step))):
        store.delete(item.key)
    finish(server, prefix, nodes)
    assert read_events(nodes[0], "resumed")[-1]["step"] == older
    rejected = read_events(nodes[0], "checkpoint_rejected")
    assert "parts of other nodes are missing" in rejected[-1]["reason"]
    assert_same_run(nodes[0], reference)


@pytest.mark.long
def test_everything_is_killed(server: MotoServer, prefix: str, nodes: tuple[Path, Path]) -> None:
    """After SIGKILL of both nodes, the run resumes from a checkpoint that both hold."""
    jobs = start(server, prefix, nodes, "--save-steps", "3", arguments=("--step-ms", "60", "--epochs", "200"))
    with no_orphans(*jobs):
        jobs[0].wait_for_event("saved", count=2)
        for job in jobs:
            job.kill_everything()
    newest = min(int(list_checkpoints(folder)[0].name.split("-")[1]) for folder in nodes)
    jobs = start(server, prefix, nodes, arguments=("--step-ms", "20", "--max-steps", str(newest + 4)))
    with no_orphans(*jobs):
        assert wait(jobs) == [0, 0]
    assert read_events(nodes[0], "resumed")[-1]["step"] == newest


@pytest.mark.long
def test_retention_on_every_node(server: MotoServer, prefix: str, nodes: tuple[Path, Path]) -> None:
    """Each node prunes its parts, the first node the store; files of callbacks belong to the checkpoint."""
    jobs = start(
        server,
        prefix,
        nodes,
        *("--save-steps", "4", "--save-total-limit", "2", "--store-keep", "newest=1"),
        arguments=("--step-ms", "80", "--max-steps", "20", "--add-file"),
    )
    with no_orphans(*jobs):
        assert wait(jobs) == [0, 0]
    for index, folder in enumerate(nodes):
        assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-20", "checkpoint-16"]
        assert f"notes-{index}.txt" in read_part(folder / "checkpoint-20").paths
    store = server.store(prefix)
    keys = [item.key for item in store.list("checkpoint-20")]
    assert {"checkpoint-20/notes-0.txt", "checkpoint-20/notes-1.txt"} <= set(keys)
    names = {item.key.split("/")[0] for item in store.list() if item.key.startswith("checkpoint-")}
    assert names == {"checkpoint-20"}


@pytest.mark.long
def test_the_best_model_is_loaded_on_every_node(server: MotoServer, prefix: str, nodes: tuple[Path, Path]) -> None:
    """`load_best_model_at_end` finds the whole checkpoint on each node."""
    arguments = ("--step-ms", "20", "--max-steps", "12", "--best", "--eval-strategy", "steps", "--eval-steps", "4")
    arguments += ("--save-strategy", "steps", "--save-steps", "4")
    jobs = start(server, prefix, nodes, arguments=arguments)
    with no_orphans(*jobs):
        assert wait(jobs) == [0, 0]
    assert "Could not locate the best model" not in jobs[0].text + jobs[1].text
    assert any((path / PART_NAME).exists() for path in list_checkpoints(nodes[1]))
    assert any(verify(path).is_valid for path in list_checkpoints(nodes[1]))


@pytest.mark.long
def test_separate_folders_without_a_store_are_refused(nodes: tuple[Path, Path]) -> None:
    """Both nodes exit with 13 and say what to do: a part is lost with its node."""
    port = str(free_port())
    jobs = [
        safepoint(
            folder,
            *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port),
            program=tiny(folder, *_ARGUMENTS),
        )
        for rank, folder in enumerate(nodes)
    ]
    with no_orphans(*jobs):
        assert [job.wait() for job in jobs] == [13, 13], jobs[0].text + jobs[1].text
    assert "an object store: --output-dir s3://" in jobs[0].text


def test_both_nodes_are_told_at_once(server: MotoServer, prefix: str, nodes: tuple[Path, Path]) -> None:
    """SIGTERM to both: each waits for the other's part, and the checkpoint is in the store."""
    jobs = start(server, prefix, nodes, "--save-steps", "50", arguments=("--step-ms", "60", "--epochs", "200"))
    with no_orphans(*jobs):
        jobs[0].wait_for_step(4)
        for job in jobs:
            job.signal(signal.SIGTERM)
        assert wait(jobs) == [75, 75]
    step = read_events(nodes[0], "saved")[-1]["step"]
    keys = [item.key for item in server.store(prefix).list(checkpoint_name(step))]
    assert f"{checkpoint_name(step)}/safepoint-manifest.json" in keys


@pytest.mark.long
def test_one_node_has_a_small_disk(server: MotoServer, prefix: str, nodes: tuple[Path, Path]) -> None:
    """Only this node deletes older parts before saves; every save succeeds, and every checkpoint is stored."""
    options = ("--save-steps", "4", "--save-total-limit", "4")
    arguments = ("--step-ms", "80", "--max-steps", "24", "--hidden", "256", "--strategy", "fsdp")
    nodes[1].mkdir()
    with small_disk(nodes[1], 15 << 20):
        jobs = start(server, prefix, nodes, *options, arguments=arguments)
        with no_orphans(*jobs):
            assert wait(jobs) == [0, 0]
        events = read_events(nodes[0]) + read_events(nodes[1])
        assert not [event for event in events if event["event"] == "save_failed"]
        small = [path.name for path in list_checkpoints(nodes[1])]
    large = [path.name for path in list_checkpoints(nodes[0])]
    # Both nodes may also have one that was being uploaded when it would have been deleted.
    assert {"checkpoint-24", "checkpoint-20", "checkpoint-16", "checkpoint-12"} <= set(large)
    assert small[0] == "checkpoint-24"
    assert len(small) < len(large)
    assert {event["path"].split("/checkpoint-")[0] for event in events if event["event"] == "thinned"} == {
        str(nodes[1])
    }
