"""Finds the node of a job on which a rank runs. This module sends no requests."""

from collections.abc import Sequence

from safepoint.errors import NotFoundError, UsageError
from safepoint.jobs.cluster.objects import Object, at
from safepoint.jobs.cluster.pods.pod_fields import training_pods, variable_of


def place_of_rank(
    rank: int, trainjob: Object, pods: Sequence[Object], *, num_nodes: int, recorded: int | None
) -> int:
    """Check that a job has a rank, and return the index of the node that the rank runs on.

    Args:
        rank: the rank.
        trainjob: the TrainJob.
        pods: its pods.
        num_nodes: its number of nodes.
        recorded: the number of ranks in each pod, from the record of the job; None if the record does not state it.

    Raises:
        NotFoundError: the job has fewer ranks.
        UsageError: the job has several nodes, and it is not known how many ranks each node has.
    """
    ranks_per_node = num_ranks_per_node(trainjob, pods, recorded=recorded)
    if ranks_per_node is None:
        if num_nodes == 1:
            return 0
        raise UsageError(
            "--rank was not used, because it is not known how many ranks each pod has; nothing was printed",
            hint="leave --rank out: each line then begins with its node",
        )
    if rank >= num_nodes * ranks_per_node:
        raise NotFoundError(f"there is no rank {rank}: the job has {num_nodes * ranks_per_node} ranks, from 0")
    return rank // ranks_per_node


def num_ranks_per_node(trainjob: Object, pods: Sequence[Object], *, recorded: int | None) -> int | None:
    """How many ranks each pod has; None if the runtime or the program decides this."""
    from_pod = [variable_of(pod, "PET_NPROC_PER_NODE") for pod in training_pods(pods)[:1]]
    for found in (at(trainjob, "spec", "trainer", "numProcPerNode"), recorded, *from_pod):
        text = str(found)
        if text.isdecimal() and 0 < len(text) < 6 and int(text) > 0:
            return int(text)
    return None
