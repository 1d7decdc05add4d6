"""The client in the place of Kubeflow's: its methods, its errors, and what is asked of another backend."""

import inspect
import logging
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes import client as kubernetes_client

from safepoint.errors import ExitCode, SafepointError
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress, SaveStatistics, State
from safepoint.sdk import LocalConfig, TrainerClient, TrainJob, TransformersTrainer
from safepoint.sdk.local.backend import LocalBackend
from safepoint.sdk.upstream import RuntimeBackend, common_options, kubernetes_options, types
from safepoint.sdk.upstream import trainer as kubeflow
from tests.support.job_values import supervised


@pytest.fixture
def client(machine: Path) -> TrainerClient:
    return TrainerClient(LocalConfig())


def add_job(name: str, state: JobState, *, message: str = "", exit_code: int | None = None) -> None:
    """A job with no process, as its supervisor would have left it."""
    spec = JobSpec(name=name, program=("train.py",), python=sys.executable, working_dir="/", num_nodes=2)
    with History() as history:
        history.add(spec, actor="test")
        with history.transaction():
            history.request(name, RequestedAction.SUSPEND, actor="test")
        history.become(name, state, actor="test", message=message, exit_code=exit_code, safe_step=30)


def methods_of(kind: type) -> dict[str, inspect.Signature]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in found if not name.startswith("_")}


def test_a_risky_suspension_is_warned_of(client: TrainerClient, caplog: pytest.LogCaptureFixture) -> None:
    """With the numbers; the caller of a method has decided already."""
    add_job("held", JobState.RUNNING)
    saves = SaveStatistics(count=1, mean_stall_s=0.01, last_durable_s=38.0, expected_s=38.0)
    progress = Progress(time="2026-01-31T09:30:00.000Z", state=State.TRAINING, step=40, step_s=10.0, saves=saves)
    job_folder("held").mkdir(parents=True)
    (job_folder("held") / "progress.json").write_bytes(progress.to_bytes())
    with supervised("held"), caplog.at_level(logging.WARNING, "safepoint"):
        for ask in (client.suspend_job, lambda name, timeout: client.scale_job(name, 3, timeout=timeout)):
            caplog.clear()
            with pytest.raises(TimeoutError):
                ask("held", timeout=0.1)
            assert (
                "job held is being stopped, and its save may take too long: nothing is saved yet; a save takes"
                in caplog.text
            )


@pytest.mark.parametrize(("own", "theirs"), [(TrainerClient, kubeflow.TrainerClient), (LocalBackend, RuntimeBackend)])
def test_every_call_that_kubeflow_takes_is_taken(own: type, theirs: type) -> None:
    """Each method, each parameter at its place and with its default; more may follow by name."""
    mine = methods_of(own)
    for name, signature in methods_of(theirs).items():
        assert name in mine, name
        for place, (parameter, theirs_one) in enumerate(signature.parameters.items()):
            own_one = mine[name].parameters[parameter]
            assert own_one.kind == theirs_one.kind, (name, parameter)
            assert own_one.default == theirs_one.default, (name, parameter)
            assert list(mine[name].parameters)[place] == parameter, (name, parameter)
        added = list(mine[name].parameters.values())[len(signature.parameters) :]
        assert all(one.kind is one.KEYWORD_ONLY and one.default is not one.empty for one in added), name
    assert {"suspend_job", "resume_job", "scale_job", "list_checkpoints"} <= set(mine)


def test_it_is_kubeflows_client(client: TrainerClient) -> None:
    """Also where one is asked for, and its jobs are Kubeflow's, with more."""
    assert isinstance(client, kubeflow.TrainerClient)
    assert issubclass(TrainJob, types.TrainJob)
    names = [field.name for field in fields(types.TrainJob)]
    assert [field.name for field in fields(TrainJob)][: len(names)] == names


def test_the_runtime_of_this_machine(client: TrainerClient, capsys: pytest.CaptureFixture[str]) -> None:
    """One, by Kubeflow's name for it."""
    (runtime,) = client.list_runtimes()
    assert runtime.name == "torch-distributed"
    assert client.get_runtime("torch-distributed") == runtime
    assert client.backend.get_runtime("torch-distributed").trainer.command == ("safepoint", "run")
    with pytest.raises(ValueError, match="no runtime 'deepspeed-distributed'"):
        client.get_runtime("deepspeed-distributed")
    client.get_runtime_packages(runtime)
    printed = capsys.readouterr().out
    assert f"Python: {sys.version}" in printed
    assert "torch==" in printed


