"""The ranks of a node that hold the same model copy its snapshots together.

One rank, the lead, captures the state and has its files in its blocks, as if it were alone. It tells the others, its
helpers, which bytes of which tensor belong where in these blocks; each copies its part from its own device, beside
its own next step. The snapshot is staged when all have reported.

Nothing depends on the belief that all ranks hold the same bytes: each helper sums up what it copies, the lead sums up
the same bytes of its own tensors, and a snapshot whose sums differ is given up. The first snapshot into any block is
a rehearsal: the lead copies everything, helpers take sums and map their part of the block. So ranks that never hold
the same bytes, or cannot reach the memory, cost no snapshot. Whatever goes wrong ends the sharing for good.

A block is not used again before every helper has reported on its last use, or is gone.

Here: what a rank asks of its team, and the words the two sides share. The two sides are in
`team_lead` and `team_helper`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from safepoint.snapshot.images.image import Piece
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Placed

NOTHING, REHEARSE, COPY = "nothing", "rehearse", "copy"
"""What a helper is told to do with a snapshot."""


class Arrangement(NamedTuple):
    """What a rank stages of a snapshot.

    Args:
        placed: its own files; of those that are shared, its part.
        windows: its parts of another rank's files.
        summed: of what sums are taken.
    """

    placed: Sequence[Placed]
    windows: Sequence[Placed] = ()
    summed: Sequence[Piece] = ()


class Ending(NamedTuple):
    """What became of a snapshot over all ranks that copy it.

    Args:
        is_whole: whether everything is there.
        why: what is wrong with it, where somebody should be told.
    """

    is_whole: bool
    why: str = ""


class Team(Protocol):
    """This rank among those that copy snapshots together; one snapshot at a time, on all of them."""

    def arrange(self, number: int, placed: Sequence[Placed], guard: Guard | None) -> Arrangement:
        """Decide, or hear, who copies what.

        Args:
            number: of the snapshot, the same on all ranks.
            placed: this rank's files.
            guard: knows what only optimizers change.

        Raises:
            CannotHelpError: this rank was to copy what it does not have.
        """
        ...

    def begun(self, number: int) -> None:
        """What was arranged is being staged."""
        ...

    def settle(self, number: int) -> None:
        """If this snapshot has not begun here, it will not: nobody is to wait for it."""
        ...

    def ended(self, number: int, sums: Sequence[int] | None) -> Ending:
        """This rank's part is staged; called on the copying thread, and may wait for others there.

        Args:
            number: of the snapshot.
            sums: of `Arrangement.summed`; None when this rank's part is not whole.
        """
        ...

    def close(self) -> None:
        """Nothing is copied any more."""
        ...
