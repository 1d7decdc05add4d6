"""How many GPUs and processor cores each pod of a job has. This module sends no requests."""

import contextlib
from collections.abc import Sequence
from typing import Any

from safepoint.foundation.quantities import parse_count
from safepoint.jobs.cluster.objects import Object, at, texts
from safepoint.jobs.cluster.pods.pod_fields import node_container, training_pods

_MOST = 1 << 20
_GPUS = ("nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi")


def devices_of(trainer: Any, pods: Sequence[Object]) -> tuple[int | None, int | None]:
    """The numbers of GPUs and of processor cores of each pod; None for a number that is not known.

    Args:
        trainer: the field `spec.trainer` of the TrainJob, which may state the resources.
        pods: the pods of the job. They have the resources of the runtime if the TrainJob states no resources.
    """
    found = [at(trainer, "resourcesPerNode")]
    found += [at(node_container(pod), "resources") for pod in training_pods(pods)[:1]]
    stated = [{**texts(one, "requests"), **texts(one, "limits")} for one in found]
    none: dict[str, str] = {}
    chosen = next(filter(None, stated), none)
    return _count(chosen, _GPUS), _count(chosen, ("cpu",))


def _count(resources: dict[str, str], names: Sequence[str]) -> int | None:
    for name in names:
        with contextlib.suppress(ValueError):
            if name in resources:
                return min(_MOST, parse_count(str(resources[name])))
    return None
