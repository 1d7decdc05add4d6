"""`resources_per_node`, read as Kubernetes and Kubeflow Trainer read it, on this machine. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safepoint.foundation.quantities import parse_count
from safepoint.jobs.local.slots import Slots

_GPUS = ("gpu", "nvidia.com/gpu", "amd.com/gpu")
_MIG = ("mig-", "nvidia.com/mig-")
_WITHOUT_CASE = ("cpu", "memory", "gpu", "storage", "ephemeral-storage")
_UNLIMITED = ("memory", "storage", "ephemeral-storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """The share of this machine that one node of a job gets.

    Args:
        ranks: processes; one for each GPU that was asked for, else for each processor, as Kubeflow Trainer's
            `nproc_per_node: auto` has it.
        cpu: slots.
        gpu: devices.
        remarks: how that differs from the request, and why.
    """

    ranks: int
    cpu: int
    gpu: int
    remarks: tuple[str, ...] = ()


def share_for(resources: Mapping[str, Any] | None, *, num_nodes: int, machine: Slots) -> NodeShare:
    """The share of this machine that each node gets.

    Args:
        resources: `resources_per_node` of a trainer.
        num_nodes: how many nodes there are.
        machine: the slots of this machine.

    Raises:
        ValueError: a resource is invalid, or this machine does not have it.
    """
    asked = {_plain(name): value for name, value in (resources or {}).items()}
    gpus = {name: _count(name, asked.pop(name)) for name in list(asked) if name in _GPUS or name.startswith(_MIG)}
    cpus = _count("cpu", asked.pop("cpu")) if "cpu" in asked else 0
    requested = {name: count for name, count in gpus.items() if count}
    if len(requested) > 1:
        raise ValueError(
            f"resources_per_node has {' and '.join(sorted(requested))}; only one kind of GPU can be requested"
        )
    gpu = sum(requested.values())
    ranks = gpu or max(1, cpus)
    remarks: list[str] = []
    unlimited = sorted(name for name in asked if name in _UNLIMITED)
    if unlimited:
        remarks.append(f"{' and '.join(unlimited)} of resources_per_node is not limited on this machine")
    other = sorted(set(asked) - set(unlimited))
    if other:
        raise ValueError(f"resources_per_node has {', '.join(other)}, which this machine does not have; remove it")
    if gpu and not machine.gpu:
        name = next(iter(requested))
        remarks.append(f"this machine has no GPU for {name}: {gpu}; each node's {gpu} rank(s) run on the CPU")
        gpu = 0
    elif any(name.startswith(_MIG) for name in requested):
        raise ValueError(
            f"resources_per_node has {next(iter(requested))}: this machine cannot give a job a part of a GPU; "
            "request a whole one"
        )
    elif num_nodes * gpu > machine.gpu:
        raise ValueError(
            f"{num_nodes} node(s) with {gpu} GPU(s) need {num_nodes * gpu}, and this machine has {machine.gpu}; "
            "request fewer"
        )
    cpu = cpus or ranks
    if num_nodes * cpu > machine.cpu:
        remarks.append(
            f"{num_nodes} node(s) with {cpu} cpu need {num_nodes * cpu}, and this machine has {machine.cpu}: the "
            "ranks share them"
        )
    return NodeShare(ranks=ranks, cpu=cpu, gpu=gpu, remarks=tuple(remarks))


def _plain(name: str) -> str:
    lower = name.lower()
    return lower if lower in _WITHOUT_CASE or lower.startswith("mig-") else name


def _count(name: str, value: Any) -> int:
    try:
        return parse_count(value)
    except ValueError as error:
        raise ValueError(f"resources_per_node[{name!r}]: {error}") from error
