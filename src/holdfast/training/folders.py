"""The output folders of a job: one that all nodes share, or one on every node (docs/adr/0008)."""

import uuid
from dataclasses import dataclass

from holdfast.checkpoint.output_folder import OutputFolder
from holdfast.errors import HoldfastError, StorageError
from holdfast.foundation.files import delete_tree
from holdfast.training.peers import Peers

_SHARED_WITHIN_S = 15.0
_SEPARATE_AFTER_S = 3.0


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
    """Find out whether all nodes see the same folder; a collective call.

    Args:
        peers: all ranks.
        output: the folder, by the path that this rank has for it.
        has_store: whether an object store stands behind it, so that nodes may have folders of their own.

    Raises:
        StorageError: the first rank cannot use its folder; or nodes do not see it, and there is no store.
    """
    token, problem = "", None
    if peers.place.is_first:
        token = f"meet-{uuid.uuid4().hex}"
        try:
            output.prepare()
            output.open_attempt(token)
        except HoldfastError as error:
            problem = error
        except OSError as error:
            problem = StorageError(f"the output folder {output.root} cannot be written: {error}")
    token, problem = peers.from_first((token, problem))
    if problem is not None:
        raise problem
    # Network file systems show a new name late; a folder of a node's own does not show it at all.
    sees = output.sees_attempt(token, wait_s=_SEPARATE_AFTER_S if has_store else _SHARED_WITHIN_S)
    answers = peers.gather((sees, peers.place.local_rank == 0))
    if peers.place.is_first:
        delete_tree(output.work / token)
    blind = [rank for rank, (sees, _) in enumerate(answers) if not sees]
    if not blind:
        return Folders(is_owner=peers.place.is_first)
    if not has_store:
        raise StorageError(
            f"rank(s) {', '.join(map(str, blind))} do not see the output folder {output.root} of rank 0; "
            "training was not started",
            hint="all nodes need one shared folder, at the same path; or an object store: --output-dir s3://…",
        )
    owners = tuple(rank for rank, (_, is_first_of_node) in enumerate(answers) if is_first_of_node)
    rank = peers.place.rank
    index = sum(owner <= rank for owner in owners) - 1  # ranks of a node are neighbours
    return Folders(owners=owners, index=index, is_owner=rank in owners)


__all__ = ["Folders", "find_folders"]
