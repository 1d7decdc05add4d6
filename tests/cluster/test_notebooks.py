"""Notebooks in a real Jupyter kernel, with the calls of Red Hat's published examples.

docs/notebooks.md lists what the published ones need; they ran once. These have a text of their own.
"""

import ast
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset

from tests.cluster.test_doctor import user
from tests.ranks.test_first_job import check_first_job
from tests.support.cluster.workspace import Workspace, apply, queue_objects
from tests.support.deepspeed import deepspeed_variables, skip_without_deepspeed
from tests.support.moto_server import moto_server
from tests.support.notebook import Kernel, cells, executed, kernel, outputs
from tests.support.tiny_model import save_tiny_model

NOTEBOOKS = Path(__file__).parents[1] / "programs" / "notebooks"
FIRST_JOB = NOTEBOOKS.parents[2] / "examples" / "first_job.ipynb"
STRATEGIES = NOTEBOOKS.parent / "strategies.py"
TEXTS = [f"hello number {n}, how are you today?" for n in range(32)]
EVERYTHING = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def workbench(team: Workspace, tmp_path: Path) -> Iterator[Workspace]:
    """A model and data on the claim, and the variables of a workbench: its user's token, and its own mount."""
    save_tiny_model(team.folder / "models" / "tiny", TEXTS)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(team.folder / "models" / "tiny")
    rows = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=16)
    Dataset.from_dict({**rows, "labels": rows["input_ids"]}).save_to_disk(str(team.folder / "data" / "texts"))
    (team.folder / "lib").mkdir()
    shutil.copy(STRATEGIES, team.folder / "lib")
    with pytest.MonkeyPatch.context() as patch:
        document = json.loads(user(team, tmp_path, EVERYTHING).read_text())
        patch.setenv("NOTEBOOK_USER_TOKEN", document["users"][0]["user"]["token"])
        patch.setenv("OPENSHIFT_API_URL", document["clusters"][0]["cluster"]["server"])
        patch.setenv("WORKBENCH_MOUNT", str(team.folder))
        # Kubeflow's client takes its namespace from the current context, and in a workbench from the service account.
        document["contexts"][0]["context"]["namespace"] = team.namespace
        place = tmp_path / "workbench.kubeconfig"
        place.write_text(json.dumps(document))
        patch.setenv("KUBECONFIG", str(place))
        _let_read_runtimes(team)
        yield team


def _let_read_runtimes(team: Workspace) -> None:
    """The runtimes belong to the cluster."""
    api, name = "rbac.authorization.k8s.io", f"runtimes-{team.namespace}"
    rules = [
        {
            "apiGroups": ["trainer.kubeflow.org"],
            "resources": ["clustertrainingruntimes"],
            "verbs": ["get", "list"],
        }
    ]
    role = {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules}
    subject = {"kind": "ServiceAccount", "name": "person", "namespace": team.namespace}
    binding = {
        "apiVersion": f"{api}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "subjects": [subject],
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": name},
    }
    apply(team.cluster, [role, binding])


@pytest.fixture
def notebook(workbench: Workspace, tmp_path: Path) -> Iterator[Kernel]:
    with kernel(tmp_path, dict(os.environ)) as running:
        printed = running.run_all(NOTEBOOKS / "connect.py")
        assert "runtime torch-distributed" in printed
        yield running


def final_of(team: Workspace, place: str = "checkpoints/run") -> list[str]:
    return sorted(path.name for path in (team.folder / place / "final").iterdir())


def test_a_claim(notebook: Kernel, team: Workspace) -> None:
    """Options of both kinds beside Safepoint's own, logs from the first moment, the final model in the workbench."""
    printed = notebook.run_all(NOTEBOOKS / "claim.py")
    assert "submitted fine-tuning" in printed
    assert "note a `b` $HOME \\ 'c'; unset False; also [" in printed
    assert "shared memory 100 MiB" in printed
    assert "final model in /mnt/kubeflow-checkpoints/checkpoints/run/final" in printed
    assert "status Complete nodes 2 runtime torch-distributed created 20" in printed
    [folders] = [line for line in printed.splitlines() if line.startswith("folders ")]
    assert ast.literal_eval(folders.removeprefix("folders ")) == ["checkpoint-14", "checkpoint-16", "final"] or (
        "final" in folders and folders.count("checkpoint-") == 2
    )
    assert "tokens " in printed
    assert printed.splitlines()[-1] == "jobs []"
    assert team.left_at_last() == _of_the_workbench(team)


