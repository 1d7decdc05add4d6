"""`safepoint plan storage --for JOB`: what the records of a job on this machine or on a cluster say."""

import importlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.errors import ConflictError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.jobs.cluster.spec import RECORD, ClusterSpec
from safepoint.jobs.local import local_jobs
from safepoint.settings.run_settings import RunSettings
from tests.support.checkpoints import commit, prepared
from tests.support.cluster.workspace import runtime
from tests.support.commands import safepoint

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
}
Submit = Callable[..., Any]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_LLAMA))
    return str(path)


@pytest.fixture
def on_cluster(monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Puts a job into a cluster that only answers for this job."""

    def submit(**spec: Any) -> Any:
        values = {"name": "tiny", "settings": RunSettings(output_dir="s3://bucket/run"), **spec}
        job = manifests_for(ClusterSpec(**values), Runtime(document=runtime())).trainjob
        job["metadata"] |= {"uid": "1", "creationTimestamp": "2026-11-26T00:00:00Z", "namespace": "team"}
        api = SimpleNamespace(
            connection=SimpleNamespace(name="kind"),
            namespace="team",
            find=lambda kind, name: job if (kind, name) == ("trainjobs", "tiny") else None,
            objects=lambda kind, **_: [],
            serves=lambda kind: True,
            check_name=lambda name: None,
        )
        jobs = ClusterJobs(cast("ClusterApi", api))
        for module in ("records", "cost"):
            # The package has functions of the same names.
            place = importlib.import_module(f"safepoint.cli.commands.plan.{module}")
            monkeypatch.setattr(place, "open_jobs", lambda *_: nullcontext(jobs))
        monkeypatch.setattr(ClusterJobs, "inventory_of", lambda self, name: None)
        return job

    return submit


def test_a_job_on_a_cluster(config: str, on_cluster: Submit) -> None:
    on_cluster(
        program=(
            "train.py",
            "--model_name_or_path",
            config,
            "--optim",
            "adafactor",
            "--fsdp",
            "full_shard",
            "--bf16",
        ),
        num_nodes=2,
        ranks_per_node=4,
        grace_s=90,
        settings=RunSettings(output_dir="s3://bucket/run", save_total_limit=3, snapshot_slots=2),
    )
    outcome = safepoint("plan", "storage", "--for", "tiny", "--on", "kind", "--json")
    assert outcome.code == 0, outcome.stderr
    document = outcome.document
    assert (document["strategy"], document["optimizer"], document["nodes"], document["gpus"]) == (
        "fsdp",
        "adafactor",
        2,
        4,
    )
    assert (document["keep"], document["inputs"]["snapshot_slots"], document["inputs"]["is_mixed"]) == (3, 2, True)
    assert document["settings_from"] == "the job tiny"
    assert document["grace"]["grace_s"] == 90
    assert "the checkpoints of tiny are in s3://bucket/run, which only pods can reach" in document["warnings"][0]
    chosen = safepoint("plan", "storage", "--for", "tiny", "--on", "kind", "--optimizer", "sgd", "--json").document
    assert chosen["optimizer"] == "sgd"


def test_the_newest_checkpoint_of_a_job_on_a_cluster(
    config: str, on_cluster: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cluster(program=("train.py",), ranks_per_node=1)
    output = prepared(tmp_path / "out")
    commit(output, 10)
    inventory, _ = open_inventory(str(output.root))
    monkeypatch.setattr(ClusterJobs, "inventory_of", lambda self, name: inventory)
    outcome = safepoint("plan", "storage", config, "--for", "tiny", "--on", "kind", "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.document["checkpoint"]["is_measured"]
    assert outcome.document["settings_from"] == "the job tiny and its checkpoint-10"


def test_checkpoints_that_are_not_certain_are_not_used(
    config: str, on_cluster: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cluster(program=("train.py",), ranks_per_node=1)

    def refuse(self: ClusterJobs, name: str) -> None:
        raise ConflictError("it is not certain where job tiny saves")

    monkeypatch.setattr(ClusterJobs, "inventory_of", refuse)
    outcome = safepoint("plan", "storage", config, "--for", "tiny", "--on", "kind")
    assert outcome.code == 0
    assert "the checkpoints of tiny are not used: it is not certain where job tiny saves" in outcome.stdout


def test_the_events_of_a_cluster_do_not_show_what_a_job_lost(on_cluster: Submit) -> None:
    on_cluster(program=("train.py",))
    outcome = safepoint("plan", "cost", "--for", "tiny", "--on", "kind")
    assert outcome.code == 10
    assert "the losses of job tiny cannot be computed: none of the events that are still on the" in outcome.stderr


def test_a_job_that_names_no_model(on_cluster: Submit) -> None:
    on_cluster(program=("train.py",))
    outcome = safepoint("plan", "storage", "--for", "tiny", "--on", "kind")
    assert outcome.code == 2
    assert "there is no model" in outcome.stderr


def test_a_job_of_another_program_and_a_changed_record(config: str, on_cluster: Submit) -> None:
    job = on_cluster(program=("train.py",), num_nodes=3)
    for text, message in (
        (None, "Safepoint did not submit job tiny: only its number of nodes and its grace period are known"),
        ('{"program": ["a"], "settings": {"SAFEPOINT_KEEP": "x"}}', "the options in the record of job tiny are not"),
    ):
        job["metadata"]["annotations"] = {} if text is None else {RECORD: text}
        outcome = safepoint("plan", "storage", config, "--for", "tiny", "--on", "kind", "--json")
        assert outcome.code == 0, outcome.stderr
        assert message in outcome.document["warnings"][0]
        assert outcome.document["nodes"] == 3


def test_a_model_that_cannot_be_planned_does_not_stop_the_plan_of_another(config: str, on_cluster: Submit) -> None:
    unheard = Path(config).with_name("unheard.json")
    unheard.write_text('{"model_type": "unheard"}')
    on_cluster(program=("train.py", "--model_name_or_path", str(unheard)))
    outcome = safepoint("plan", "storage", config, "--for", "tiny", "--on", "kind")
    assert outcome.code == 0, outcome.stderr
    assert "the model of tiny is not used" in outcome.stdout


@pytest.mark.parametrize("words", [("--on", "a"), ("--namespace", "b"), ("--on", "a", "--for", "arguments.json")])
def test_a_place_without_a_job_is_refused(words: tuple[str, ...], config: str) -> None:
    outcome = safepoint("plan", "storage", config, *words)
    assert outcome.code == 2
    assert f"{words[0]} names the place of a job" in outcome.stderr


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), None),
        (("--keep", "newest=4"), 4),
        (("--keep", "newest=4", "--save-total-limit", "6"), 6),
        (("--keep", "newest=4,every=100"), None),
    ],
)
def test_a_job_of_this_machine_names_its_model(
    options: tuple[str, ...], kept: int | None, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "work")
    named = ("train.py", "--model_name_or_path", "../config.json", "--use_peft", "--lora_r", "4")
    with mock.patch.object(local_jobs, "start_supervisor"):
        submitted = safepoint("submit", "--name", "tiny", *options, *named)
    assert submitted.code == 0, submitted.stderr
    monkeypatch.chdir(tmp_path)
    outcome = safepoint("plan", "storage", "--for", "tiny", "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.document["inputs"]["lora_rank"] == 4
    assert outcome.document["keep"] == (kept or 2)
    assert any("N = 2 is assumed" in note for note in outcome.document["notes"]) == (kept is None)
