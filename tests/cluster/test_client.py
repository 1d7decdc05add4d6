"""The SDK's guide example on a cluster, unchanged but for the import."""

from pathlib import Path

import pytest

from safepoint import PeriodicCheckpointConfig, TrainerClient, TransformersTrainer
from safepoint.sdk.upstream import KubernetesBackendConfig, kubernetes_options
from tests.support.blocked import Client
from tests.support.cluster.workspace import CLAIM, Workspace


def train(steps: int = 12, note: str = "") -> None:
    import time

    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.line(x) - labels) ** 2).mean()}

    class Slow(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            time.sleep(0.3)

    print(f"note: {note}")
    data = [{"x": torch.full((4,), float(n)), "labels": torch.tensor([float(n)])} for n in range(64)]
    arguments = TrainingArguments(
        output_dir="/tmp/output",
        max_steps=steps,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Slow()])
    trainer.train()
    trainer.save_model(f"{trainer.args.output_dir}/final")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Kubeflow's client is never closed
def test_a_training_function(team: Workspace) -> None:
    client = TrainerClient(
        KubernetesBackendConfig(namespace=team.namespace, config_file=str(team.cluster.kubeconfig))
    )
    runtime = client.backend.get_runtime("torch-distributed")
    name = client.train(
        trainer=TransformersTrainer(
            func=train,
            func_args={"steps": 100, "note": "a `b` $HOME \\ 'c'"},
            num_nodes=1,
            output_dir=f"pvc://{CLAIM}/run1",
            env={"UNSET": None, "SOME": "text"},
            periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="steps", save_steps=25),
        ),
        runtime=runtime,
        options=[kubernetes_options.Labels({"team": "a"})],
    )
    job = client.wait_for_job_status(name, {"Running"}, timeout=120)
    assert job.runtime.name == "torch-distributed"
    assert team.get("trainjob", name)["metadata"]["labels"]["team"] == "a"
    suspended = client.suspend_job(name, timeout=100)
    assert suspended.status == "Suspended"
    assert suspended.safe_step is not None
    client.resume_job(name)
    ended = client.wait_for_job_status(name, timeout=200)
    assert ended.status == "Complete"
    assert "note: a `b` $HOME \\ 'c'" in "\n".join(client.get_job_logs(name))
    assert (Path(team.folder) / "run1" / "final" / "model.safetensors").exists()
    assert [job.name for job in client.list_jobs()] == [name]
    client.delete_job(name)
    assert team.left() == []


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Kubeflow's client is never closed
def test_a_suspended_job_gets_more_nodes_when_it_is_resumed(team: Workspace) -> None:
    client = TrainerClient(
        KubernetesBackendConfig(namespace=team.namespace, config_file=str(team.cluster.kubeconfig))
    )
    name = client.train(
        trainer=TransformersTrainer(
            func=train,
            func_args={"steps": 200},
            num_nodes=1,
            output_dir=f"pvc://{CLAIM}/run1",
            env={"SAFEPOINT_ALLOW_BATCH_CHANGE": "1"},
        ),
        runtime="torch-distributed",
    )
    client.wait_for_job_status(name, {"Running"}, timeout=120)
    suspended = client.suspend_job(name, timeout=100)
    scaled = client.scale_job(name, num_nodes=2)
    assert (scaled.status, scaled.num_nodes) == ("Suspended", 2)
    assert team.get("trainjob", name)["spec"]["trainer"]["numNodes"] == 1
    client.resume_job(name)
    running = client.wait_for_job_status(name, {"Running"}, timeout=200)
    assert (running.num_nodes, running.creation_timestamp) == (2, suspended.creation_timestamp)
    assert [step.name for step in running.steps] == ["node-0", "node-1"]
    client.delete_job(name)
    assert team.left() == []


@pytest.mark.timeout(300)
def test_a_client_without_torch(team: Workspace, tmp_path: Path) -> None:
    """The commands and the SDK of a machine that never trains: a job is submitted, looked at, and its output read."""
    client, on = Client(tmp_path), ("--on", ".", "--namespace", team.namespace)
    (tmp_path / "train.py").write_text("import torch\nprint('torch', torch.__version__)\n")
    done = client.run("submit", *on, "--name", "far", "--output-dir", f"pvc://{CLAIM}/far", "train.py")
    assert done.returncode == 0, done.stderr
    code = (
        "from safepoint import KubernetesBackendConfig, TrainerClient\n"
        f"client = TrainerClient(KubernetesBackendConfig(namespace={team.namespace!r}))\n"
        "print(client.wait_for_job_status('far', timeout=120).status)\n"
        "print(*client.get_job_logs('far'), sep='')\n"
    )
    (tmp_path / "wait.py").write_text(code)
    done = client.python("wait.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Complete\n")
    assert "torch" in done.stdout
    assert "Complete" in client.run("list", *on).stdout
    assert client.run("checkpoints", "list", f"pvc://{CLAIM}/far", *on).returncode == 0
    assert client.run("delete", *on, "far", "--yes").returncode == 0
    assert team.left() == []
