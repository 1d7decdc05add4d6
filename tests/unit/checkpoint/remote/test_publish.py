"""Checkpoints of which every node holds a part: records, and publishing them from several nodes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import newest_valid
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, Manifest, NodePart
from safepoint.checkpoint.format.verify import read_part, verify, verify_part
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import KeepNewest, Policy
from safepoint.checkpoint.local.working_checkpoint import (
    RankPart,
    WorkingCheckpoint,
    extend_manifest,
    find_added_files,
    merge_parts,
    replace_record,
)
from safepoint.checkpoint.remote.publish import Published, finish_parts, publish
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.checkpoint.tools import copy as copying
from safepoint.checkpoint.tools.inventory import Kind, open_inventory
from safepoint.checkpoint.tools.repair import repair
from safepoint.errors import CheckpointError, ManifestError, NothingValidError, StorageError, TransientError
from safepoint.foundation.events.stream import Event
from safepoint.foundation.events.upload_events import Uploaded
from safepoint.storage.location import Location, Scheme
from tests.support.checkpoints import commit, describe, prepared
from tests.support.stores import FaultyStore, flip

_FILES = ({"model.safetensors": b"m" * 5000, "rng_state_0.pth": b"0"}, {"rng_state_1.pth": b"1", "sub/x": b"x"})


def claim(attempt: int) -> Claim:
    return Claim(run_id="run", attempt=attempt, attempt_id=f"run-{attempt}", since="now", host="here")


@dataclasses.dataclass
class Node:
    """One node's folder, and its way into the bucket."""

    index: int
    output: OutputFolder
    remote: RemoteFolder

    def folder(self, step: int) -> Path:
        return self.output.root / f"checkpoint-{step}"

    def publish(self, step: int) -> Published:
        folder = self.folder(step)
        sent = UploadRecord(self.output.control / f"upload-{folder.name}.json")
        return publish(self.remote, folder, read_part(folder), name=folder.name, sent=sent)


def commit_parts(outputs: list[OutputFolder], step: int, *, is_open: bool = False) -> Manifest:
    """What all nodes do when they save."""
    workings: list[WorkingCheckpoint] = []
    parts: list[RankPart] = []
    for node, output in enumerate(outputs):
        working = WorkingCheckpoint(output, attempt_id="run-1", step=step)
        for path, content in _FILES[node].items():
            target = working.rank_root(node) / working.name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        parts.append(dataclasses.replace(working.seal(node), node=node))
        workings.append(working)
    manifest = merge_parts(parts, describe(step))
    for node, working in enumerate(workings):
        paths = tuple(sorted(entry.path for entry in parts[node].files))
        working.prepare(NodePart(node=node, num_nodes=2, paths=paths, manifest=manifest, is_open=is_open))
        working.publish()
        working.discard()
    return manifest


