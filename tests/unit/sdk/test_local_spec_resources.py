"""How many ranks a node has, and what of its wishes this machine fulfils."""

from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.local.slots import Slots, check_size, remark_on
from safepoint.sdk.local.spec import share_for
from tests.support.job_values import job_spec

LAPTOP = Slots(cpu=8, gpu=0)
SERVER = Slots(cpu=64, gpu=4)


@pytest.mark.parametrize(
    ("resources", "machine", "ranks", "cpu", "gpu"),
    [
        (None, LAPTOP, 1, 1, 0),
        ({}, SERVER, 1, 1, 0),
        ({"cpu": 4}, LAPTOP, 4, 4, 0),
        ({"CPU": "4"}, LAPTOP, 4, 4, 0),
        ({"cpu": "2500m"}, LAPTOP, 3, 3, 0),
        ({"cpu": 0}, LAPTOP, 1, 1, 0),
        ({"cpu": 4}, SERVER, 4, 4, 0),
        ({"gpu": 2}, SERVER, 2, 2, 2),
        ({"gpu": "2", "cpu": "8"}, SERVER, 2, 8, 2),
        ({"nvidia.com/gpu": 1, "cpu": "4", "memory": "16Gi"}, SERVER, 1, 4, 1),
        ({"amd.com/gpu": 4}, SERVER, 4, 4, 4),
        ({"nvidia.com/gpu": 0, "cpu": 2}, SERVER, 2, 2, 0),
        ({"nvidia.com/gpu": 2, "memory": "128Gi", "cpu": "8"}, LAPTOP, 2, 8, 0),
        ({"mig-1g.5gb": 1}, LAPTOP, 1, 1, 0),
    ],
)
def test_ranks_as_kubeflow_counts_them(
    resources: dict[str, Any] | None, machine: Slots, ranks: int, cpu: int, gpu: int
) -> None:
    """One for each GPU, else one for each processor; without a GPU on the machine, ranks run on processors."""
    share = share_for(resources, machine=machine)
    assert (share.ranks, share.cpu, share.gpu) == (ranks, cpu, gpu)


@pytest.mark.parametrize(
    ("resources", "num_nodes", "machine", "remarks"),
    [
        ({"cpu": 4}, 2, LAPTOP, []),
        ({"cpu": 5}, 2, LAPTOP, ["the job requests 10 CPU slots, but this machine has only 8; the job still runs"]),
        ({"memory": "1Gi", "storage": "1Gi"}, 1, LAPTOP, ["memory and storage of resources_per_node is not limited"]),
        (
            {"gpu": 2},
            1,
            LAPTOP,
            ["resources_per_node has gpu=2, but this machine has no GPU; each node has 2 ranks, on the CPU"],
        ),
    ],
)
def test_what_is_not_as_asked_for_is_said(
    resources: dict[str, Any], num_nodes: int, machine: Slots, remarks: list[str]
) -> None:
    """A wish that cannot be fulfilled is no reason not to run."""
    share = share_for(resources, machine=machine)
    spec = job_spec(num_nodes=num_nodes, cpu_per_node=share.cpu, gpu_per_node=share.gpu)
    said = [*share.remarks, *filter(None, [remark_on(spec, machine)])]
    assert len(said) == len(remarks)
    assert all(text.startswith(remark) for text, remark in zip(said, remarks, strict=True))


@pytest.mark.parametrize(
    ("resources", "num_nodes", "machine", "message"),
    [
        ({"gpu": 3}, 2, SERVER, "the job needs 6 GPU slots, and this machine has 4"),
        ({"gpu": 1, "amd.com/gpu": 1}, 1, SERVER, "one kind of GPU"),
        ({"mig-1g.5gb": 1}, 1, SERVER, "cannot use a part of a GPU"),
        ({"google.com/tpu": 4}, 1, LAPTOP, "google.com/tpu, which this machine does not have"),
        ({"cpu": "many"}, 1, LAPTOP, r"resources_per_node\['cpu'\]: 'many' is not a quantity"),
        ({"nvidia.com/gpu": -1}, 1, LAPTOP, "is not a quantity"),
    ],
)
def test_what_would_be_another_training_is_refused(
    resources: dict[str, Any], num_nodes: int, machine: Slots, message: str
) -> None:
    """Fewer GPUs than asked for are another number of ranks."""

    def check() -> None:
        share = share_for(resources, machine=machine)
        check_size(job_spec(num_nodes=num_nodes, gpu_per_node=share.gpu), machine)

    with pytest.raises((ValueError, UsageError), match=message):
        check()
