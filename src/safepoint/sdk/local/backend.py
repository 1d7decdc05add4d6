"""Implements Kubeflow's backend interface for the jobs of this machine."""

import contextlib
import logging
import subprocess
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from safepoint.answers.receipts import receipt_of
from safepoint.checkpoint.tools.inventory import Kind
from safepoint.errors import (
    SafepointError,
    UsageError,
)
from safepoint.foundation.quantities import parse_whole
from safepoint.jobs.local.images.job_images import freeze_job, image_of, images_folder, thaw_job
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.outputs import open_output
from safepoint.jobs.local.slots import count_slots
from safepoint.jobs.model.job_progress import risk_of_suspending
from safepoint.jobs.model.records import JobRecord, this_user
from safepoint.jobs.model.states import JobState
from safepoint.notebook.views import JobDetails, JobView, view_of
from safepoint.sdk import options as options_module
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.failures import as_kubeflow_raises
from safepoint.sdk.local.details import read_details
from safepoint.sdk.local.pod_folder import check_mounts
from safepoint.sdk.local.runtime import check_runtime, local_runtime
from safepoint.sdk.local.spec import checked_trainer, local_job, share_for
from safepoint.sdk.local.training_hub import is_training_hub, training_hub_job
from safepoint.sdk.results.plans import JobPlan, plan_for
from safepoint.sdk.trainers import TransformersTrainer
from safepoint.sdk.upstream import RuntimeBackend, constants, kubernetes_options, types
from safepoint.sdk.values import Checkpoint, TrainJob, checkpoint_of, event_of, states_of, train_job
from safepoint.transparent.criu.program import find_criu
from safepoint.transparent.packages import require_packages

if TYPE_CHECKING:
    from safepoint.transparent.images.location import ImageLocation

_INITIALIZERS = (constants.DATASET_INITIALIZER, constants.MODEL_INITIALIZER)
_PACKAGES = (
    "import importlib.metadata as m, sys; print('Python:', sys.version); "
    "print('\\n'.join(sorted({f'{d.name}=={d.version}' for d in m.distributions()}, key=str.lower)))"
)
_log = logging.getLogger("safepoint")


