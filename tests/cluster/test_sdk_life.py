"""The SDK's guide example on a cluster, unchanged but for the import: each ends as the same job on this machine.

The function is that of Red Hat's article, with the paths of its model and data as arguments. Arguments that need CUDA
are left out, and the model is tiny. On the cluster it is suspended and resumed; on this machine it trains without an
interruption. The weights are equal, bit by bit.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from safepoint import LocalConfig, PeriodicCheckpointConfig, TrainerClient, TransformersTrainer
from safepoint.sdk.upstream import KubernetesBackendConfig, kubernetes_options
from safepoint.storage.store import Store
from tests.support import ceph_rgw
from tests.support.certificates import make_certificates
from tests.support.cluster.workspace import CLAIM, Workspace, apply
from tests.support.jobs_local import jobs_in
from tests.support.tiny_model import save_tiny_model
from tests.support.tls_proxy import tls_in_front_of

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Kubeflow's client is not closed
]
TEXTS = [f"### Instruction:\nSay {n}.\n\n### Response:\n{n}, {n + 1}, {n * n}" for n in range(48)]
CONNECTION = "s3-storage-connection"
MOUNT = "/mnt/kubeflow-checkpoints"
checkpoint_config = PeriodicCheckpointConfig(save_strategy="steps", save_steps=8, save_total_limit=2)


def train_func(model_path, dataset_path, step_s):
    """The article's; a step can be made longer."""
    import time

    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments
    from trl import SFTTrainer

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(step_s)

    model = AutoModelForCausalLM.from_pretrained(model_path, torch_dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    dataset = load_from_disk(dataset_path)
    training_args = TrainingArguments(
        output_dir="/tmp/output",
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-5,
        bf16=True,
        use_cpu=True,
        logging_steps=5,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Slow()],
    )
    trainer.train()


