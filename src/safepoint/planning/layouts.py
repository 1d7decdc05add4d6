"""Two layouts of the same GPUs side by side: few pods with many GPUs, or many pods with few.

The documents make this comparison in section 6.5 ("Consider the following two configurations for training with six
GPUs"). Here, the comparison shows the downloads, the local storage, the times of a start and of a resume, and the
traffic between pods.
"""

import math
from dataclasses import dataclass, replace

from safepoint.errors import UsageError
from safepoint.estimates.sizes import DTYPE_BYTES, Strategy
from safepoint.planning.storage import Run, StoragePlan, plan_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """One layout. A size is the total of all pods, unless its description names one pod.

    Args:
        plan: the plan of the run with this layout.
        model_bytes: the downloads of the model, one by each pod.
        documented_fetch_bytes: the bytes that a resume reads from the object store if each pod reads the whole
            checkpoint.
        fetch_bytes: the bytes that a resume of Safepoint reads: the nodes read disjoint parts.
        storage_bytes: the size of the emptyDir volumes to request.
        start_s: the time until each pod has the model.
        resume_s: the time until each pod also has the checkpoint.
        documented_resume_s: `resume_s` if each pod reads the whole checkpoint.
        step_bytes: the bytes that each pod sends to other pods in a step, to average gradients.
    """

    plan: StoragePlan
    model_bytes: int
    documented_fetch_bytes: int
    fetch_bytes: int
    storage_bytes: int
    start_s: float
    resume_s: float
    documented_resume_s: float
    step_bytes: int


def plan_layout(run: Run, *, nodes: int, gpus: int) -> LayoutPlan:
    """The layout of a run with this many pods, and this many GPUs in each."""
    training = replace(run.training, num_ranks=nodes * gpus)
    plan = plan_storage(replace(run, training=training, nodes=nodes, gpus=gpus))
    others = 0 if plan.other_pod is None else (nodes - 1) * plan.other_pod.volume_bytes
    times = plan.times
    return LayoutPlan(
        plan=plan,
        model_bytes=nodes * plan.weights_bytes,
        documented_fetch_bytes=nodes * plan.checkpoint_bytes,
        fetch_bytes=plan.checkpoint_bytes,
        storage_bytes=plan.first_pod.volume_bytes + others,
        start_s=times.model_s,
        resume_s=times.model_s + times.fetch_s,
        documented_resume_s=times.model_s + times.documented_fetch_s,
        step_bytes=_step_bytes(plan, nodes),
    )


def _step_bytes(plan: StoragePlan, nodes: int) -> int:
    """The bytes that a pod sends in a step, if the GPUs of a pod first reduce the gradients among themselves.

    A ring of n pods moves 2 (n - 1) / n of the gradients through each pod (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009). FSDP and ZeRO-3 also gather the weights twice, for the
    forward and the backward pass, and reduce gradients once: 3 (n - 1) / n (Rajbhandari et al., SC 2020, section 7).
    """
    training = plan.run.training
    gradients = plan.memory.gradients_bytes
    weights = plan.memory.weights_bytes
    if training.strategy.is_fsdp or training.strategy is Strategy.ZERO3:
        num_ranks = training.num_ranks
        moved = (gradients + 2 * weights) * num_ranks
        if training.strategy.is_fsdp and training.is_mixed:
            # Accelerate's policy for mixed precision gathers weights and reduces gradients in 16 bits, even if the
            # ranks hold them in 32 bits.
            num_trained = sum(math.prod(one.sizes) for one in training.trained)
            frozen = max(0, weights * num_ranks - num_trained * DTYPE_BYTES[training.trained_dtype])
            if DTYPE_BYTES[training.dtype] == 4 and not plan.run.is_quantized:
                frozen //= 2
            moved = 2 * num_trained + 2 * (2 * num_trained + frozen)
    else:
        # ZeRO-2 divides the gradients among the ranks, so each rank has only a part of them in memory.
        moved = 2 * gradients * (training.num_ranks if training.strategy is Strategy.ZERO2 else 1)
    return round(moved * (nodes - 1) / nodes)


def compare_layouts(run: Run, first: tuple[int, int], second: tuple[int, int]) -> tuple[LayoutPlan, LayoutPlan]:
    """Plan two layouts that have the same number of GPUs.

    Args:
        run: the training.
        first: the number of nodes, and the number of GPUs of each node.
        second: the same two numbers of the other layout.

    Raises:
        UsageError: the layouts have different numbers of GPUs.
    """
    (first_nodes, first_gpus), (second_nodes, second_gpus) = first, second
    if first_nodes * first_gpus != second_nodes * second_gpus:
        raise UsageError(
            f"--compare {first_nodes}x{first_gpus} {second_nodes}x{second_gpus}: the layouts have "
            f"{first_nodes * first_gpus} and {second_nodes * second_gpus} GPUs; nothing was computed",
            hint="compare layouts of the same number of GPUs, such as --compare 6x1 2x3",
        )
    return (
        plan_layout(run, nodes=first_nodes, gpus=first_gpus),
        plan_layout(run, nodes=second_nodes, gpus=second_gpus),
    )