class LocalBackend(RuntimeBackend):
    """The backend of `TrainerClient` for the jobs of this machine.

    No file stays open between two calls. Several threads may use one backend.

    Args:
        config: how jobs run on this machine.
    """

    def __init__(self, config: LocalConfig) -> None:
        self.config = config

    def accepts(self, trainer: Any) -> bool:
        """Whether `train` takes this trainer, although its class is neither Kubeflow's nor Safepoint's."""
        return is_training_hub(trainer)

    # ---- runtimes -------------------------------------------------------------------------------------------------

    def list_runtimes(self) -> list[types.Runtime]:
        """The only runtime: the Python environment of this machine."""
        return [local_runtime()]

    def get_runtime(self, name: str) -> types.Runtime:
        """Return the runtime of this machine. If `name` is the name of another runtime for PyTorch, also log a
        warning.

        Raises:
            RuntimeError: `name` is not the name of a runtime for PyTorch.
        """
        with as_kubeflow_raises():
            check_runtime(name, self.config.python)
        return local_runtime()

    def get_runtime_packages(self, runtime: types.Runtime) -> None:
        """Print the version and the packages of the interpreter that runs the jobs."""
        with as_kubeflow_raises():
            check_runtime(runtime, self.config.python)
        done = subprocess.run(
            [self.config.python, "-P", "-c", _PACKAGES], capture_output=True, text=True, check=False
        )
        with as_kubeflow_raises():
            if done.returncode != 0:
                raise SafepointError(f"{self.config.python} cannot list its packages: {done.stderr.strip()}")
        print(done.stdout, end="")

    # ---- jobs -----------------------------------------------------------------------------------------------------

    def train(
        self,
        runtime: str | types.Runtime | None = None,
        initializer: types.Initializer | None = None,
        trainer: types.CustomTrainer | types.CustomTrainerContainer | types.BuiltinTrainer | None = None,
        options: list[Any] | None = None,
    ) -> str:
        """Submit a job and return its name. The job starts when enough CPU cores and GPUs are free."""
        with as_kubeflow_raises():
            if runtime is not None:
                check_runtime(runtime, self.config.python)
            given = training_hub_job(trainer, self.config) if is_training_hub(trainer) else checked_trainer(trainer)
            job = local_job(given, self.config, self._name_of(options or [], given), initializer)
            with LocalJobs() as jobs:
                return jobs.submit(job.spec, job.files).name

    def _name_of(self, options: list[Any], trainer: types.CustomTrainer) -> str | None:
        """The name that the options give the job, or None. Logs a warning for options without effect locally."""
        applied: dict[str, Any] = {}
        for option in options:
            if isinstance(option, (kubernetes_options.TrainerCommand, kubernetes_options.TrainerArgs)):
                raise UsageError(f"the option {type(option).__name__} applies to a CustomTrainerContainer only")
            if type(option).__module__ in {kubernetes_options.__name__, options_module.__name__}:
                check_mounts(option)
                _log.warning("the option %s has no effect on this machine", type(option).__name__)
                continue
            option(applied, trainer, self)
        metadata: dict[str, Any] = applied.pop("metadata", {})
        name = metadata.pop("name", None)
        rest = sorted([*(f"metadata.{key}" for key in metadata), *applied])
        if rest:
            has = "has" if len(rest) == 1 else "have"
            _log.warning("options set %s, which %s no effect on this machine", ", ".join(rest), has)
        return name

    def list_jobs(self, runtime: types.Runtime | None = None) -> list[types.TrainJob]:
        """All jobs of this machine, oldest first, including jobs of other programs and of `safepoint submit`."""
        if runtime is not None and runtime.name != constants.DEFAULT_TRAINING_RUNTIME:
            return []
        with as_kubeflow_raises(), LocalJobs() as jobs:
            return [self._train_job(jobs, job) for job in jobs.jobs()]

    def get_job(self, name: str) -> TrainJob:
        """One job, by its name or the first letters of its name."""
        with as_kubeflow_raises(), LocalJobs() as jobs:
            return self._train_job(jobs, jobs.job(name))

    def _train_job(self, jobs: LocalJobs, job: JobRecord, *, is_stopped: bool = False) -> TrainJob:
        progress, output = jobs.progress_of(job), jobs.output_of(job)
        has_receipt = is_stopped and job.state is JobState.SUSPENDED and job.was_saved
        receipt = receipt_of(job, output) if has_receipt else None
        details = partial(read_details, job.name, job.created)
        view = view_of(job, progress, output, receipt=receipt, details=details)
        return train_job(job, local_runtime(), progress, output, view=view, receipt=receipt)

    def get_job_logs(
        self, name: str, follow: bool | None = False, step: str = constants.NODE + "-0"
    ) -> Iterator[str]:
        """The output of a step.

        The step `node-N` has the output of the node's launcher and ranks. The step `rank-N` has the output of one
        rank. `dataset-initializer` and `model-initializer` have the output of the downloads before the ranks start.
        """
        with as_kubeflow_raises(), LocalJobs() as jobs:
            jobs.job(name)
            kind, _, text = step.rpartition("-")
            if step == constants.LAUNCHER:
                return
            if step in _INITIALIZERS:
                for line in jobs.logs(name, step=step, follow=bool(follow)):
                    yield line.text
                return
            number = parse_whole(text)
            if kind not in {constants.NODE, "rank"} or number is None:
                raise UsageError(f"step {step!r} is invalid", hint="use node-0, node-1, … or rank-0, rank-1, …")
            is_node = kind == constants.NODE
            node, rank = (number, None) if is_node else (None, number)
            for line in jobs.logs(name, node=node, rank=rank, follow=bool(follow)):
                yield line.text

    def get_job_events(self, name: str) -> list[types.Event]:
        """The events that users, supervisors and ranks have caused for a job, oldest first."""
        with as_kubeflow_raises(), LocalJobs() as jobs:
            job = jobs.job(name).name
            return [event_of(job, event) for event in jobs.events(job) if event.time]

    def wait_for_job_status(
        self,
        name: str,
        status: set[str] = {constants.TRAINJOB_COMPLETE},  # noqa: B006  Kubeflow's default, never changed
        timeout: float = 600,
        polling_interval: float = 2,
        callbacks: list[Callable[[types.TrainJob], None]] | None = None,
    ) -> TrainJob:
        """Wait until the job is in one of the states; see `LocalJobs.wait`."""
        with as_kubeflow_raises():
            states = states_of(status, polling_interval)
            with LocalJobs() as jobs:

                def look(job: JobRecord) -> None:
                    for callback in callbacks or ():
                        callback(self._train_job(jobs, job))

                job = jobs.wait(name, states, timeout_s=timeout, poll_s=polling_interval, look=look)
                return self._train_job(jobs, job)

    def delete_job(self, name: str) -> None:
        """Stop a job and remove it; its checkpoints stay."""
        with as_kubeflow_raises(), LocalJobs() as jobs:
            jobs.delete(name)

    # ---- methods that Kubeflow's client does not have -------------------------------------------------------------

    def delete_with_checkpoints(self, name: str) -> None:
        """Stop a job and remove it, its checkpoints and its final model."""
        with as_kubeflow_raises(), LocalJobs() as jobs:
            jobs.delete(name, with_checkpoints=True)

    def suspend_job(self, name: str, *, timeout: float | None = None) -> TrainJob:
        """Save a checkpoint, stop a job and wait until it is suspended. Warns if a save may take too long."""
        self._warn_of_risk(name)
        with as_kubeflow_raises(), LocalJobs() as jobs:
            return self._train_job(jobs, jobs.suspend(name, timeout_s=timeout), is_stopped=True)

    def resume_job(self, name: str) -> TrainJob:
        """Continue a suspended or failed job. If its process image is newer than all checkpoints, use the image."""
        with as_kubeflow_raises(), LocalJobs() as jobs:
            job = jobs.resume(name)
            if job.message:
                _log.info("job %s resumes %s", job.name, job.message)
            return self._train_job(jobs, jobs.job(job.name))

    def scale_job(self, name: str, num_nodes: int, *, timeout: float | None = None) -> TrainJob:
        """Change a job's number of nodes; a running job is suspended and resumed."""
        self._warn_of_risk(name)
        return self._changed(name, lambda jobs: jobs.scale(name, num_nodes, timeout_s=timeout))

    def freeze_job(self, name: str, *, folder: str | None = None, leave_running: bool = False) -> TrainJob:
        """Freeze all processes of a job into a process image."""
        with as_kubeflow_raises():
            criu = find_criu()
            require_packages()
            with _images_at(folder or str(images_folder(name))) as (location, _):
                freeze_job(criu, name, location, is_running_after=leave_running, actor=this_user())
            return self._changed(name, lambda jobs: jobs.job(name))

    def thaw_job(self, name: str) -> TrainJob:
        """Restore the processes of a job from its newest image."""
        with as_kubeflow_raises():
            criu = find_criu()
            require_packages()
            with _images_at(image_of(name)[1]) as (location, image):
                thaw_job(criu, name, location, image or location.newest(), actor=this_user())
            return self._changed(name, lambda jobs: jobs.job(name))

    def _warn_of_risk(self, name: str) -> None:
        with as_kubeflow_raises(), LocalJobs() as jobs:
            job = jobs.job(name)
            risk = risk_of_suspending(job, jobs.progress_of(job))
        if risk is not None:
            _log.warning("job %s is being stopped, and its save may take too long: %s", job.name, risk)

    def _changed(self, name: str, change: Callable[[LocalJobs], JobRecord]) -> TrainJob:
        with as_kubeflow_raises(), LocalJobs() as jobs:
            return self._train_job(jobs, change(jobs))

    def plan_job(self, trainer: TransformersTrainer, initializer: types.Initializer | None) -> JobPlan:
        """The needs of a job of this trainer."""
        untyped: Any = trainer
        ranks = share_for(untyped.resources_per_node, machine=count_slots()).ranks
        return plan_for(trainer, initializer, ranks_per_node=ranks)

    def read_watched(self, name: str) -> tuple[JobView, JobDetails]:
        """The facts about a job that `watch_job` shows now."""
        with LocalJobs() as jobs:
            job = jobs.job(name)
            view = view_of(job, jobs.progress_of(job), jobs.output_of(job))
        return view, read_details(job.name, job.created)

    def list_checkpoints(self, name: str) -> list[Checkpoint]:
        """A job's checkpoints, newest first, then the final model. Checkpoints of other programs are left out."""
        with as_kubeflow_raises(), LocalJobs() as jobs:
            job = jobs.job(name)
            output = jobs.output_of(job)
            if output is None:
                return []
            inventory = open_output(job.spec, output)
            if inventory.folder is not None and not inventory.folder.is_dir():
                return []
            return [checkpoint_of(item) for item in inventory.items() if item.kind is not Kind.FOREIGN]


@contextlib.contextmanager
def _images_at(place: str) -> "Generator[tuple[ImageLocation, str | None]]":
    """The images at a location, opened with this user's key, and the name of the image if `place` names one."""
    from safepoint.transparent.images.opening import key_of, open_images, parse_images  # imports numpy

    location, name = parse_images(place)
    with open_images(location, key_of(None, is_made=True), only_authentic=True) as images:
        yield images, name
