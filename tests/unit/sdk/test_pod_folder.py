"""Functions written for a pod find their folder on this machine, or are refused with the way to make it."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.sdk import LocalConfig, PeriodicCheckpointConfig, TrainerClient, TransformersTrainer
from safepoint.sdk.local import pod_folder
from safepoint.sdk.local.spec import local_job
from safepoint.sdk.trainers import own_trainer
from safepoint.sdk.upstream import kubernetes_options as options
from safepoint.sdk.upstream import trainer as kubeflow
from safepoint.sdk.upstream import types


def train(path: str = "") -> None:
    print(path)


@pytest.fixture
def folder(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of pods, below a folder of the test."""
    (machine / "mnt").mkdir()
    monkeypatch.setattr(pod_folder, "POD_FOLDER", str(machine / "mnt" / "kubeflow-checkpoints"))
    return machine / "mnt" / "kubeflow-checkpoints"


def submit(folder: Path, output: str | None = "pvc://claim/run", **config: Any) -> None:
    config = config or {"pvc": {"claim": folder.parent.parent / "claim"}}
    local_job(
        TransformersTrainer(train, {"path": f"{folder}/models"}, output_dir=output), LocalConfig(**config), None
    )


def test_the_claim_is_where_pods_have_it(folder: Path) -> None:
    """By a link, which the next job of the same claim uses too."""
    submit(folder)
    assert os.path.realpath(folder) == str(folder.parent.parent / "claim")
    submit(folder)
    submit(folder, output=None)
    with pytest.raises(UsageError, match=r"output_dir is on a claim, whose folder in .* is .*other.*sudo ln -sfn"):
        submit(folder, pvc={"claim": folder.parent.parent / "other"})


def test_a_job_that_does_not_use_it_needs_no_link(folder: Path) -> None:
    """Nothing is made."""
    local_job(TransformersTrainer(train, output_dir="out"), LocalConfig(), None)
    assert not os.path.lexists(folder)


def test_without_a_claim(folder: Path) -> None:
    """A folder of the user's cache; a folder that exists is used as it is."""
    submit(folder, output=None)
    assert os.path.realpath(folder).endswith("cache/safepoint/kubeflow-checkpoints")
    folder.unlink()
    folder.mkdir()
    submit(folder, output=None)
    assert not folder.is_symlink()


def test_a_link_that_cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command."""
    monkeypatch.setattr(pod_folder, "POD_FOLDER", str(folder.parent / "missing" / "kubeflow-checkpoints"))
    with pytest.raises(UsageError, match=r"the function uses .*sudo ln -s .*claim .*missing/kubeflow-checkpoints"):
        submit(folder.parent / "missing" / "kubeflow-checkpoints", pvc={"claim": folder.parent / "claim"})


def test_what_a_patch_mounts(machine: Path) -> None:
    """At a folder that is there it has no effect; otherwise it is refused."""
    client = TrainerClient(LocalConfig())

    def patch(path: str) -> Any:
        container = options.ContainerPatch(name="node", volume_mounts=[{"name": "data", "mountPath": path}])
        pod = options.PodTemplatePatch(spec=options.PodSpecPatch(containers=[container]))
        template = options.JobTemplatePatch(spec=options.JobSpecPatch(template=pod))
        jobs = options.JobSetSpecPatch(replicated_jobs=[options.ReplicatedJobPatch(name="node", template=template)])
        spec = options.TrainingRuntimeSpecPatch(template=options.JobSetTemplatePatch(spec=jobs))
        return options.RuntimePatch(training_runtime_spec=spec)

    with pytest.raises(ValueError, match=r"RuntimePatch mounts a volume at /no/such/folder.*sudo ln -s"):
        client.train(trainer=TransformersTrainer(train), options=[patch("/no/such/folder")])
    assert client.list_jobs() == []
    pod_folder.check_mounts(patch("/dev/shm"))


def fork(name: str) -> type:
    """A trainer as Red Hat's version has it: a class of its own module, which does not derive from Kubeflow's."""
    kind = dataclasses.make_dataclass(
        name,
        [
            ("func", Any),
            ("func_args", Any, None),
            ("num_nodes", Any, None),
            ("output_dir", Any, None),
            ("periodic_checkpoint_config", Any, None),
            ("a_new_field", Any, 3),
        ],
    )
    kind.__module__ = "kubeflow.trainer.rhai.transformers"
    return kind


def test_a_trainer_of_red_hats_class(machine: Path) -> None:
    """It becomes one of Safepoint; other trainers of theirs are refused."""
    theirs = fork("TransformersTrainer")(
        train, {"path": "x"}, output_dir="out", periodic_checkpoint_config=PeriodicCheckpointConfig("no")
    )
    own = own_trainer(theirs)
    assert isinstance(own, TransformersTrainer)
    assert (own.function, own.func_args, own.run_settings().save_strategy) == (train, {"path": "x"}, "no")
    client = TrainerClient(LocalConfig())
    with pytest.raises(ValueError, match="OtherTrainer of Red Hat's SDK is not supported"):
        client.train(trainer=fork("OtherTrainer")(train))
    trainer = kubeflow.CustomTrainer(func=train)
    assert own_trainer(trainer) is trainer
    assert isinstance(trainer, types.CustomTrainer)