def test_jobs_in_every_state(client: TrainerClient) -> None:
    """Ended ones have their nodes, suspended ones have none, as on a cluster."""
    add_job("done", JobState.COMPLETE, exit_code=0)
    add_job("stopped", JobState.SUSPENDED, message="step 30 is saved", exit_code=75)
    done, stopped = client.get_job("done"), client.get_job("stopp")
    assert (done.name, done.status, done.num_nodes) == ("done", "Complete", 2)
    assert [(step.name, step.status) for step in done.steps] == [("node-0", "Succeeded"), ("node-1", "Succeeded")]
    assert (stopped.name, stopped.status, stopped.steps) == ("stopped", "Suspended", [])
    assert isinstance(stopped, TrainJob)
    assert (stopped.message, stopped.exit_code, stopped.safe_step) == ("step 30 is saved", 75, 30)
    assert stopped.progress is None
    assert [job.name for job in client.list_jobs(client.get_runtime("torch-distributed"))] == ["done", "stopped"]
    other = types.Runtime(name="other", trainer=done.runtime.trainer, kind=types.RuntimeKind.TRAINING_RUNTIME)
    assert client.list_jobs(other) == []
    assert client.list_checkpoints("done") == []
    events = client.get_job_events("done")
    assert [event.reason for event in events] == ["Submitted", "SuspendRequested", "Complete"]
    assert events[0].involved_object_name == "done"
    assert list(client.get_job_logs("done")) == list(client.get_job_logs("done", step="dataset-initializer")) == []
    client.delete_job("done")
    assert [job.name for job in client.list_jobs()] == ["stopped"]


def test_waiting(client: TrainerClient) -> None:
    """What has come is returned at once, and callbacks see every look; what cannot come any more is said."""
    add_job("done", JobState.COMPLETE)
    add_job("broken", JobState.FAILED, message="exit code 1; see its logs")
    add_job("stopped", JobState.SUSPENDED)
    seen: list[str] = []
    job = client.wait_for_job_status("done", callbacks=[lambda job: seen.append(job.status)])
    assert (job.status, seen) == ("Complete", ["Complete"])
    assert client.wait_for_job_status("broken", {"Failed"}).status == "Failed"
    assert client.wait_for_job_status("stopped", {"Suspended", "Complete"}).status == "Suspended"
    with pytest.raises(RuntimeError, match="job broken is Failed: exit code 1") as failed:
        client.wait_for_job_status("broken")
    assert isinstance(failed.value, SafepointError)
    with pytest.raises(RuntimeError, match="job done is Complete, so it cannot become Running"):
        client.wait_for_job_status("done", {"Running"})
    with pytest.raises(TimeoutError, match=r"job stopped was not Complete within 0\.2 s; it is Suspended") as late:
        client.wait_for_job_status("stopped", timeout=0.2, polling_interval=0.05)  # type: ignore[arg-type]
    assert isinstance(late.value, SafepointError)
    assert late.value.exit_code == ExitCode.TIMED_OUT


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda client: client.get_job("none"), RuntimeError, "there is no job 'none'"),
        (lambda client: client.get_job("none"), ValueError, "there is no job 'none'"),
        (lambda client: client.delete_job("none"), RuntimeError, "there is no job 'none'"),
        (lambda client: client.suspend_job("done"), RuntimeError, "cannot be suspended: it is Complete"),
        (lambda client: client.resume_job("done"), RuntimeError, "is complete"),
        (lambda client: client.scale_job("stopped", 0), ValueError, "num_nodes 0 must be at least 1"),
        (
            lambda client: client.wait_for_job_status("done", {"Finished"}),
            ValueError,
            "use some of Complete, Created",
        ),
        (lambda client: client.wait_for_job_status("done", set()), ValueError, "is invalid"),
        (lambda client: client.wait_for_job_status("done", timeout=0), ValueError, "Timeout must be a positive"),
        (lambda client: client.wait_for_job_status("done", timeout=1), ValueError, "strictly less than timeout"),
        (lambda client: list(client.get_job_logs("done", step="nodes")), ValueError, "step 'nodes' is invalid"),
        (lambda client: client.train(), NotImplementedError, "trainer is None: .*nothing was started"),
        (lambda client: client.train(runtime="other"), ValueError, "no runtime 'other'"),
        (
            lambda client: client.train(trainer=kubeflow.CustomTrainerContainer(image="x")),
            ValueError,
            "a CustomTrainerContainer, a container with its own image, which cannot run on this machine",
        ),
        (
            lambda client: client.train(
                trainer=kubeflow.BuiltinTrainer(config=kubeflow.TorchTuneConfig()),
            ),
            NotImplementedError,
            "trainer is a BuiltinTrainer, TorchTune, which reports no steps, .*nothing was started",
        ),
        (
            lambda client: client.train(trainer=kubeflow.CustomTrainer(func=print)),
            ValueError,
            "print is not a function",
        ),
        (
            lambda client: client.train(
                trainer=kubeflow.CustomTrainer(func=test_waiting), options=[kubernetes_options.TrainerArgs(["x"])]
            ),
            ValueError,
            "TrainerArgs applies to a CustomTrainerContainer",
        ),
    ],
)
def test_errors_are_of_both_kinds(client: TrainerClient, call: Any, kind: type[Exception], message: str) -> None:
    """Kubeflow's, for code written for it, and Safepoint's; nothing is submitted."""
    add_job("done", JobState.COMPLETE)
    add_job("stopped", JobState.SUSPENDED)
    with pytest.raises(kind, match=message) as error:
        call(client)
    assert isinstance(error.value, SafepointError) or "imeout" in message
    assert len(client.list_jobs()) == 2


