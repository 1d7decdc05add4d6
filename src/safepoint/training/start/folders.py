"""The output folders of a job: one that all nodes share, or several, each of one node or more (docs/adr/0008)."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import StorageError
from safepoint.foundation import clock
from safepoint.foundation.files import delete_tree
from safepoint.training.collective.collective_wait import agree
from safepoint.training.collective.peers import Peers

_SHARED_WITHIN_S = 15.0
_SEPARATE_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Who keeps which folder.

    Args:
        owners: the ranks that claim, commit to and upload from a folder, one rank for each folder, ascending.
        index: this rank's folder.
        is_owner: whether this rank owns it.
    """

    owners: tuple[int, ...] = (0,)
    index: int = 0
    is_owner: bool = True

    @property
    def count(self) -> int:
        """How many folders there are."""
        return len(self.owners)

    @property
    def is_shared(self) -> bool:
        """Whether all ranks see one folder."""
        return self.count == 1


def find_folders(peers: Peers, output: OutputFolder, *, has_store: bool) -> Folders:
    """Find out which ranks see the same folder; a collective call.

    Args:
        peers: all ranks.
        output: the folder, by the path that this rank has for it.
        has_store: whether an object store stands behind it, so that nodes may have folders of their own.

    Raises:
        StorageError: a node cannot use its folder; or there are several, and no store.
    """
    place = peers.place
    token = peers.from_first(uuid.uuid4().hex)
    leaders = [rank for rank, is_leader in enumerate(peers.gather(place.local_rank == 0)) if is_leader]

    def sign() -> None:
        if place.rank in leaders:
            output.prepare()
            output.open_attempt(_sign(token, place.rank))

    agree(peers, sign)
    within_s = _SEPARATE_AFTER_S if has_store else _SHARED_WITHIN_S
    answers = agree(peers, lambda: _seen_signs(output, token, leaders, within_s))
    if place.rank in leaders:
        delete_tree(output.work / _sign(token, place.rank))
    owner_of = owners_of(answers)
    blind = [rank for rank, owner in enumerate(owner_of) if owner is None or (owner != 0 and not has_store)]
    if blind:
        hint = "all ranks of a node need one folder at the same path"
        if not has_store:
            hint = "all nodes need one shared folder, at the same path; or an object store: --output-dir s3://…"
        raise StorageError(
            f"rank(s) {', '.join(map(str, blind))} do not see the output folder {output.root} of rank 0; "
            "training was not started",
            hint=hint,
        )
    owners = tuple(sorted({owner for owner in owner_of if owner is not None}))
    own = owner_of[place.rank]
    assert own is not None
    return Folders(owners=owners, index=owners.index(own), is_owner=own == place.rank)


def owners_of(answers: Sequence[Iterable[int]]) -> list[int | None]:
    """From whose signs each rank sees to the owner of its folder: the lowest of all that see the same one.

    Args:
        answers: by rank, the ranks whose signs it sees.

    Returns:
        By rank; None for one that sees no sign.
    """
    group = list(range(len(answers)))

    def find(rank: int) -> int:
        while group[rank] != rank:
            rank = group[rank]
        return rank

    for rank, seen in enumerate(answers):
        for other in seen:
            low, high = sorted((find(rank), find(other)))
            group[high] = low
    # The lowest rank of a group is not always one that signed: then the lowest that did is the owner.
    signed = {rank for seen in answers for rank in seen}
    owner = {root: min(rank for rank in signed if find(rank) == root) for root in {find(rank) for rank in signed}}
    return [owner.get(find(rank)) if tuple(answers[rank]) else None for rank in range(len(answers))]


def _sign(token: str, rank: int) -> str:
    return f"meet-{token}-{rank}"


def _seen_signs(output: OutputFolder, token: str, leaders: Sequence[int], within_s: float) -> list[int]:
    """Network file systems show a new name late; a folder of a node's own does not show it at all."""
    deadline = clock.monotonic_s() + within_s
    while True:
        seen = [rank for rank in leaders if (output.work / _sign(token, rank)).is_dir()]
        if len(seen) == len(leaders) or clock.monotonic_s() >= deadline:
            return seen
        clock.sleep(0.2)
