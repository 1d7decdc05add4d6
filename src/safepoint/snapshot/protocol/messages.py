"""Every message between a rank and its keeper, in both directions, as a frozen dataclass.

The keeper is the process of a node that writes snapshots to disk. The files of a snapshot lie in blocks: pieces of
shared memory, which each rank allocates and numbers. A rank's part of a snapshot is the files in its blocks.

A rank sends `Hello` first. A keeper of another protocol version sends `Refused` and closes the connection. If a
rank sends anything that is not one of these messages, the keeper closes the connection to this rank, and continues to
serve the other ranks.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from safepoint.checkpoint.format.manifest import ManifestFacts, Trigger, path_fault
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation.channels import codec
from safepoint.foundation.channels.codec import ProtocolError
from safepoint.snapshot.images.torch_archive import Archive
from safepoint.snapshot.memory.block import PAGE_BYTES

VERSION = 3
"""The version of the protocol, increased with every change of a message. All ranks of a node and their keeper must
have the same version."""
SCRATCH_PREFIX = "scratch-"
"""The prefix of the folder names that `RemoveAtExit` accepts. A rank cannot make its keeper remove other folders."""


def _check_folder(folder: str) -> None:
    if not folder.startswith("/") or b"\0" in os.fsencode(folder):
        raise ValueError(f"folder {folder!r} must be an absolute path")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A file of a snapshot, and where its image (the bytes that it will have) lies in a rank's memory.

    Args:
        path: the path of the file, relative to the checkpoint.
        block: the number of the block that holds the image.
        offset: where the image begins in the block, in bytes; a multiple of the page size for large files.
        size_bytes: the size of the file.
        archives: the archives in the file, in their order (see `safepoint.snapshot.images.image`).
    """

    path: str
    block: int
    offset: int
    size_bytes: int
    archives: tuple[Archive, ...] = ()

    def __post_init__(self) -> None:
        fault = path_fault(self.path)
        if fault:
            raise ValueError(f"path {self.path!r} {fault}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """How a snapshot becomes a checkpoint. The first rank of each node sends these facts.

    Args:
        manifest: what the manifest says.
        folder: the output folder, absolute.
        attempt_id: names the working folder of this attempt.
        keep: retention policies, as `parse_policies` reads them.
        limit: how many checkpoints to keep; None for all of them.
        protected: steps that are never pruned.
        save: the number of this save in the attempt, the same on all nodes.
        node: the number of this node.
        num_nodes: how many nodes write files of the checkpoint.
    """

    manifest: ManifestFacts
    folder: str
    attempt_id: str
    keep: str | None = None
    limit: int | None = None
    protected: tuple[int, ...] = ()
    save: int = 0
    node: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        _check_folder(self.folder)
        if self.attempt_id in {"", ".", ".."} or "/" in self.attempt_id:
            raise ValueError(f"attempt_id {self.attempt_id!r} must be the name of a folder")
        if self.node >= self.num_nodes:
            raise ValueError(f"node {self.node} must be less than num_nodes {self.num_nodes}")

    @property
    def output(self) -> OutputFolder:
        """The output folder."""
        return OutputFolder(Path(self.folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the save of a snapshot ended.

    Args:
        step: the step of the snapshot.
        error: why the snapshot is not durable; empty if it is durable.
        path: the checkpoint's folder.
        size_bytes: the size of its files.
        write_s: seconds that writing and committing took.
        ended_s: when the checkpoint was durable, by the monotonic clock, which all processes of a machine share.
    """

    step: int
    error: str
    path: str = ""
    size_bytes: int = 0
    write_s: float = 0.0
    ended_s: float = 0.0

    @property
    def is_durable(self) -> bool:
        """Whether the checkpoint is committed."""
        return not self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSnapshot:
    """The newest snapshot that the ranks left in memory before their restart.

    Args:
        folder: a folder with its files. Large files are links into the keeper's memory, small files are copies.
        manifest: its manifest, as JSON.
        is_durable: whether the snapshot has also become a checkpoint.
    """

    folder: str
    manifest: str
    is_durable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlan:
    """What a keeper needs to start: the command-line argument of its process, as JSON.

    Args:
        key: ranks find the keeper by this key; see `channel.names_of`. The command line has the name of the socket
            instead of the key, because everyone can read a command line.
        listening: the descriptor of the socket that listens.
        owner_pid: the pid of the keeper's owner. The keeper runs at least as long as this process. If None, the owner
            is the process that started the keeper, and the keeper runs at least as long as its stdin is open.
        verbosity: the verbosity of the console.
        scratch: a temporary folder of the owner, in which the keeper also makes folders. The keeper removes this
            folder if the owner is killed. The keeper notices a kill only if `owner_pid` is None.
        events: a file for the job's events, besides the event file in the output folder.
    """

    key: str = field(repr=False)
    listening: int = -1
    owner_pid: int | None = None
    verbosity: int = 0
    scratch: str | None = None
    events: str | None = None


# ---- from a rank to the keeper ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message.

    Args:
        version: the version of the protocol.
        rank: the number of this rank in the job.
        num_ranks: how many ranks this node has.
        restart: how many times the ranks have been restarted; 0 for the first start.
    """

    version: int = VERSION
    rank: int
    num_ranks: int
    restart: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks {self.num_ranks} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LendBlock:
    """Carries the descriptor of a block. The keeper may map the block from now on.

    Args:
        number: the number of the block, unique on this connection.
        capacity_bytes: the capacity of the block; a multiple of the page size.
    """

    number: int
    capacity_bytes: int

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1 or self.capacity_bytes % PAGE_BYTES:
            raise ValueError(f"capacity_bytes {self.capacity_bytes} must be a positive multiple of {PAGE_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPopulated:
    """All pages of a block are allocated: the keeper can map and touch them without using more memory."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnBlock:
    """The rank is about to close a block; the keeper unmaps it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverwriteBlocks:
    """The rank is about to overwrite these blocks."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginSnapshot:
    """The rank begins to fill its memory with its part of a snapshot.

    Args:
        step: the step of the snapshot.
        number: the number of the snapshot in the training, the same on all ranks. It distinguishes two snapshots of
            the same step.
        request: the number of this request; `SaveEnded` repeats it.
        files: the files of this rank's part.
        trigger: why the snapshot is taken.
        is_requested: whether to make a checkpoint of the snapshot.
        facts: how the snapshot becomes a checkpoint; sent by the first rank of the node, None from the others.
    """

    step: int
    number: int
    request: int
    files: tuple[StagedFile, ...]
    trigger: Trigger
    is_requested: bool
    facts: CheckpointFacts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStaged:
    """The rank has staged its part of a snapshot: all its files are copied into memory."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelSnapshot:
    """The rank's part of a snapshot will never be complete."""

    step: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSave:
    """Make a checkpoint of a snapshot that is in memory. `request` is described at `BeginSnapshot`."""

    step: int
    trigger: Trigger
    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFolder:
    """The keeper writes checkpoints into this folder from now on.

    Args:
        folder: the absolute path.
        is_committer: whether this keeper commits and prunes; with several nodes, only the keeper of node 0 does.
    """

    folder: str
    is_committer: bool

    def __post_init__(self) -> None:
        _check_folder(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseFolder:
    """Write what was requested, then release the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindEarlierSnapshot:
    """Request the newest snapshot that the ranks took before their restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEarlierSnapshot:
    """The ranks have loaded their state: the keeper releases the memory of the ranks from before the restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonStep:
    """Make the newest complete snapshot durable, and send `Leave` to all ranks.

    Args:
        step: the step that the ranks do not finish.
        reason: why they do not finish it, for people.
    """

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveAtExit:
    """Remove a temporary folder of this rank when the rank has ended. Its name must begin with `SCRATCH_PREFIX`."""

    folder: str

    def __post_init__(self) -> None:
        _check_folder(self.folder)
        if not Path(self.folder).name.startswith(SCRATCH_PREFIX):
            raise ValueError(f"the name of the folder {self.folder!r} must begin with {SCRATCH_PREFIX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The rank ends normally; a rank that ends without this message has failed."""


# ---- from the keeper to a rank ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to `Hello`: the keeper's pid, and its identity (see `HeldFolder`)."""

    pid: int
    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The keeper does not accept this rank, and closes the connection."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksFree:
    """The rank may overwrite these blocks."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnded:
    """How a save ended; `request` is the number of the rank's last request about the step."""

    request: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to `OpenFolder`, `CloseFolder` or `FindEarlierSnapshot`.

    Args:
        error: for `OpenFolder`: why the keeper cannot hold the folder; empty if it holds the folder.
        snapshot: for `FindEarlierSnapshot`: the snapshot that was found; None if no snapshot can be used.
    """

    error: str = ""
    snapshot: EarlierSnapshot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """All ranks end now.

    Args:
        step: the step of the snapshot that is now a checkpoint; None if no snapshot could be made durable.
        abandoned_step: the step that the ranks do not finish.
        reason: why the ranks end, for people.
    """

    step: int | None
    abandoned_step: int
    reason: str


SnapshotMessage = (
    LendBlock
    | BlockPopulated
    | ReturnBlock
    | OverwriteBlocks
    | BeginSnapshot
    | SnapshotStaged
    | CancelSnapshot
    | RequestSave
)
JobMessage = (
    OpenFolder | CloseFolder | FindEarlierSnapshot | ReleaseEarlierSnapshot | AbandonStep | RemoveAtExit | Goodbye
)
RankMessage = Hello | SnapshotMessage | JobMessage
KeeperMessage = Welcome | Refused | BlocksFree | SaveEnded | Leave | Answer

_RANK_MESSAGES = {kind.__name__: kind for kind in get_args(RankMessage)}
_KEEPER_MESSAGES = {kind.__name__: kind for kind in get_args(KeeperMessage)}


def decode_rank_message(body: bytes) -> RankMessage:
    """The message that a rank has sent.

    Raises:
        ProtocolError: `body` is not a message of this version.
    """
    record = codec.parse(body)
    version = record.get("version")
    if record.get("type") == Hello.__name__ and version != VERSION:
        raise ProtocolError(
            f"the rank uses version {version!r:.20} of the keeper's protocol, and this keeper uses version "
            f"{VERSION}: run one release of safepoint on all ranks of a node"
        )
    return codec.decode(record, _RANK_MESSAGES)


def decode_keeper_message(body: bytes) -> KeeperMessage:
    """The message that the keeper has sent.

    Raises:
        ProtocolError: `body` is not a message of this version.
    """
    return codec.decode(codec.parse(body), _KEEPER_MESSAGES)