class Breaks:
    """Lets so many calls through, and refuses the next one."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, name: str, key: str) -> None:
        self.left -= 1
        if self.left == -1:
            raise StorageError(f"{name} {key} was refused")


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(tmp_path / "bucket")


@pytest.fixture
def nodes(store: FaultyStore, tmp_path: Path) -> list[Node]:
    RemoteFolder(store).claim(claim(1))
    outputs = [prepared(tmp_path / f"node-{index}") for index in range(2)]
    commit_parts(outputs, 20)
    return [
        Node(index, output, RemoteFolder(store, attempt_id=claim(1).attempt_id))
        for index, output in enumerate(outputs)
    ]


def test_a_part_says_what_it_holds_and_is_no_checkpoint(nodes: list[Node]) -> None:
    """Its files are checked, no run resumes from it, and the commands report what it is."""
    folder = nodes[1].folder(20)
    part = read_part(folder)
    assert NodePart.from_bytes(part.to_bytes()) == part
    assert part.paths == ("rng_state_1.pth", "sub/x")
    assert verify_part(folder, part) == ()
    assert not verify(folder).is_valid
    inventory, _ = open_inventory(str(nodes[1].output.root))
    item = inventory.items()[0]
    assert (item.kind, item.is_complete, inventory.verify(item)) == (Kind.PART, False, ())
    (folder / "sub" / "x").write_bytes(b"y")
    assert verify_part(folder, part, deep=False) == ()
    assert [fault.file for fault in inventory.verify(item)] == ["sub/x"]
    (folder / "sub" / "x").unlink()
    assert [fault.reason for fault in verify_part(folder, part, deep=False)] == ["it is missing"]


def test_every_altered_byte_of_a_record_is_refused(nodes: list[Node]) -> None:
    """As for a manifest."""
    data = read_part(nodes[0].folder(20)).to_bytes()
    for index in range(len(data)):
        altered = bytearray(data)
        altered[index] ^= 1
        with pytest.raises(ManifestError):
            NodePart.from_bytes(bytes(altered))


@pytest.mark.parametrize("changes", [{"node": 2}, {"node": -1}, {"paths": ("../x",)}, {"num_nodes": 0}])
def test_an_invalid_record_is_refused(changes: dict[str, object], nodes: list[Node]) -> None:
    """Also when its own digest is right."""
    part = read_part(nodes[0].folder(20))
    with pytest.raises(ValueError, match=r"node|manifest"):
        dataclasses.replace(part, **changes)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_node_to_come_commits(order: tuple[int, int], nodes: list[Node], store: FaultyStore) -> None:
    """Before that there is no checkpoint; doing it again does no harm."""
    first, last = (nodes[index] for index in order)
    assert first.publish(20) is Published.IN_PART
    assert first.publish(20) is Published.IN_PART
    assert first.remote.steps() == []
    assert last.publish(20) is Published.NOW
    assert [node.publish(20) for node in nodes] == [Published.BEFORE, Published.BEFORE]
    assert verify(store.location.folder / "checkpoint-20").is_valid
    assert list(store.list(".safepoint/parts")) == list(store.list(".safepoint/unfinished")) == []


def test_a_fault_at_any_request_of_any_node_changes_nothing(nodes: list[Node], tmp_path: Path) -> None:
    """Whatever fails on either node, in whatever order they come, the next tries commit the same checkpoint."""
    num_calls = 0
    for failing_node in (0, 1):
        failing = 0
        while True:
            store = FaultyStore(tmp_path / f"bucket-{failing_node}-{failing}")
            RemoteFolder(store).claim(claim(1))
            for node in nodes:
                node.remote = RemoteFolder(store, attempt_id=claim(1).attempt_id)
                (node.output.control / "upload-checkpoint-20.json").unlink(missing_ok=True)
            first, second = nodes[failing_node], nodes[1 - failing_node]
            second.publish(20)
            store.before = Breaks(failing)
            try:
                first.publish(20)
                is_done = True
            except StorageError:
                is_done = False
            store.before = lambda name, key: None
            if not is_done:
                first.publish(20)
                second.publish(20)
            assert first.remote.steps() == [20]
            assert verify(store.location.folder / "checkpoint-20").is_valid
            if is_done:
                break
            failing += 1
        num_calls += failing
    assert num_calls > 20


def test_the_next_start_commits_what_only_lacked_that(nodes: list[Node], store: FaultyStore) -> None:
    """All nodes had sent their files when the job was killed: the checkpoint is whole once it is committed."""
    manifest = read_part(nodes[0].folder(20)).manifest
    for node in nodes:
        node.publish(20)
    store.delete(f"checkpoint-20/{MANIFEST_NAME}")
    RemoteFolder.as_guest(store).mark("checkpoint-20", {entry.path: entry.size_bytes for entry in manifest.files})
    for node in nodes:
        store.write(mark_of(manifest.to_bytes(), node.index), manifest.to_bytes())
    remote = RemoteFolder(store)
    remote.claim(claim(2))
    assert finish_parts(remote) == ["checkpoint-20"]
    assert finish_parts(remote) == []
    assert remote.clean(keep=[]) == 0
    assert remote.manifest(20) == manifest


@pytest.mark.parametrize(
    "spoil",
    [
        lambda store, data: store.delete(mark_of(data, 1)),
        lambda store, data: store.write(mark_of(data, 0), data[:-1]),
        lambda store, data: (store.delete(mark_of(data, 1)), store.write(mark_of(data, 1, of=3), data)),
        lambda store, data: store.delete("checkpoint-20/sub/x"),
        lambda store, data: store.write("checkpoint-20/sub/x", b"too long"),
        lambda store, data: store.write(mark_of(data, 0), data.replace(b"20", b"21")),
    ],
)
def test_what_is_not_whole_is_cleaned_up(spoil, nodes: list[Node], store: FaultyStore) -> None:
    """A part is missing, says something else, or lost a file: never a checkpoint, and gone after the next start.

    Only an object that none of the writers can have written stays, and the marks with it.
    """
    manifest = read_part(nodes[0].folder(20)).manifest
    data = manifest.to_bytes()
    for node in nodes:
        node.publish(20)
    store.delete(f"checkpoint-20/{MANIFEST_NAME}")
    RemoteFolder.as_guest(store).mark("checkpoint-20", {entry.path: entry.size_bytes for entry in manifest.files})
    for node in nodes:
        store.write(mark_of(data, node.index), data)
    spoil(store, data)
    remote = RemoteFolder(store)
    remote.claim(claim(2))
    assert finish_parts(remote) == []
    assert remote.steps() == []
    remote.clean(keep=[])
    left = [item.key for item in store.list() if not item.key.startswith(".safepoint/")]
    assert left in ([], ["checkpoint-20/sub/x"])
    if left:
        assert store.read(left[0]) == b"too long"
        store.delete(left[0])
        remote.clean(keep=[])
    assert [item.key for item in store.list()] == [".safepoint/attempt.json"]


def test_hostile_marks_of_parts_name_nothing(store: FaultyStore) -> None:
    """Whatever another writer has put there, nothing else is read, written or deleted."""
    remote = RemoteFolder(store)
    remote.claim(claim(1))
    digest = "0" * 32
    hostile = ("checkpoint-3/x", f"checkpoint-3/{digest}/0-of-0", f"checkpoint-3/{digest}/00-of-1")
    for name in (f"notes/{digest}/0-of-1", f"checkpoint-3/{digest}/0-of-1", "checkpoint-3/0-of-1", *hostile):
        store.write(f".safepoint/parts/{name}", b"{}")
    store.write("notes/mine", b"mine")
    assert finish_parts(remote) == []
    remote.clean(keep=[])
    assert store.read("notes/mine") == b"mine"


def test_a_replaced_checkpoint_of_the_same_step_goes_first(nodes: list[Node], store: FaultyStore) -> None:
    """An older attempt's checkpoint of this step: both nodes may delete its manifest, and neither the new one's."""
    store.write("checkpoint-20/old", b"old")
    manifest = dataclasses.replace(read_part(nodes[0].folder(20)).manifest, attempt=9)
    store.write(f"checkpoint-20/{MANIFEST_NAME}", manifest.to_bytes())
    assert [node.publish(20) for node in nodes] == [Published.IN_PART, Published.NOW]
    assert verify(store.location.folder / "checkpoint-20").is_valid


def test_another_manifest_of_the_step_does_no_harm(nodes: list[Node], store: FaultyStore) -> None:
    """Two that name different files are never mixed: what is committed is whole."""
    before = read_part(nodes[0].folder(20))
    folder = nodes[1].folder(20)
    (folder / "notes.txt").write_bytes(b"added")
    added = find_added_files(folder, before.manifest)
    manifest = extend_manifest(before.manifest, added)
    assert nodes[1].publish(20) is Published.IN_PART
    replace_record(folder, manifest, added)
    assert nodes[1].publish(20) is Published.IN_PART, "node 0 has not said the same"
    assert nodes[0].publish(20) is Published.NOW, "both have said the first"
    assert verify(store.location.folder / "checkpoint-20").is_valid
    replace_record(nodes[0].folder(20), manifest, [])
    assert nodes[0].publish(20) is not Published.BEFORE
    assert nodes[1].publish(20) in {Published.NOW, Published.BEFORE}
    assert verify(store.location.folder / "checkpoint-20").is_valid
    assert nodes[0].remote.manifest(20) == manifest


def test_what_another_program_deleted_is_not_committed(nodes: list[Node], store: FaultyStore) -> None:
    """All nodes say that their files are there, and one is not: it is reported, and sent again."""
    nodes[0].publish(20)
    store.delete("checkpoint-20/model.safetensors")
    with pytest.raises(StorageError, match="not committed"):
        nodes[1].publish(20)
    assert nodes[0].remote.steps() == []
    assert nodes[0].publish(20) is Published.NOW
    assert verify(store.location.folder / "checkpoint-20").is_valid


def mark_of(data: bytes, node: int, *, of: int = 2) -> str:
    return f".safepoint/parts/checkpoint-20/{digest_bytes(data).rpartition(':')[2]}/{node}-of-{of}"


def uploader(node: Node, events: list[Event], *, policies: Sequence[Policy] = ()) -> Uploader:
    return Uploader(node.output, node.remote, policies=policies, report=events.append, node=node.index, num_nodes=2)


def test_uploaders_take_up_what_others_have_begun(nodes: list[Node], store: FaultyStore) -> None:
    """Without the second node's part the first one's would never be complete, though a newer one is there."""
    events: list[Event] = []
    slow, quick = (uploader(node, events) for node in nodes)
    assert slow.upload_next()  # step 20, begun while it was the newest
    commit_parts([node.output for node in nodes], 40)
    assert quick.upload_next()
    assert nodes[0].remote.steps() == [20]
    while quick.upload_next() or slow.upload_next():
        pass
    assert nodes[0].remote.steps() == [40, 20]
    assert [event.step for event in events if isinstance(event, Uploaded)] == [20, 40]
    for each in (slow, quick):
        each.check_complete()


def test_the_end_waits_for_the_other_parts(nodes: list[Node]) -> None:
    """What was sent counts as arrived when it is a checkpoint."""
    events: list[Event] = []
    first, second = (uploader(node, events) for node in nodes)
    while first.upload_next():
        pass
    assert first.is_waiting
    with pytest.raises(TransientError, match="parts of other nodes"):
        first.check_complete()
    while second.upload_next():
        pass
    first.check_complete()
    assert not first.is_waiting


def test_open_parts_are_not_sent(nodes: list[Node]) -> None:
    """Callbacks may still add files: nothing is sent before all have, unless no process is left to add any."""
    commit_parts([node.output for node in nodes], 40, is_open=True)
    first = uploader(nodes[0], [])
    assert first.next() == nodes[0].folder(20)
    part = read_part(nodes[0].folder(40))
    assert NodePart.from_bytes(part.to_bytes()).is_open
    replace_record(nodes[0].folder(40), part.manifest, [])
    assert first.next() == nodes[0].folder(40)
    second = uploader(nodes[1], [])
    assert second.next() == nodes[1].folder(20)
    second.takes_open = True
    assert second.next() == nodes[1].folder(40)


def test_no_node_runs_ahead(nodes: list[Node]) -> None:
    """What was sent last must be complete before a node begins the next; then all turn to the newest."""
    outputs = [node.output for node in nodes]
    first, second = (uploader(node, []) for node in nodes)
    assert first.upload_next()
    for step in (40, 60):
        commit_parts(outputs, step)
        assert not first.upload_next()
    assert second.upload_next()
    assert nodes[0].remote.steps() == [20]
    assert first.next() is None, "it has looked less than a second ago"
    with pytest.raises(TransientError, match="waits until the other nodes"):
        first.check_complete()
    clock_of(first)
    assert first.next() == nodes[0].folder(60)
    first.newest_only = True
    assert first.next() == nodes[0].folder(60)


def clock_of(each: Uploader) -> None:
    """Uploaders look at most once a second."""
    each._others._look_again_s = 0.0


def test_a_part_that_became_whole_is_sent_whole(nodes: list[Node], store: FaultyStore) -> None:
    """A framework wanted the checkpoint on every node before all had sent theirs: the first node sends it all."""
    first, second = (uploader(node, []) for node in nodes)
    assert first.upload_next()
    manifest = read_part(nodes[0].folder(20)).manifest
    for node, other in (nodes, nodes[::-1]):
        folder = node.folder(20)
        for entry in manifest.files:
            target = folder / entry.path
            target.parent.mkdir(exist_ok=True)
            if not target.exists():
                target.write_bytes((other.folder(20) / entry.path).read_bytes())
    for node in nodes:
        (node.folder(20) / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        (node.folder(20) / PART_NAME).unlink()
    assert not second.upload_next()
    assert first.upload_next()
    assert nodes[0].remote.steps() == [20]
    assert verify(store.location.folder / "checkpoint-20").is_valid


def test_others_that_go_on_sending_are_waited_for(nodes: list[Node]) -> None:
    """As long as another node shows life, the end is not given up."""
    first, second = (uploader(node, []) for node in nodes)
    first.upload_next()
    first.last_progress_s = 0.0
    with pytest.raises(TransientError):
        first.check_complete()
    seen_s = first.last_progress_s
    assert seen_s > 0
    with pytest.raises(TransientError):
        first.check_complete()
    assert first.last_progress_s == seen_s, "nothing has changed since"
    second._others.renew_mark("checkpoint-20", read_part(nodes[1].folder(20)), None)
    with pytest.raises(TransientError):
        first.check_complete()
    assert first.last_progress_s > seen_s


def test_the_first_node_prunes_whichever_node_commits(nodes: list[Node]) -> None:
    """The second node's part came last: at the end the first one sees to the policy all the same."""
    first, second = (uploader(node, [], policies=[KeepNewest(1)]) for node in nodes)
    for step in (20, 40):
        commit_parts([node.output for node in nodes], step)
        clock_of(first)
        assert first.upload_next()
        assert second.upload_next()
    assert nodes[0].remote.steps() == [40, 20]
    first.check_complete()
    assert nodes[0].remote.steps() == [40]


