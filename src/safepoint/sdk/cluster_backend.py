"""Kubeflow's backend for a cluster, extended so that jobs can be saved, suspended, resumed and scaled."""

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safepoint.checkpoint.tools.inventory import Kind
from safepoint.errors import AccessDeniedError, NotFoundError, UsageError
from safepoint.estimates.job_needs import JobNeeds
from safepoint.foundation.quantities import parse_whole
from safepoint.foundation.shared_folders.ownership import UntrustedFileError, read_trusted
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.connection import connect_to, connect_with
from safepoint.jobs.cluster.helper.job_storage import list_in_pod, location_of, open_directly
from safepoint.jobs.cluster.manifests import SHIPPED_TO, TRACKING
from safepoint.jobs.cluster.objects import at, name_of
from safepoint.jobs.cluster.planned_sizes import outline_of, parse_local_limit
from safepoint.jobs.cluster.shared_memory import parse_shared_memory
from safepoint.jobs.cluster.spec import DEFAULT_RUNTIME, JOB_LABEL, QUEUE_LABEL, ClusterSpec, kubernetes_resources
from safepoint.jobs.cluster.state import ClusterJob
from safepoint.jobs.model.function_source import as_options, take_function
from safepoint.jobs.model.records import JobEvent
from safepoint.jobs.model.spec import name_from
from safepoint.notebook.views import JobDetails, JobView, view_of
from safepoint.sdk.failures import as_kubeflow_raises
from safepoint.sdk.initializers import initializer_of
from safepoint.sdk.options import SetByOptions, apply_options
from safepoint.sdk.results.plans import JobPlan, needs_for, plan_for
from safepoint.sdk.trainers import TransformersTrainer
from safepoint.sdk.upstream import KubernetesBackend, constants, types
from safepoint.sdk.values import Checkpoint, TrainJob, checkpoint_in, checkpoint_of, event_of, states_of

_SCRIPT, _AUTHORITIES = "train.py", "ca-bundle.pem"
_MOST_BYTES = 4 << 20
_log = logging.getLogger("safepoint")