def train_adapters(model_path, dataset_path, step_s):
    """The same with LoRA."""
    import time

    from datasets import load_from_disk
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments
    from trl import SFTTrainer

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(step_s)

    model = AutoModelForCausalLM.from_pretrained(model_path, torch_dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    training_args = TrainingArguments(
        output_dir="/tmp/output",
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-5,
        use_cpu=True,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=load_from_disk(dataset_path),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
        callbacks=[Slow()],
    )
    trainer.train()


def train_sharded(model_path, dataset_path, step_s, helpers):
    """The same with FSDP2."""
    import os
    import sys
    import time

    sys.path.insert(0, helpers)
    from datasets import load_from_disk
    from strategies import arguments_for
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(step_s)

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = load_from_disk(dataset_path).map(
        lambda row: tokenizer(row["text"], padding="max_length", truncation=True, max_length=32),
        remove_columns=["text"],
    )
    rows = rows.map(lambda row: {"labels": row["input_ids"]})
    training_args = TrainingArguments(
        output_dir="/tmp/output",
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-5,
        report_to="none",
        **arguments_for("fsdp-full", "Qwen2DecoderLayer"),
    )
    model = AutoModelForCausalLM.from_pretrained(model_path)
    trainer = Trainer(model=model, args=training_args, train_dataset=rows, callbacks=[Slow()])
    trainer.train()
    trainer.save_model(os.path.join(trainer.args.output_dir, "final"))


FUNCTIONS = {"ddp": train_func, "lora": train_adapters, "fsdp2": train_sharded}


def arguments(root: str, step_s: float, strategy: str) -> dict[str, Any]:
    """Of the function, for a model and data below `root`."""
    given = {"model_path": f"{root}/models/tiny", "dataset_path": f"{root}/data/texts", "step_s": step_s}
    return given | ({"helpers": f"{root}/lib"} if strategy == "fsdp2" else {})


@pytest.fixture
def shared(team: Workspace) -> Workspace:
    """A model and data on the claim."""
    save_tiny_model(team.folder / "models" / "tiny", TEXTS)
    Dataset.from_dict({"text": TEXTS}).save_to_disk(str(team.folder / "data" / "texts"))
    (team.folder / "lib").mkdir()
    strategies = Path(__file__).parents[1] / "programs" / "strategies.py"
    (team.folder / "lib" / "strategies.py").write_text(strategies.read_text())
    return team


def on_this_machine(team: Workspace, folder: Path, strategy: str) -> dict[str, str]:
    """Train without an interruption, with the same number of ranks; returns the digests of the final files."""
    with jobs_in(folder):
        client = TrainerClient(LocalConfig())
        name = client.train(
            trainer=TransformersTrainer(
                func=FUNCTIONS[strategy],
                func_args=arguments(str(team.folder), 0.0, strategy),
                num_nodes=2,
                resources_per_node={"cpu": 1},
                env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                output_dir=str(folder / "out"),
                periodic_checkpoint_config=checkpoint_config,
            )
        )
        client.wait_for_job_status(name, timeout=400)
    return digests({path.name: path.read_bytes() for path in weights_in(folder / "out")})


def weights_in(output: Path) -> Iterator[Path]:
    """The weights of the final model, which lie in its folder, or in the last checkpoint where nothing saves them."""
    final = output / "final"
    place = final if final.is_dir() else max(output.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    yield from sorted(place.glob("*.safetensors"))


def digests(files: dict[str, bytes]) -> dict[str, str]:
    assert files
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def live(client: TrainerClient, trainer: TransformersTrainer, options: list[Any]) -> None:
    """Train on the cluster: suspended in the middle with a receipt, and resumed."""
    runtime = client.backend.get_runtime("torch-distributed")
    name = client.train(trainer=trainer, runtime=runtime, options=options)
    client.wait_for_job_status(name, {"Running"}, timeout=300)
    suspended = client.suspend_job(name, timeout=200)
    assert suspended.status == "Suspended", suspended
    assert suspended.safe_step is not None
    assert 0 < suspended.safe_step < 18, "the job was to be suspended in its middle"
    client.resume_job(name)
    ended = client.wait_for_job_status(name, timeout=400)
    assert ended.status == "Complete"
    assert ended.progress is not None
    assert ended.progress.step == 18
    client.delete_job(name)


def client_of(team: Workspace) -> TrainerClient:
    return TrainerClient(KubernetesBackendConfig(namespace=team.namespace, config_file=str(team.cluster.kubeconfig)))


@pytest.mark.long
@pytest.mark.parametrize("strategy", FUNCTIONS)
def test_a_claim(strategy: str, shared: Workspace, tmp_path: Path) -> None:
    trainer = TransformersTrainer(
        func=FUNCTIONS[strategy],
        func_args=arguments(MOUNT, 0.5, strategy),
        num_nodes=2,
        resources_per_node={"cpu": "250m", "memory": "3Gi"},
        output_dir=f"pvc://{CLAIM}/llama3-fine-tune",
        enable_jit_checkpoint=True,
        periodic_checkpoint_config=checkpoint_config,
    )
    live(client_of(shared), trainer, [])
    found = {path.name: path.read_bytes() for path in weights_in(shared.folder / "llama3-fine-tune")}
    assert digests(found) == on_this_machine(shared, tmp_path, strategy)
    assert shared.left_at_last() == []


@pytest.mark.long
@pytest.mark.parametrize("trust", ["unverified", "private-authority"])
def test_a_bucket(trust: str, shared: Workspace, tmp_path: Path) -> None:
    """Ceph RGW behind TLS with an authority of its own; the keys come from a data connection's Secret."""
    if reason := ceph_rgw.unavailable():
        pytest.skip(reason)
    certificates = make_certificates(tmp_path, shared.cluster.host)
    with (
        ceph_rgw.ceph_rgw() as server,
        tls_in_front_of(server.port, host=shared.cluster.host, certificates=certificates) as endpoint,
    ):
        apply(shared.cluster, [connection(shared.namespace, server, endpoint)])
        is_verified = trust == "private-authority"
        trainer = TransformersTrainer(
            func=train_func,
            func_args=arguments("/mnt/shared", 0.5, "ddp"),
            num_nodes=2,
            resources_per_node={"cpu": "250m", "memory": "3Gi"},
            output_dir=f"s3://{server.bucket}/qwen-alpaca-finetune",
            data_connection_name=CONNECTION,
            enable_jit_checkpoint=True,
            verify_cloud_storage_ssl=is_verified,
            verify_cloud_storage_access=True,
            ca_bundle=certificates / "ca.pem" if is_verified else None,
            periodic_checkpoint_config=checkpoint_config,
        )
        live(client_of(shared), trainer, [mounted_claim()])
        files = weights_of(server.store("qwen-alpaca-finetune"))
    assert digests(files) == on_this_machine(shared, tmp_path, "ddp")


def connection(namespace: str, server: ceph_rgw.CephRgw, endpoint: str) -> dict[str, Any]:
    """The Secret that OpenShift AI's dashboard makes for a connection."""
    keys = {
        "AWS_ACCESS_KEY_ID": server.keys[0],
        "AWS_SECRET_ACCESS_KEY": server.keys[1],
        "AWS_S3_ENDPOINT": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_S3_BUCKET": server.bucket,
    }
    metadata = {"name": CONNECTION, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys}


def mounted_claim() -> Any:
    """The patch that mounts the claim with the model."""
    options = kubernetes_options
    volume = {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}}
    container = options.ContainerPatch(name="node", volume_mounts=[{"name": "shared", "mountPath": "/mnt/shared"}])
    pod = options.PodTemplatePatch(spec=options.PodSpecPatch(volumes=[volume], containers=[container]))
    template = options.JobTemplatePatch(spec=options.JobSpecPatch(template=pod))
    jobs = options.JobSetSpecPatch(replicated_jobs=[options.ReplicatedJobPatch(name="node", template=template)])
    return options.RuntimePatch(
        training_runtime_spec=options.TrainingRuntimeSpecPatch(template=options.JobSetTemplatePatch(spec=jobs))
    )


def weights_of(store: Store) -> dict[str, bytes]:
    """The weights of the final model in a bucket, which Safepoint saves there although the function does not."""
    keys = [item.key for item in store.list() if item.key.endswith(".safetensors")]
    final = [key for key in keys if key.startswith("final/")]
    assert final, f"no final model among {keys}"
    return {key.rpartition("/")[2]: bytes(store.read(key)) for key in final}