def test_options(client: TrainerClient, caplog: pytest.LogCaptureFixture) -> None:
    """The name counts; a cluster's options are said to have no effect; one of the user's own sees the backend."""
    backends: list[Any] = []

    def own(job_spec: dict[str, Any], trainer: Any, backend: Any) -> None:
        backends.append((type(trainer), backend))
        job_spec.setdefault("metadata", {})["labels"] = {"a": "b"}
        job_spec["spec"] = {}

    options = [common_options.Name("mine"), kubernetes_options.Labels({"a": "b"}), own]
    with caplog.at_level(logging.WARNING, "safepoint"):
        name = client.backend._name_of(options, TransformersTrainer(print))
    assert name == "mine"
    assert backends == [(TransformersTrainer, client.backend)]
    assert caplog.messages == [
        "the option Labels has no effect on this machine",
        "options set metadata.labels, spec, which have no effect on this machine",
    ]


def test_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the method that a backend lacks."""
    monkeypatch.setattr(kubernetes_client.CoreV1Api, "read_namespaced_config_map", lambda *_, **__: None)
    configuration = kubernetes_client.Configuration(host="http://127.0.0.1:1")
    client = TrainerClient(kubeflow.KubernetesBackendConfig(namespace="here", client_configuration=configuration))
    monkeypatch.setattr(client.backend, "get_job", lambda name: f"job {name}")
    assert client.get_job("x") == "job x"  # type: ignore[comparison-overlap]
    client.backend = SimpleNamespace()  # type: ignore[assignment]
    calls = (
        lambda: client.list_checkpoints("x"),
        lambda: client.delete_job("x", with_checkpoints=True),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match="is not supported by SimpleNamespace yet") as error:
            call()
        assert isinstance(error.value, SafepointError)
        assert error.value.exit_code == ExitCode.NOT_SUPPORTED
    with pytest.raises(ValueError, match="backend_config must be a configuration of a backend"):
        TrainerClient("local")


def test_without_a_cluster_it_says_what_there_is(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubeflow's, the client looks for a cluster by default."""
    monkeypatch.setenv("KUBECONFIG", str(machine / "none"))
    monkeypatch.setenv("HOME", str(machine))
    with pytest.raises(RuntimeError, match=r"no cluster can be reached.*TrainerClient\(LocalConfig\(\)\)"):
        TrainerClient()


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def test_nothing_of_it_is_imported_before_it_is_asked_for() -> None:
    """Kubeflow's SDK takes seconds, and torch too."""
    code = (
        "import sys, safepoint, safepoint.jobs.local.local_jobs\n"
        "print({'kubeflow', 'kubernetes', 'torch'} & set(sys.modules))"
    )
    assert python(code) == "set()\n"
    code = "import sys; from safepoint import TrainerClient; print({'torch', 'transformers'} & set(sys.modules))"
    assert python(code) == "set()\n"


def test_without_the_extra_it_says_what_to_install() -> None:
    """An ImportError, as for any package that is not there."""
    code = (
        "import sys; sys.modules['kubeflow'] = None\n"
        "try:\n    from safepoint import TrainerClient\n"
        "except ImportError as error: print(type(error).__mro__[1].__name__, error.exit_code, error)\n"
        "import safepoint; print(safepoint.__version__)"
    )
    said, version = python(code).splitlines()
    assert "pip install 'safepoint[sdk]'" in said
    assert said.startswith("UnsupportedError 16")
    assert version


def test_its_import_brings_only_what_every_client_needs() -> None:
    """Kubeflow's SDK takes seconds to import; Safepoint's own part must not be noticed beside it."""
    program = "import sys; from safepoint import TrainerClient, TransformersTrainer; print(*sys.modules)"
    command = [sys.executable, "-P", "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rooms = (
        "safepoint.jobs.local",
        "safepoint.jobs.cluster.api",
        "safepoint.snapshot",
        "safepoint.training",
        "sqlite3",
    )
    assert not [name for name in done.stdout.split() if name.startswith(rooms)]