class ClusterBackend(KubernetesBackend):
    """The backend of `TrainerClient` for a cluster.

    Safepoint submits the job of a `TransformersTrainer`; Kubeflow's own backend submits the jobs of other trainers.
    For all jobs, `status` is one of Safepoint's states (`JobState`).

    Args:
        config: Kubeflow's configuration of the cluster.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.client_configuration is not None:
            connection = connect_with(config.client_configuration, namespace=self.namespace)
        else:
            connection = connect_to(config.context, namespace=self.namespace, file=config.config_file)
        self._api = ClusterApi(connection)
        self._jobs = ClusterJobs(self._api)

    def train(
        self,
        runtime: str | types.Runtime | None = None,
        initializer: types.Initializer | None = None,
        trainer: types.CustomTrainer | types.CustomTrainerContainer | types.BuiltinTrainer | None = None,
        options: list[Any] | None = None,
    ) -> str:
        """Submit a job, and return its name."""
        if not isinstance(trainer, TransformersTrainer):
            kubeflow: Any = super()  # Kubeflow declares no types
            return kubeflow.train(runtime, initializer, trainer, options)
        name = runtime if isinstance(runtime, str) else DEFAULT_RUNTIME if runtime is None else runtime.name
        with as_kubeflow_raises():
            spec = cluster_spec(trainer, name, apply_options(options or [], trainer, self))
            parts, initializer_secrets = initializer_of(initializer)
            spec = replace(spec, initializer=parts, initializer_secrets=initializer_secrets)
            return self._jobs.submit(replace(spec, needs=job_needs(trainer, spec))).name

    def list_runtimes(self) -> list[types.Runtime]:
        """The runtimes that a job may name, without the copies that Safepoint makes for jobs with a grace period."""
        kubeflow: Any = super()  # Kubeflow declares no types
        found: list[types.Runtime] = kubeflow.list_runtimes()
        with as_kubeflow_raises():
            copies = set(map(name_of, self._api.objects("trainingruntimes", labels=JOB_LABEL, has_content=False)))
        return [runtime for runtime in found if runtime.name not in copies]

    def plan_job(self, trainer: TransformersTrainer, initializer: types.Initializer | None) -> JobPlan:
        """The needs of a job of this trainer. Nothing is requested from the cluster."""
        untyped: Any = trainer
        gpus = kubernetes_resources(untyped.resources_per_node).get("nvidia.com/gpu")
        return plan_for(trainer, initializer, ranks_per_node=parse_whole(gpus or ""))

    def list_jobs(self, runtime: types.Runtime | None = None) -> list[types.TrainJob]:
        """All jobs of the namespace, oldest first, including jobs that Safepoint did not submit."""
        with as_kubeflow_raises():
            found = self._jobs.jobs()
        wanted = [job for job in found if runtime is None or job.runtime == runtime.name]
        runtimes: dict[str, types.Runtime] = {}
        return [self._train_job(job, runtimes) for job in wanted]

    def get_job(self, name: str) -> TrainJob:
        """One job."""
        with as_kubeflow_raises():
            return self._train_job(self._jobs.job(name), {})

    def _train_job(self, job: ClusterJob, runtimes: dict[str, types.Runtime]) -> TrainJob:
        if job.runtime not in runtimes:
            try:
                runtimes[job.runtime] = self.get_runtime(job.runtime)
            except RuntimeError:  # the runtime was deleted after the job's submission
                runtimes[job.runtime] = self.get_runtime(job.runtime_of_pods)
        return TrainJob(
            name=job.name,
            runtime=runtimes[job.runtime],
            steps=[
                types.Step(name=f"{constants.NODE}-{pod.node}", status=pod.phase, pod_name=pod.name)
                for pod in job.pods
            ],
            num_nodes=job.num_nodes,
            creation_timestamp=job.created_at,
            status=str(job.state),
            progress=job.progress,
            message=job.message or job.warning,
            exit_code=job.exit_code,
            attempts=job.attempt,
            safe_step=job.safe_step,
            output_dir=job.output,
            receipt=job.receipt,
            image=None if job.image is None else job.image.path,
            view=view_of(job, job.progress, job.output, receipt=job.receipt),
        )

    def read_watched(self, name: str) -> tuple[JobView, JobDetails]:
        """The facts about a job that `watch_job` shows now. Without the right to read events, there are no events."""
        job = self._jobs.job(name)
        events: list[JobEvent] = []
        with contextlib.suppress(AccessDeniedError):
            events = self._jobs.events(name)
        return view_of(job, job.progress, job.output, receipt=job.receipt), JobDetails(events=events)

    def get_job_logs(
        self, name: str, follow: bool | None = False, step: str = constants.NODE + "-0"
    ) -> Iterator[str]:
        """The output of one pod of a job.

        Kubeflow calls the parts of a job steps: the step `node-N` is the pod of node N. Kubeflow's own backend
        returns the output of all other steps. With `follow`, the iterator waits for the pod, and ends when the job
        has stopped. Without `follow`, the iterator has no lines while there is no pod, as with Kubeflow's client.
        """
        kind, _, text = step.rpartition("-")
        number = parse_whole(text)
        if kind != constants.NODE or number is None:
            yield from super().get_job_logs(name, bool(follow), step)
            return
        with as_kubeflow_raises():
            if not follow and not any(pod.node == number for pod in self._jobs.job(name).pods):
                _log.warning("job %s has no pod %s now", name, step)
                return
            for line in self._jobs.logs(name, node=number, follow=bool(follow)):
                yield line.text

    def get_job_events(self, name: str) -> list[types.Event]:
        """The events of a job and its pods that the cluster still keeps, oldest first."""
        with as_kubeflow_raises():
            return [event_of(name, event) for event in self._jobs.events(name)]

    def wait_for_job_status(
        self,
        name: str,
        status: set[str] = {constants.TRAINJOB_COMPLETE},  # noqa: B006  Kubeflow's default, never changed
        timeout: float = 600,
        polling_interval: float = 2,
        callbacks: list[Callable[[types.TrainJob], None]] | None = None,
    ) -> TrainJob:
        """Wait until the job is in one of the states."""
        with as_kubeflow_raises():
            states = states_of(status, polling_interval)
            runtimes: dict[str, types.Runtime] = {}

            def look(job: ClusterJob) -> None:
                for callback in callbacks or ():
                    callback(self._train_job(job, runtimes))

            job = self._jobs.wait(name, states, timeout_s=timeout, poll_s=polling_interval, look=look)
            return self._train_job(job, runtimes)

    def delete_job(self, name: str) -> None:
        """Delete a job and wait until it is gone; its checkpoints stay."""
        with as_kubeflow_raises():
            self._jobs.delete(name)

    def delete_with_checkpoints(self, name: str) -> None:
        """Stop a job and delete it, its checkpoints and its final model."""
        with as_kubeflow_raises():
            self._jobs.delete(name, with_checkpoints=True)

    def list_checkpoints(self, name: str) -> list[Checkpoint]:
        """A job's checkpoints, newest first, then the final model. Checkpoints of other programs are left out.

        The list is empty if the output location of the job is unknown.
        """
        with as_kubeflow_raises():
            storage = self._jobs.storage_of(name)
            if storage.output is None:
                return []
            location = location_of(storage.output, name)
            inventory = open_directly(self._api, storage, location)
            if inventory is not None:
                return [checkpoint_of(item) for item in inventory.items() if item.kind is not Kind.FOREIGN]
            listed = list_in_pod(self._api, storage, location)
            return [checkpoint_in(document) for document in listed if document["kind"] != Kind.FOREIGN]

    def suspend_job(self, name: str, *, timeout: float | None = None) -> TrainJob:
        """Save a checkpoint and stop a job, and wait until its pods are gone."""
        with as_kubeflow_raises():
            return self._stopped(self._jobs.suspend(name, timeout_s=timeout))

    def resume_job(self, name: str) -> TrainJob:
        """Continue a suspended job from its newest checkpoint or, if that is newer, its process image."""
        with as_kubeflow_raises():
            return self._train_job(self._jobs.resume(name), {})

    def freeze_job(self, name: str, *, folder: str | None = None, leave_running: bool = False) -> TrainJob:
        """Make a process image of a job's pod, and suspend the job unless `leave_running` is set."""
        with as_kubeflow_raises():
            if folder is not None:
                raise UsageError(
                    f"folder {folder} has no effect on a cluster: the pod of job {name} makes the image in the job's "
                    "output location; nothing was frozen",
                    hint="omit folder",
                )
            return self._train_job(self._jobs.freeze(name, is_running_after=leave_running)[0], {})

    def thaw_job(self, name: str) -> TrainJob:
        """Continue a suspended job from its process image, in a new pod."""
        with as_kubeflow_raises():
            return self._train_job(self._jobs.thaw(name)[0], {})

    def scale_job(self, name: str, num_nodes: int, *, timeout: float | None = None) -> TrainJob:
        """Change a job's number of nodes: suspend it, and replace its TrainJob by a new TrainJob that resumes."""
        with as_kubeflow_raises():
            return self._stopped(self._jobs.scale(name, num_nodes, timeout_s=timeout))

    def _stopped(self, job: ClusterJob) -> TrainJob:
        if job.was_saved is False:
            _log.warning("job %s was stopped, but a pod ended without a save", job.name)
        return self._train_job(job, {})


