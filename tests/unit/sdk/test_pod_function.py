"""Given to Kubeflow's own client, a trainer ships a source that survives its shell and runs under Safepoint."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client as kubernetes_client

from safepoint.sdk import PeriodicCheckpointConfig, TransformersTrainer
from safepoint.sdk.upstream import constants, types
from safepoint.sdk.upstream import trainer as kubeflow
from tests.support.jobs import environment


def train(out: str, text: str = "") -> None:
    """With $HOME, `id`, $(id) and \\ in it, as EOM.
    EOM
    """
    import os
    import sys
    from pathlib import Path

    found = {name: value for name, value in os.environ.items() if name.startswith("SAFEPOINT_")}
    under = "safepoint.training" in sys.modules
    Path(out).write_text(repr([text, "$HOME `id` \\ \N{SNOWMAN}", under, found.get("SAFEPOINT_SAVE_STEPS")]))


class Shell:
    """Runs what Kubeflow's backend would have a pod run, in a folder of its own, with Python in torchrun's place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "torchrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (folder / "torchrun").chmod(0o755)

    def run(self, trainer: TransformersTrainer, **env: str) -> "subprocess.CompletedProcess[str]":
        from kubeflow.trainer.backends.kubernetes import utils

        runtime_trainer = types.RuntimeTrainer(
            trainer_type=types.TrainerType.CUSTOM_TRAINER, framework="torch", image="image"
        )
        runtime_trainer.set_command(constants.TORCH_COMMAND)
        runtime = types.Runtime(
            name="torch-distributed", trainer=runtime_trainer, kind=types.RuntimeKind.CLUSTER_TRAINING_RUNTIME
        )
        described = utils.get_trainer_cr_from_custom_trainer(runtime, trainer)
        assert described.command is not None
        path = f"{self.folder}:{os.environ['PATH']}"
        return subprocess.run(
            described.command,
            cwd=self.folder,
            env=environment(PATH=path, **env),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_it_runs_under_safepoint_in_a_pod(shell: Shell, tmp_path: Path) -> None:
    """Through the shell that expands everything; arguments come Kubeflow's way, settings as variables."""
    out = tmp_path / "out"
    config = PeriodicCheckpointConfig(save_strategy="steps", save_steps=7)
    trainer = TransformersTrainer(train, {"out": str(out), "text": "ä 'x'"}, periodic_checkpoint_config=config)
    done = shell.run(trainer)
    assert done.returncode == 0, done.stderr
    assert eval(out.read_text()) == ["ä 'x'", "$HOME `id` \\ ☃", True, "7"]


def test_a_script_is_shipped_too(shell: Shell, tmp_path: Path) -> None:
    """Whole, and with its options."""
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text("import sys\nprint('ran `it` $0', sys.argv[1:], 'safepoint.training' in sys.modules)\n")
    done = shell.run(TransformersTrainer(str(script), {"lr": 0.1, "fp16": True}))
    assert done.returncode == 0, done.stderr
    assert "ran `it` $0 ['--lr', '0.1', '--fp16'] True" in done.stdout


def test_a_module_is_run_where_it_is(shell: Shell, tmp_path: Path) -> None:
    """The image has it."""
    (tmp_path / "in_the_image.py").write_text("import sys\nprint('ran', sys.argv[1:])\n")
    done = shell.run(TransformersTrainer("in_the_image", {"lr": 0.1}))
    assert "ran ['--lr', '0.1']" in done.stdout, done.stderr


@pytest.mark.parametrize("is_needed", [True, False])
def test_an_image_without_safepoint(shell: Shell, tmp_path: Path, is_needed: bool) -> None:
    """What was to be saved is not trained in vain; a plain training runs, with a warning."""
    out = tmp_path / "out"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'safepoint': raise ModuleNotFoundError(name)\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'safepoint' else find(name, package)\n"
    )
    trainer = TransformersTrainer(train, {"out": str(out)}, output_dir="saved" if is_needed else None)
    done = shell.run(trainer, PYTHONPATH=str(tmp_path))
    assert out.exists() is not is_needed, done.stderr
    assert (done.returncode != 0) is is_needed
    assert "Safepoint is not installed in this image" in done.stderr


def test_what_cannot_be_shipped_is_said_by_whoever_ships_it() -> None:
    """Not when the trainer is made: another client may do better."""
    trainer = TransformersTrainer(lambda: None)
    with pytest.raises(ValueError, match="a lambda cannot be sent to a job"):
        inspect.getsource(trainer.func)  # pyright: ignore


def test_the_source_means_nothing_to_a_shell() -> None:
    """No letter of it, whatever the training holds."""
    source = inspect.getsource(TransformersTrainer(train, {"out": "$x"}, output_dir="/data/$x`y`").func)  # pyright: ignore
    assert not set("$`\\") & set(source)
    assert "EOM" not in source


def test_kubeflows_client_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to what it sends to the cluster."""
    sent: dict[str, Any] = {}

    class Cluster:
        def create_namespaced_custom_object(self, *arguments: Any) -> None:
            sent.update(arguments[-1])

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    configuration = kubernetes_client.Configuration(host="http://127.0.0.1:1")
    backend_config = kubeflow.KubernetesBackendConfig(namespace="here", client_configuration=configuration)
    monkeypatch.setattr(kubernetes_client.CoreV1Api, "read_namespaced_config_map", lambda *_, **__: None)
    client = kubeflow.TrainerClient(backend_config)
    client.backend.custom_api = Cluster()
    trainer = types.RuntimeTrainer(trainer_type=types.TrainerType.CUSTOM_TRAINER, framework="torch", image="image")
    trainer.set_command(constants.TORCH_COMMAND)
    runtime = types.Runtime(
        name="torch-distributed", trainer=trainer, kind=types.RuntimeKind.CLUSTER_TRAINING_RUNTIME
    )
    client.train(
        runtime=runtime,
        trainer=TransformersTrainer(train, {"out": "x"}, num_nodes=2, resources_per_node={"gpu": 1}, image="mine"),
    )
    spec = sent["spec"]["trainer"]
    assert (spec["numNodes"], spec["image"]) == (2, "mine")
    assert "train(**{'out': 'x'})" in spec["command"][-1]
