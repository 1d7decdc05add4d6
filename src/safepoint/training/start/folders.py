"""The output folders of a job: one folder for all nodes, or several folders for one or more nodes each
(docs/adr/0008)."""

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
        owners: the owner of each folder, in ascending order. The owner is the only rank that claims the folder,
            commits to it and uploads from it.
        index: the position in `owners` of the rank that owns this rank's folder.
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

    The first rank of each node creates a probe in its output folder. A probe is a folder with a unique name. Ranks
    that see the same probe use the same output folder.

    Args:
        peers: all ranks.
        output: the output folder, by its path on this rank.
        has_store: whether checkpoints are uploaded to an object store. If so, nodes may have folders of their own.

    Raises:
        StorageError: a node cannot use its folder, a rank sees none of the folders that the nodes use, or there are
            several folders and no store.
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
            f"these ranks do not see the output folder {output.root} of the other ranks: "
            f"{', '.join(map(str, refused))}; training was not started",
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
    """The owner of each rank's folder: the lowest rank that has created a probe folder there.

    Args:
        seen: for each rank, the ranks whose probe folders it sees.

    Returns:
        For each rank, the owner of its folder; None for a rank that sees no probe folder.
    """
    groups: list[set[int]] = []
    for rank, others in enumerate(seen):
        group = {rank, *others}
        overlapping = [known for known in groups if known & group]
        groups = [known for known in groups if not known & group]
        groups.append(group.union(*overlapping))
    # Only the first rank of each node creates a probe folder. The owner is the lowest such rank of a group.
    probing = {rank for others in seen for rank in others}
    owner = {rank: min(group & probing, default=None) for group in groups for rank in group}
    return [owner[rank] if tuple(others) else None for rank, others in enumerate(seen)]


def _probe(token: str, rank: int) -> str:
    """The name of the probe that a rank creates, so that other ranks can check whether they see this folder."""
    return f"folder-of-{token}-{rank}"


def _seen_probes(output: OutputFolder, token: str, node_ranks: Sequence[int], within_s: float) -> list[int]:
    """The ranks whose probe folders this rank sees.

    The function looks again until all probes are seen or `within_s` seconds are over, because network file systems
    show new names late.
    """
    deadline = clock.monotonic_s() + within_s
    while True:
        refresh(output.work)
        seen = [rank for rank in node_ranks if (output.work / _probe(token, rank)).is_dir()]
        if len(seen) == len(node_ranks) or clock.monotonic_s() >= deadline:
            return seen
        clock.sleep(0.2)