def cluster_spec(trainer: TransformersTrainer, runtime: str, options: SetByOptions) -> ClusterSpec:
    """The specification of the job that `train` submits; without initializers and needs, which `train` adds.

    Args:
        trainer: describes the training.
        runtime: the name of the runtime.
        options: the values that Kubeflow's options have set.

    Raises:
        ValueError: a field of the trainer is invalid.
        UsageError: the function, an argument, a size or the file of `ca_bundle` cannot be used.
        NotFoundError: the script does not exist.
    """
    trainer.check()  # check again, because fields may have been assigned since the trainer was made
    untyped: Any = trainer
    given: dict[str, Any] = untyped.env or {}
    env = {name: str(text) for name, text in given.items() if text is not None}
    function: Any = trainer.function
    files: dict[str, bytes] = {}
    if not isinstance(function, str):
        shipment = take_function(function, trainer.func_args)
        title, program = shipment.name, (_SCRIPT,)
        files[_SCRIPT] = shipment.script().encode()
    elif Path(function).is_file():
        title, program = Path(function).stem, (Path(function).name, *as_options(trainer.func_args))
        files[program[0]] = Path(function).read_bytes()
    elif function.endswith(".py"):
        raise NotFoundError(f"there is no script {function}", hint="give the path of a script, or a function")
    else:
        title, program = function.rpartition(".")[2], (function, *as_options(trainer.func_args))
    is_module = isinstance(function, str) and not files
    storage = trainer.storage_environment()
    if trainer.ca_bundle is not None and os.path.isfile(trainer.ca_bundle):
        files[_AUTHORITIES] = _certificates(trainer.ca_bundle)
        storage["AWS_CA_BUNDLE"] = f"{SHIPPED_TO}/{_AUTHORITIES}"
    grace_s = trainer.grace_period_seconds
    settings = replace(trainer.run_settings(), wording="sdk")
    limit, shared = trainer.local_limit, trainer.shared_memory
    resources = kubernetes_resources(untyped.resources_per_node)
    poll = {f"{TRACKING}/metrics-poll-interval": str(trainer.metrics_poll_interval_seconds)}
    if not trainer.enable_progression_tracking:
        poll = {}
    return ClusterSpec(
        name=options.name or name_from(title, secrets.token_hex(2)),
        program=program,
        is_module=is_module,
        files=files,
        num_nodes=trainer.num_nodes or 1,
        resources=resources,
        settings=settings,
        env={**env, **storage},
        connection=trainer.data_connection_name,
        runtime=runtime,
        image=trainer.image,
        queue=options.labels.get(QUEUE_LABEL),
        grace_s=None if grace_s is None else round(grace_s),
        staging_bytes=None if limit is None else parse_local_limit("local_limit", str(limit), settings),
        is_staging_given=limit is not None,
        shared_memory_bytes=None if shared is None else parse_shared_memory("shared_memory", str(shared), resources),
        labels=options.labels,
        annotations={**poll, **options.annotations},
        patches=options.patches,
        packages=tuple(trainer.packages_to_install or ()),
        package_indexes=tuple(trainer.pip_index_urls),
        deadline_s=options.deadline_s,
    )


def job_needs(trainer: TransformersTrainer, spec: ClusterSpec) -> JobNeeds | None:
    """The needs of the job; None if its arguments and its initializer name no model that is on this machine."""
    return needs_for(trainer, outline_of(spec), model_uri=at(spec.initializer, "model", "storageUri"))


def _certificates(file: str | os.PathLike[str]) -> bytes:
    """The content of a file of certificates. Everyone who may read the job can read this content.

    Raises:
        UsageError: the file contains a private key, or another user may have written it.
    """
    try:
        content = read_trusted(file, _MOST_BYTES)
    except UntrustedFileError as error:
        raise UsageError(
            f"ca_bundle {os.fspath(file)} was not used: {error.strerror}; nothing was submitted",
            hint="give a PEM file that only you can write to",
        ) from error
    if b"PRIVATE KEY" in content:
        raise UsageError(
            f"ca_bundle {os.fspath(file)} contains a private key, which would be readable in the job; nothing was "
            "submitted",
            hint="give a file that contains only certificates",
        )
    return content
