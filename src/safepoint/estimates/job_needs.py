"""Two types that jobs and plans share: the outline of a job, and its needs, which the plan of its model computes."""

from dataclasses import dataclass

TEMPLATE_BYTES = 600_000_000
"""The memory of a template (`safepoint run --preload`) that has imported torch, transformers and TRL.

525 MB were measured. Its ranks share these pages, so only the template is counted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutline:
    """The parts of a job's specification on which the needs of the job depend, before the job is submitted.

    Args:
        num_nodes: the number of pods.
        ranks_per_node: ranks in each pod; None if the runtime or the pod decides.
        is_remote: whether it saves to an object store. Each pod then has a local folder for checkpoints.
        num_kept: how many checkpoints the options of the run keep in the folder; None if they set no limit.
        is_unbounded: whether an option keeps checkpoints whose number has no bound, such as `every=1000`.
        snapshot_slots: how many snapshots host memory may hold; 0 for none, None if the run decides.
    """

    num_nodes: int = 1
    ranks_per_node: int | None = None
    is_remote: bool = False
    num_kept: int | None = None
    is_unbounded: bool = False
    snapshot_slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNeeds:
    """The needs of a job, computed before it is submitted. All sizes are bytes, all times seconds.

    Args:
        model: a text for people that names the model and its source.
        problem: why nothing could be computed for the model; empty if the other fields have values.
        training: a text for people with the assumptions about the training.
        checkpoint_bytes: the size of a checkpoint under these assumptions.
        most_bytes: an upper bound of the size of a checkpoint of this model, for all strategies.
        local_bytes: for a job with an object store, the size of a local folder in which all its checkpoints fit at
            any moment; None if the job has no such folder, or if it is not known how many checkpoints stay there.
        unlimited: why `local_bytes` must not be used as the size limit of the local folder; empty if it can be used.
        snapshot_bytes: the host memory that snapshots take on the first node; 0 if there are none.
        save_s: how long a save on SIGTERM takes; including the upload if the pod's folder is deleted with the pod.
        least_grace_s: the shortest grace period in which such a save fits.
    """

    model: str
    problem: str = ""
    training: str = ""
    checkpoint_bytes: int = 0
    most_bytes: int = 0
    local_bytes: int | None = None
    unlimited: str = ""
    snapshot_bytes: int = 0
    save_s: float = 0.0
    least_grace_s: int = 0
