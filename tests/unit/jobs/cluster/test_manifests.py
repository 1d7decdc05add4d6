"""Tests of safepoint.jobs.cluster.manifests."""

import base64
import json
from typing import Any

import pytest

from safepoint.errors import UnsupportedError, UsageError
from safepoint.foundation.volumes.room import STORAGE_LIMIT
from safepoint.jobs.cluster.manifests import Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import CLAIMS
from tests.support.cluster.workspace import runtime

RUNTIME = Runtime(document=runtime())
BASE = {"name": "tiny", "program": ("train.py", "--text", "a `b` $HOME \\ 'c'"), "files": {"train.py": b"print()"}}


def made(**changes: Any) -> Manifests:
    return manifests_for(ClusterSpec(**{**BASE, **changes}), RUNTIME, secret_keys=changes.pop("secret_keys", None))


def trainer(manifests: Manifests) -> Any:
    return manifests.trainjob["spec"]["trainer"]


def variables(manifests: Manifests) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in trainer(manifests)["env"]}


def pod_patch(manifests: Manifests) -> Any:
    (patch,) = manifests.trainjob["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    return job["template"]["spec"]["template"]["spec"]


def test_no_shell_expands_arguments() -> None:
    command = trainer(made())["command"]
    assert (command[:3], command[4]) == (["python3", "-P", "-c"], "/opt/safepoint")
    assert command[6:] == ["run", "/opt/safepoint/train.py", "--text", "a `b` $HOME \\ 'c'"]


def test_ranks_are_a_number_of_the_trainjob_or_counted_in_the_pod() -> None:
    """Trainer takes a number only; `safepoint run` reads the variable before Trainer's own."""
    assert trainer(made(ranks_per_node=4))["numProcPerNode"] == 4
    counted = made(ranks_from="gpu")
    assert "numProcPerNode" not in trainer(counted)
    assert variables(counted)["SAFEPOINT_NPROC_PER_NODE"] == "gpu"
    assert "SAFEPOINT_NPROC_PER_NODE" not in variables(made())


@pytest.mark.parametrize("asked", [{"resume": "never"}, {"from_scratch": True}, {"resume": "/data/checkpoint-4"}])
def test_a_choice_for_the_first_start_is_not_repeated_by_later_pods(asked: dict[str, Any]) -> None:
    found = variables(made(settings=RunSettings(output_dir="pvc://data/a", **asked)))
    named = asked.get("resume") == "/data/checkpoint-4"
    assert found.get("SAFEPOINT_RESUME") == ("/data/checkpoint-4" if named else None)
    assert found.get("SAFEPOINT_FROM_SCRATCH") == (None if named else "1")
    assert len(found["SAFEPOINT_FIRST_START"]) == 16
    assert "SAFEPOINT_FIRST_START" not in variables(made())


def test_the_script_arrives_byte_for_byte() -> None:
    data = bytes(range(256))
    (config_map,) = [item for kind, item in made(files={"train.py": data}).before if kind == "configmaps"]
    assert base64.b64decode(config_map["binaryData"]["train.py"]) == data
    assert config_map["immutable"] is True


def test_config_maps_are_named_by_their_content() -> None:
    names = [made(files={"train.py": text}).before[0][1]["metadata"]["name"] for text in (b"a", b"a", b"b")]
    assert names[0] == names[1] != names[2]
    long = made(name="n" * 63).before[0][1]["metadata"]["name"]
    assert len(long) <= 63


def test_code_that_is_too_large_is_refused_with_its_size() -> None:
    with pytest.raises(UsageError, match=r"2,000,00\d bytes"):
        made(code=bytes(2_000_000))


def test_a_claim_is_mounted_where_users_expect_it() -> None:
    manifests = made(settings=RunSettings(output_dir="pvc://data/runs/a"), num_nodes=2)
    pod = pod_patch(manifests)
    assert {"name": "checkpoint-storage", "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["checkpoint-storage"] == "/mnt/kubeflow-checkpoints"
    assert variables(manifests)[CLAIMS] == "data=/mnt/kubeflow-checkpoints"
    assert variables(manifests)["SAFEPOINT_OUTPUT_DIR"] == "pvc://data/runs/a"


def test_an_object_store_has_a_local_folder_with_a_limit() -> None:
    manifests = made(settings=RunSettings(output_dir="s3://bucket/run"), staging_bytes=1 << 30)
    volumes = {volume["name"]: volume for volume in pod_patch(manifests)["volumes"]}
    assert volumes["checkpoint-storage"]["emptyDir"] == {"sizeLimit": str(1 << 30)}
    assert variables(manifests)["SAFEPOINT_LOCAL_DIR"] == "/mnt/kubeflow-checkpoints/run"
    assert variables(manifests)[STORAGE_LIMIT] == f"/mnt/kubeflow-checkpoints={1 << 30}"
    assert STORAGE_LIMIT not in variables(made(settings=RunSettings(output_dir="s3://bucket/run")))


def test_no_value_of_a_secret_is_in_any_object() -> None:
    known = manifests_for(ClusterSpec(**{**BASE, "connection": "models"}), RUNTIME, secret_keys=("AWS_KEY", "HF"))
    reference = {"secretKeyRef": {"name": "models", "key": "HF"}}
    assert variables(known)["HF"] == reference
    unknown = variables(made(connection="models"))
    assert unknown["AWS_SECRET_ACCESS_KEY"]["secretKeyRef"]["optional"] is True
    with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY"):
        made(env={"AWS_SECRET_ACCESS_KEY": "hidden"})


def test_several_nodes_recognise_each_other_by_a_secret() -> None:
    manifests = made(num_nodes=2, settings=RunSettings(output_dir="pvc://c/x"))
    (secret,) = [item for kind, item in manifests.before if kind == "secrets"]
    assert len(secret["stringData"]["job-secret"]) == 64
    assert variables(manifests)["SAFEPOINT_JOB_SECRET_FILE"] == "/var/run/safepoint/job-secret"
    assert secret["stringData"]["job-secret"] not in json.dumps(manifests.trainjob)
    assert not [kind for kind, _ in made().before if kind == "secrets"]


def test_the_grace_period_is_in_a_runtime_of_the_job() -> None:
    """In a patch of the TrainJob, Kueue would drop it, and the job would hang."""
    manifests = made(grace_s=600)
    (own,) = [item for kind, item in manifests.before if kind == "trainingruntimes"]
    assert Runtime(document=own).grace_s == 600
    assert RUNTIME.grace_s == 60
    reference = {"name": own["metadata"]["name"], "kind": "TrainingRuntime"}
    assert manifests.trainjob["spec"]["runtimeRef"] == reference
    assert variables(manifests)["SAFEPOINT_GRACE"] == "600"
    assert "terminationGracePeriodSeconds" not in json.dumps(manifests.trainjob)
    assert variables(made())["SAFEPOINT_GRACE"] == "60"


def test_the_queue_is_a_label() -> None:
    labels = made(queue="gpus", priority_class="low").trainjob["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
    assert labels["kueue.x-k8s.io/priority-class"] == "low"
    with pytest.raises(UsageError, match="without a queue"):
        made(priority_class="low")


def test_what_the_runtime_mounts_is_not_mounted_again() -> None:
    document = runtime()
    mounts = Runtime(document=document).container["volumeMounts"]
    mounts += [{"name": "usr", "mountPath": "/tmp/"}, {"name": "usr", "mountPath": "/dev/shm"}]
    manifests = manifests_for(ClusterSpec(**BASE), Runtime(document=document))
    assert [volume["name"] for volume in pod_patch(manifests)["volumes"]] == ["safepoint"]


def test_a_folder_of_each_pod_is_refused_for_several_pods() -> None:
    with pytest.raises(UsageError, match="would be a separate folder in each of the"):
        made(num_nodes=2, settings=RunSettings(output_dir="/tmp/out"))


@pytest.mark.parametrize(
    ("metadata", "kinds"),
    [({}, "clustertrainingruntimes"), ({"namespace": "team"}, "clustertrainingruntimes,trainingruntimes -n team")],
)
def test_a_runtime_that_does_not_train(metadata: dict[str, str], kinds: str) -> None:
    """The hint names the namespace of a TrainingRuntime. A ClusterTrainingRuntime has no namespace."""
    document = runtime()
    document["metadata"] |= metadata
    (job,) = document["spec"]["template"]["spec"]["replicatedJobs"]
    job["name"], job["template"]["metadata"] = "launcher", {}
    with pytest.raises(UsageError, match="has no replicated job that trains") as raised:
        manifests_for(ClusterSpec(**BASE), Runtime(document=document))
    assert raised.value.hint == f"`kubectl get {kinds}` lists the runtimes"


@pytest.mark.parametrize(
    ("patched", "is_ours"), [("node", False), ("other", True)], ids=["our container", "another container"]
)
def test_a_path_that_a_patch_mounts_is_not_mounted_twice(patched: str, is_ours: bool) -> None:
    """Kubernetes refuses pods with two mounts at one path, so the job would never start."""
    mount = {"name": "dshm", "mountPath": "/dev/shm/"}
    pod = {"volumes": [{"name": "dshm", "emptyDir": {}}], "containers": [{"name": patched, "volumeMounts": [mount]}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": "a", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    *_, own = made(patches=(patch,)).trainjob["spec"]["runtimePatches"]
    (job,) = own["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert ("/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]) == is_ours


def test_a_volume_of_a_patch_may_not_have_the_name_of_one_of_ours() -> None:
    pod = {"volumes": [{"name": "checkpoint-storage", "emptyDir": {}}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": "a", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    with pytest.raises(UsageError, match="a volume named checkpoint-storage, a name that Safepoint uses"):
        made(patches=(patch,), settings=RunSettings(output_dir="pvc://data/run"))


def test_the_controller_of_openshift_ai_is_asked_to_read_the_progress() -> None:
    annotations = made(settings=RunSettings(metrics_port=28080)).trainjob["metadata"]["annotations"]
    found = {name.rpartition("/")[2]: text for name, text in annotations.items() if "opendatahub" in name}
    assert found == {"progression-tracking": "true", "metrics-port": "28080", "metrics-poll-interval": "30"}


def with_initializer(what: str) -> Runtime:
    """The runtime with a part that brings a dataset or a model."""
    document = runtime()
    parts = document["spec"]["template"]["spec"]["replicatedJobs"]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": f"{what}-initializer"}
    parts.insert(0, {"name": f"{what}-initializer", "template": {"metadata": {"labels": labels}}})
    return Runtime(document=document)


def test_an_initializer_is_in_the_trainjob_and_its_secrets_are_not() -> None:
    spec = ClusterSpec(
        **BASE,
        initializer={"dataset": {"storageUri": "s3://b/data", "env": [{"name": "REGION", "value": "here"}]}},
        initializer_secrets={"dataset": {"SECRET_ACCESS_KEY": "sesame"}},
    )
    found = manifests_for(spec, with_initializer("dataset"))
    assert found.trainjob["spec"]["initializer"]["dataset"] == {
        "storageUri": "s3://b/data",
        "env": [{"name": "REGION", "value": "here"}],
        "secretRef": {"name": "tiny-dataset"},
    }
    assert "sesame" not in json.dumps(found.trainjob)
    [secret] = [item for kind, item in found.before if kind == "secrets"]
    assert (secret["metadata"]["name"], secret["stringData"]) == ("tiny-dataset", {"SECRET_ACCESS_KEY": "sesame"})
    assert "sesame" not in repr(spec)
    assert "initializer" not in made().trainjob["spec"]


def test_a_runtime_without_the_part_is_refused() -> None:
    spec = ClusterSpec(**BASE, initializer={"model": {"storageUri": "hf://a/b"}})
    with pytest.raises(UsageError, match="runtime torch-distributed has no model-initializer"):
        manifests_for(spec, with_initializer("dataset"))


FREEZABLE = RunSettings(output_dir="pvc://data/a", freeze_as_last_resort=True)


def test_the_pod_of_a_job_with_images_gets_rights_and_a_key_that_only_root_reads() -> None:
    """Both are for this job only."""
    manifests = made(settings=FREEZABLE)
    [secret] = [item for kind, item in manifests.before if kind == "secrets"]
    assert len(secret["stringData"]["images-key"]) == 32
    assert secret["immutable"] is True
    pod = pod_patch(manifests)
    [volume] = [volume for volume in pod["volumes"] if "secret" in volume]
    assert volume["secret"] == {"secretName": secret["metadata"]["name"], "defaultMode": 0o400}
    assert variables(manifests)["SAFEPOINT_IMAGES_KEY"] == "/var/run/safepoint/images-key"
    assert variables(manifests)["SAFEPOINT_FREEZE_AS_LAST_RESORT"] == "1"
    context = pod["containers"][0]["securityContext"]
    assert context["capabilities"] == {"add": ["SYS_ADMIN", "NET_ADMIN", "SYS_TIME"]}
    assert "securityContext" not in pod_patch(made())["containers"][0]
    assert not [item for kind, item in made().before if kind == "secrets"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_nodes": 2, "settings": FREEZABLE}, "restored pods have new addresses"),
        ({"settings": RunSettings(freeze_as_last_resort=True)}, "output location in a claim"),
        ({"settings": RunSettings(output_dir="s3://b/a", freeze_as_last_resort=True)}, "output location in a claim"),
    ],
)
def test_a_job_whose_image_could_not_be_restored_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        made(**changes)