def _of_the_workbench(team: Workspace) -> list[str]:
    return [name for name in team.left() if "person" in name]


@pytest.mark.long
def test_a_bucket(notebook: Kernel, team: Workspace, tmp_path: Path) -> None:
    """A claim beside it, mounted by a patch; the final model comes back with the tokenizer."""
    with moto_server(tmp_path, team.cluster.host) as moto:
        keys = {
            "AWS_ACCESS_KEY_ID": moto.keys[0],
            "AWS_SECRET_ACCESS_KEY": moto.keys[1],
            "AWS_S3_ENDPOINT": moto.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_S3_BUCKET": moto.bucket,
        }
        metadata = {"name": "s3-storage-connection", "namespace": team.namespace}
        apply(team.cluster, [{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys}])
        variables = {"BUCKET": moto.bucket, "ENDPOINT": moto.endpoint, "KEY": moto.keys[0], "SECRET": moto.keys[1]}
        notebook.run(f"os.environ.update({variables!r})")
        printed = notebook.run_all(NOTEBOOKS / "object_store.py")
    assert "status Complete" in printed
    [found] = [line for line in printed.splitlines() if line.startswith("downloaded ")]
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(ast.literal_eval(found[11:]))
    assert "vocabulary" in printed


@pytest.mark.long
def test_fsdp(notebook: Kernel, team: Workspace) -> None:
    printed = notebook.run_all(NOTEBOOKS / "sharded.py")
    assert "status Complete" in printed, printed
    checkpoints = [
        path for path in (team.folder / "checkpoints/run").iterdir() if path.name.startswith("checkpoint-")
    ]
    assert all((path / "pytorch_model_fsdp_0").is_dir() for path in checkpoints)
    # The Trainer itself writes no weights to other folders while the state is sharded.
    assert "tokenizer.json" in final_of(team)


@pytest.mark.long
def test_zero(notebook: Kernel, team: Workspace) -> None:
    skip_without_deepspeed("zero2")
    variables = deepspeed_variables()
    shutil.copytree(variables["TORCH_EXTENSIONS_DIR"], team.folder / "torch_extensions")
    notebook.run(f"os.environ['DEEPSPEED_PATH'] = {variables['PYTHONPATH'].partition(os.pathsep)[0]!r}")
    printed = notebook.run_all(NOTEBOOKS / "zero.py")
    assert "status Complete" in printed, printed
    assert {"model.safetensors", "tokenizer.json"} <= set(final_of(team))


@pytest.mark.long
def test_adapters(notebook: Kernel, team: Workspace) -> None:
    """Suspended and resumed, with a function that looks for its checkpoint itself."""
    printed = notebook.run_all(NOTEBOOKS / "adapters.py")
    assert "status Complete" in printed, printed
    assert "last checkpoint /mnt/kubeflow-checkpoints/adapters/run/checkpoint-" in printed
    assert ": True" in printed
    assert "adapter of step" in printed
    assert "adapter PeftModelForCausalLM" in printed
    assert {"adapter_model.safetensors", "tokenizer.json"} <= set(final_of(team, "adapters/run"))


@pytest.mark.long
def test_a_queue(notebook: Kernel, team: Workspace) -> None:
    """Its logs are waited for while it waits in the queue."""
    apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    printed = notebook.run_all(NOTEBOOKS / "queue.py")
    assert "refused: there is no queue none" in printed
    assert "at first Queued" in printed or "at first Starting" in printed
    assert "status Complete step 16 of 16" in printed, printed


@pytest.mark.long
def test_the_first_job(workbench: Workspace, tmp_path: Path) -> None:
    """The notebook of the examples, with the cluster in place of this machine."""
    connected = "\n".join(cells(NOTEBOOKS / "connect.py"))
    connected += '\noutput = "pvc://checkpoints/first-job"\n'
    document = executed(FIRST_JOB, tmp_path, dict(os.environ), replaced={"client": connected})
    step = check_first_job(document)
    assert f"step {step}" in str(outputs(document, "suspend"))
    assert final_steps(workbench) == [100, 120]


def final_steps(team: Workspace) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (team.folder / "first-job").glob("checkpoint-*"))
