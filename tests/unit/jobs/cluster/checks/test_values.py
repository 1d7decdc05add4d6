"""Values that no pod can start with are refused before anything is created."""

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.cluster.checks.values import check_pod_names, check_values
from safepoint.jobs.cluster.spec import ClusterSpec


def spec(**changes: object) -> ClusterSpec:
    values: dict[str, object] = {"name": "a", "program": ("train.py",), **changes}
    return ClusterSpec(**values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("memory", ["32Gi", "1.5Gi", "512M", "1e9", "128974848", "128974848000m", "16Mi", "16777216"])
def test_amounts_of_memory(memory: str) -> None:
    check_values(spec(resources={"memory": memory}))


@pytest.mark.parametrize(
    "memory", ["", "32GB", "-1Gi", "+1Gi", "1 Gi", "0", "0Gi", "1e1", "512", "512m", "15Mi", "Gi", "1e999"]
)
def test_other_amounts_of_memory(memory: str) -> None:
    with pytest.raises(UsageError, match=r"memory .*nothing was submitted"):
        check_values(spec(resources={"memory": memory}))


@pytest.mark.parametrize("resources", [{"cpu": "500m"}, {"cpu": "1.5"}, {"nvidia.com/gpu": "8"}])
def test_processors_and_devices(resources: dict[str, str]) -> None:
    check_values(spec(resources=resources))


@pytest.mark.parametrize("number", ["0.5", "500m", "0", "one", "1Ki"])
def test_devices_cannot_be_divided(number: str) -> None:
    with pytest.raises(UsageError, match=r"nvidia\.com/gpu .*nothing was submitted"):
        check_values(spec(resources={"nvidia.com/gpu": number}))


@pytest.mark.parametrize(
    "image",
    [
        *("pytorch", "pytorch:2.9", "quay.io/team/train:1.0-rc_1", "localhost:5000/a/b", "a.b/c__d/e-f", "Reg.io/a"),
        "quay.io/team/train@sha256:" + "0" * 64,
        "quay.io/team/train:1@sha256:" + "0" * 64,
    ],
)
def test_names_of_images(image: str) -> None:
    check_values(spec(image=image))


@pytest.mark.parametrize(
    "image", ["", " ", "a b", "a:", ":1", "a:1:2", "quay.io/Team/x", "docker://a", "a@sha256:0", "a//b", "a\n", "é"]
)
def test_other_names_of_images(image: str) -> None:
    with pytest.raises(UsageError, match="is not a valid name of an image; nothing was submitted"):
        check_values(spec(image=image))


@pytest.mark.parametrize("grace_s", [0, -1, 10**30])
def test_grace_periods_that_no_pod_has(grace_s: int) -> None:
    with pytest.raises(UsageError, match=r"grace period of .* is not possible"):
        check_values(spec(grace_s=grace_s))


@pytest.mark.parametrize("name", ["my train.py", "safepoint.pyz", "é.py", "a/b.py", "a" * 254])
def test_scripts_that_a_config_map_cannot_hold(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be sent under its name"):
        check_values(spec(files={name: b""}))


def test_variables_of_the_trainer() -> None:
    with pytest.raises(UsageError, match="PET_NNODES, which Kubeflow Trainer sets itself"):
        check_values(spec(env={"PET_NNODES": "2"}))


@pytest.mark.parametrize(("length", "num_nodes"), [(48, 1), (48, 10), (47, 11), (47, 100)])
def test_the_longest_names(length: int, num_nodes: int) -> None:
    """JobSet refuses longer names of pods: `NAME-node-0-9-12345` has at most 63 characters."""
    check_pod_names("a" * length, num_nodes, "node")
    with pytest.raises(UsageError, match=rf"too long.*(?s:.*)at most {length} characters"):
        check_pod_names("a" * (length + 1), num_nodes, "node")


def test_a_name_begins_with_a_letter() -> None:
    with pytest.raises(UsageError, match="begins with a digit"):
        check_pod_names("1a", 1, "node")
