"""Checks the content of a complete checkpoint before it is chosen, so that an invalid checkpoint can be passed over.

The digests of a checkpoint can be right although its files are invalid, for example if an attacker has written both.
If a fault is found here, the run resumes from an older checkpoint. If a fault is found only while a framework loads
the checkpoint, the run ends.

Not checked here: tensors, and the pickles that a framework loads, because these files would be read twice. If
metadata or the file of a rank name a forbidden function or class, the run ends, too: the class may be one of the
user's own, which the user has to allow.
"""

from safepoint.checkpoint.format.manifest import MAX_STEP
from safepoint.checkpoint.pickles.loading import ForbiddenNameError
from safepoint.errors import CheckpointError
from safepoint.training.collective.collective_wait import long_on_all_ranks
from safepoint.training.collective.peers import Peers
from safepoint.training.start.copies import Examine, ResumePoint
from safepoint.training.state.data_only import check_descriptions

_MOST_STEPS_RESUMED = MAX_STEP - 10**12
"""The highest step to resume from, so that later steps can be saved."""


def with_content(examine: Examine, peers: Peers) -> Examine:
    """A function that checks the content of a checkpoint, and then calls `examine`.

    If a check or `examine` raises CheckpointError, the function returns the message of the error as the reason.

    Args:
        examine: see `Examine`.
        peers: all ranks. The first rank checks the content.
    """

    def check(point: ResumePoint) -> None:
        step = point.manifest.step
        if step > _MOST_STEPS_RESUMED:
            raise CheckpointError(
                f"it states step {step}, and a run resumes from step {_MOST_STEPS_RESUMED} at most, because no step "
                f"after {MAX_STEP} can be saved"
            )
        if peers.place.is_first:
            check_descriptions(point.path, [entry.path for entry in point.manifest.files])

    def reason(point: ResumePoint) -> str:
        try:
            long_on_all_ranks(peers, lambda: check(point))
            return examine(point)
        except ForbiddenNameError:
            raise
        except CheckpointError as error:
            return error.message

    return reason
