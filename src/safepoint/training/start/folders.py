"""The output folders of a job: one that all nodes share, or several, each of one node or more (docs/adr/0008)."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import StorageError
from safepoint.foundation import clock
from safepoint.foundation.files import delete_tree, refresh
from safepoint.training.collective.collective_wait import on_all_ranks
from safepoint.training.collective.peers import Peers

_SHARED_WITHIN_S = 15.0
_SEPARATE_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Which ranks use which folder.

    Args:
        owners: the ranks that claim, commit to and upload from a folder, one rank for each folder, ascending.
        index: of this rank's folder, in `owners`.
        is_owner: whether this rank is the owner of its folder.
        owner_of: the first rank of each node → the owner of its folder.
    """

    owners: tuple[int, ...] = (0,)
    index: int = 0
    is_owner: bool = True
    owner_of: Mapping[int, int] = field(default_factory=lambda: {0: 0})

    @property
    def count(self) -> int:
        """How many folders there are."""
        return len(self.owners)

    @property
    def is_shared(self) -> bool:
        """Whether all ranks use one folder."""
        return self.count == 1


def find_folders(peers: Peers, output: OutputFolder, *, has_store: bool) -> Folders:
    """Find out which ranks see the same folder; a collective call.

    Args:
        peers: all ranks.
        output: the folder, by the path that this rank has for it.
        has_store: whether checkpoints are uploaded to an object store. Then nodes may have folders of their own.

    Raises:
        StorageError: a node cannot use its folder; or there are several folders, and no store.
    """
    place = peers.place
    token = peers.from_first(uuid.uuid4().hex)
    node_ranks = [rank for rank, is_first in enumerate(peers.gather(place.local_rank == 0)) if is_first]

    def create_probe() -> None:
        if place.rank in node_ranks:
            output.prepare()
            output.open_attempt(_probe(token, place.rank))

    on_all_ranks(peers, create_probe)
    within_s = _SEPARATE_AFTER_S if has_store else _SHARED_WITHIN_S
    seen = on_all_ranks(peers, lambda: _seen_probes(output, token, node_ranks, within_s))
    if place.rank in node_ranks:
        delete_tree(output.work / _probe(token, place.rank))
    owner_by_rank = owners_of(seen)
    refused = [rank for rank, owner in enumerate(owner_by_rank) if owner is None or (owner != 0 and not has_store)]
    if refused:
        hint = "all ranks of a node need one folder at the same path"
        if not has_store:
            hint = "all nodes need one shared folder, at the same path; or an object store: --output-dir s3://…"
        raise StorageError(
            f"rank(s) {', '.join(map(str, refused))} do not see the output folder {output.root} of rank 0; "
            "training was not started",
            hint=hint,
        )
    by_rank = [owner for owner in owner_by_rank if owner is not None]
    owners = tuple(sorted(set(by_rank)))
    own = by_rank[place.rank]
    return Folders(
        owners=owners,
        index=owners.index(own),
        is_owner=own == place.rank,
        owner_of={rank: by_rank[rank] for rank in node_ranks},
    )


def owners_of(seen: Sequence[Iterable[int]]) -> list[int | None]:
    """The owner of each rank's folder: the lowest of the ranks that see the same folder.

    Args:
        seen: by rank, the ranks whose probe folders it sees.

    Returns:
        By rank; None for a rank that sees no probe folder.
    """
    groups: list[set[int]] = []
    for rank, others in enumerate(seen):
        group = {rank, *others}
        overlapping = [known for known in groups if known & group]
        groups = [known for known in groups if not known & group]
        groups.append(group.union(*overlapping))
    # Only some ranks create a probe folder; the lowest of these in a group is the owner.
    probing = {rank for others in seen for rank in others}
    owner = {rank: min(group & probing, default=None) for group in groups for rank in group}
    return [owner[rank] if tuple(others) else None for rank, others in enumerate(seen)]


def _probe(token: str, rank: int) -> str:
    """The folder that a rank creates, so that other ranks can find out whether they see it."""
    return f"folder-of-{token}-{rank}"


def _seen_probes(output: OutputFolder, token: str, node_ranks: Sequence[int], within_s: float) -> list[int]:
    """The ranks whose probe folders appear; network file systems show a new name late, so this waits for all."""
    deadline = clock.monotonic_s() + within_s
    while True:
        refresh(output.work)
        seen = [rank for rank in node_ranks if (output.work / _probe(token, rank)).is_dir()]
        if len(seen) == len(node_ranks) or clock.monotonic_s() >= deadline:
            return seen
        clock.sleep(0.2)