def test_notes_of_what_was_sent_go_with_the_checkpoint(nodes: list[Node]) -> None:
    """The record that lets an upload be continued is deleted once its checkpoint is pruned."""
    first = uploader(nodes[0], [])
    first.upload_next()
    assert list(nodes[0].output.control.glob("upload-*"))
    nodes[0].output.delete("checkpoint-20")
    assert not first.upload_next()
    assert not list(nodes[0].output.control.glob("upload-*"))


def test_a_part_that_cannot_be_prepared_replaces_nothing(tmp_path: Path) -> None:
    """Another node's disk was full: what stood there before stands."""
    outputs = [prepared(tmp_path / f"node-{index}") for index in range(2)]
    commit_parts(outputs, 20)
    before = (outputs[0].root / "checkpoint-20" / PART_NAME).read_bytes()
    working = WorkingCheckpoint(outputs[0], attempt_id="run-2", step=20)
    working.rank_root(0)
    working.prepare(dataclasses.replace(read_part(outputs[0].root / "checkpoint-20"), paths=()))
    working.discard()
    assert (outputs[0].root / "checkpoint-20" / PART_NAME).read_bytes() == before
    assert not list((outputs[0].work / "run-2").iterdir())


def test_commands_leave_parts_alone(nodes: list[Node], tmp_path: Path) -> None:
    """Copying says what it is; pruning neither deletes a part nor a checkpoint in its favour; damage is found."""
    root = nodes[0].output.root
    commit(nodes[0].output, 10)
    inventory = open_inventory(str(root))[0]
    part = inventory.item("checkpoint-20")
    with pytest.raises(CheckpointError, match="one node's part"):
        copying.copy(inventory, part, Location(scheme=Scheme.FILE, path=str(tmp_path / "copy")))
    assert inventory.superseded([KeepNewest(1)]) == []
    flip(root / "checkpoint-20" / "model.safetensors")
    found = repair(inventory, deep=True, drop_damaged=False, dry_run=True, idle_s=0)
    assert [item.name for item in found.damaged] == ["checkpoint-20"]
    with pytest.raises(NothingValidError, match="only this node's parts"):
        newest_valid(nodes[1].output.root, rejected=lambda path, fault: None)
