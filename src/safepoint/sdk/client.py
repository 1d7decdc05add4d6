"""`TrainerClient`: Kubeflow's client, extended with jobs on this machine, suspend, resume and scale."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from safepoint.errors import UnsupportedError
from safepoint.sdk.checks import check_config, check_interval, check_name, check_train, check_wait
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.failures import InvalidRequestError, JobStorageError, as_kubeflow_raises
from safepoint.sdk.results.lists import CheckpointList, JobList
from safepoint.sdk.trainers import TransformersTrainer, own_trainer
from safepoint.sdk.upstream import KubernetesBackendConfig, constants, types
from safepoint.sdk.upstream import trainer as kubeflow_trainer
from safepoint.sdk.values import Checkpoint, TrainJob

if TYPE_CHECKING:  # at run time this import would slow down the import of the SDK
    from safepoint.sdk.results.plans import JobPlan


class TrainerClient(kubeflow_trainer.TrainerClient):
    """Submits and controls jobs from Python.

    The client has every method of `kubeflow.trainer.TrainerClient`, with the same arguments and results. On this
    machine:

    - `safepoint submit` and this client make the same kind of job: it keeps running when this program ends, and
      `safepoint list` and other clients show it;
    - a job's `status` may also be Queued, Suspending, Suspended, Resuming, Preempted or Restarting, and
      `wait_for_job_status` accepts all of these;
    - the argument `step` of `get_job_logs` may be `rank-N`, for the output of one rank;
    - every error is an exception of Safepoint and also of the type that Kubeflow's client raises: RuntimeError for a
      failure and for a job that does not exist, TimeoutError for a wait that took too long, ValueError for an invalid
      argument.

    Args:
        backend_config: `LocalConfig()` for this machine. None or a `KubernetesBackendConfig` for a cluster, through
            Safepoint's own backend. Any other value is passed to Kubeflow's client, unchanged.
    """

    def __init__(self, backend_config: Any = None) -> None:
        check_config(backend_config)
        if isinstance(backend_config, LocalConfig):
            from safepoint.sdk.local.backend import LocalBackend  # takes as long to import as the rest of Safepoint

            self.backend: Any = LocalBackend(backend_config)
            return
        try:
            if backend_config is None or isinstance(backend_config, KubernetesBackendConfig):
                from safepoint.sdk.cluster_backend import ClusterBackend  # this import needs lightkube

                self.backend = ClusterBackend(backend_config or KubernetesBackendConfig())
            else:
                super().__init__(backend_config)
        except ValueError:
            raise
        except Exception as error:
            if backend_config is not None:
                raise
            raise JobStorageError(
                f"no cluster can be reached: {error}",
                hint="for jobs on this machine, use TrainerClient(LocalConfig())",
            ) from error

    def train(
        self,
        runtime: str | types.Runtime | None = None,
        initializer: types.Initializer | None = None,
        trainer: types.CustomTrainer | types.CustomTrainerContainer | types.BuiltinTrainer | None = None,
        options: list[Any] | None = None,
    ) -> str:
        """Submit a job and return its name.

        Args:
            runtime: the name of a runtime, or a result of `get_runtime`; None for `torch-distributed`.
            initializer: downloads the data set and the model before the training; None if nothing has to be
                downloaded.
            trainer: describes the training.
            options: a list of Kubeflow's options, such as `Name("my-job")`.

        Raises:
            ValueError: an argument is invalid; nothing was started.
            RuntimeError: the job could not be submitted.
            NotImplementedError: the backend cannot run this kind of job.
        """
        check_train(runtime, initializer, trainer, options)
        with as_kubeflow_raises():
            accepts = getattr(self.backend, "accepts", None)
            trainer = own_trainer(trainer) if accepts is None else own_trainer(trainer, is_accepted=accepts)
        kubeflow: Any = super()  # Kubeflow declares no types of options
        return kubeflow.train(runtime, initializer, trainer, options)

    def plan_job(self, trainer: TransformersTrainer, initializer: types.Initializer | None = None) -> "JobPlan":
        """The needs of the job that `train` would submit: sizes of checkpoints, memory, and the time of a save.

        Nothing is submitted. `func_args` or the initializer has to name a model that is on this machine.

        Args:
            trainer: describes the training.
            initializer: as for `train`.

        Raises:
            ValueError: an argument is invalid.
            NotImplementedError: this backend has no such method.
        """
        check_train(None, initializer, trainer, None)
        if not isinstance(trainer, TransformersTrainer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequestError(
                f"trainer is a {type(trainer).__name__}, whose needs are not known", hint="use a TransformersTrainer"
            )
        backend = self._with("plan_job")
        with as_kubeflow_raises():
            return backend.plan_job(trainer, initializer)

    def list_jobs(self, runtime: types.Runtime | None = None) -> list[TrainJob]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The jobs, oldest first; with `runtime`, only those with this runtime. A notebook shows them as a table."""
        return JobList(cast("list[TrainJob]", super().list_jobs(runtime)))

    def get_job(self, name: str) -> TrainJob:
        """One job.

        Raises:
            RuntimeError: there is no such job.
        """
        check_name(name)
        return cast("TrainJob", super().get_job(name))

    def get_job_logs(
        self, name: str, step: str = constants.NODE + "-0", follow: bool | None = False
    ) -> Iterator[str]:
        """The lines of a job's output.

        Args:
            name: the name of the job.
            step: a part of the job, which Kubeflow calls a step: `node-N`, `dataset-initializer` or
                `model-initializer`; on this machine also `rank-N`.
            follow: wait for further lines until the job has stopped.

        Raises:
            RuntimeError: there is no such job.
        """
        check_name(name)
        return super().get_job_logs(name, step, follow)

    def wait_for_job_status(
        self,
        name: str,
        status: set[str] = {constants.TRAINJOB_COMPLETE},  # noqa: B006  Kubeflow's default, never changed
        timeout: int = 600,
        polling_interval: int = 2,
        callbacks: list[Callable[[types.TrainJob], None]] | None = None,
    ) -> TrainJob:
        """Wait until a job has one of the states.

        Args:
            name: the name of the job.
            status: the states, such as `{"Complete"}`.
            timeout: the longest wait in seconds.
            polling_interval: seconds between two queries of the job's state.
            callbacks: called with the job after each query.

        Raises:
            RuntimeError: there is no such job, or it has ended in another state.
            TimeoutError: the job has none of the states yet. The job continues.
            ValueError: an argument is invalid.
        """
        check_name(name)
        check_wait(status, timeout, polling_interval)
        found = super().wait_for_job_status(name, set(status), timeout, polling_interval, callbacks)
        return cast("TrainJob", found)

    def delete_job(self, name: str, *, with_checkpoints: bool = False) -> None:
        """Stop a job and remove it. Its checkpoints stay, unless `with_checkpoints` is set.

        Args:
            name: the name of the job.
            with_checkpoints: also delete the job's checkpoints and its final model.

        Raises:
            RuntimeError: there is no such job.
            NotImplementedError: this backend cannot delete checkpoints.
        """
        check_name(name)
        if with_checkpoints:
            self._with("delete_with_checkpoints").delete_with_checkpoints(name)
        else:
            super().delete_job(name)

    def suspend_job(self, name: str, *, timeout: float | None = None) -> TrainJob:
        """Save a checkpoint and stop a job, and wait until it is suspended.

        Args:
            name: the name of the job.
            timeout: seconds to wait; None for no limit. After a TimeoutError the job still stops.

        Raises:
            RuntimeError: there is no such job, or it has ended.
            TimeoutError: the job has not stopped yet.
            NotImplementedError: this backend has no such method.
        """
        check_name(name)
        return self._with("suspend_job").suspend_job(name, timeout=timeout)

    def resume_job(self, name: str) -> TrainJob:
        """Continue a suspended job, or on this machine also a failed one, from its newest valid checkpoint.

        If the job has a process image that is newer than the checkpoint, the job continues from the image, as after
        `thaw_job`.

        Raises:
            RuntimeError: there is no such job, or the job is active, complete or, on a cluster, failed.
            NotImplementedError: this backend has no such method.
        """
        check_name(name)
        return self._with("resume_job").resume_job(name)

    def freeze_job(self, name: str, *, folder: str | None = None, leave_running: bool = False) -> TrainJob:
        """Freeze all processes of a job into a process image. See docs/process-images.md.

        Without `leave_running`, the job is suspended when the image is complete and was read and checked. On a
        cluster, the pod of the job makes the image in the output location of the job. For this, the trainer of the
        job needs `freeze_as_last_resort=True`.

        Args:
            name: the name of the job.
            folder: on this machine, the folder for the image; None for a folder that is deleted with the job.
            leave_running: whether the job continues to run; if False, the job is suspended.

        Returns:
            The job; its `image` is the location of the image.

        Raises:
            ValueError: `folder` is set for a job on a cluster.
            RuntimeError: there is no such job, the job does not run, or it cannot be frozen. If it cannot be frozen,
                it continues to run.
            NotImplementedError: this backend has no such method; this process is not root, or there is no CRIU 4.2 or
                newer; or the pods of the job cannot make images.
        """
        check_name(name)
        return self._with("freeze_job").freeze_job(name, folder=folder, leave_running=leave_running)

    def thaw_job(self, name: str) -> TrainJob:
        """Restore the processes of a job from its newest process image; they continue in the middle of a step.

        If they make no progress, they are ended, and the job continues from its newest checkpoint. On a cluster, the
        next pod of the job restores them, as after `resume_job`.

        Raises:
            RuntimeError: there is no such job, its newest attempt has no image, the job is active, or its processes
                cannot be restored; or a job on a cluster has a checkpoint that is newer than the image.
            NotImplementedError: this backend has no such method, this process is not root, or there is no CRIU 4.2 or
                newer.
        """
        check_name(name)
        return self._with("thaw_job").thaw_job(name)

    def scale_job(self, name: str, num_nodes: int, *, timeout: float | None = None) -> TrainJob:
        """Change a job's number of nodes; a running job is suspended and resumed.

        Args:
            name: the name of the job.
            num_nodes: the new number of nodes.
            timeout: seconds to wait; None for no limit. After a TimeoutError the change continues.

        Raises:
            ValueError: `num_nodes` is invalid.
            RuntimeError: there is no such job, it is complete, or it failed while it stopped.
            TimeoutError: the change is not complete yet.
            NotImplementedError: this backend has no such method.
        """
        check_name(name)
        return self._with("scale_job").scale_job(name, num_nodes, timeout=timeout)

    def list_checkpoints(self, name: str) -> list[Checkpoint]:
        """A job's checkpoints, newest first, and after them its final model. A notebook shows them as a table.

        Raises:
            RuntimeError: there is no such job, or its output location cannot be read.
            NotImplementedError: this backend has no such method.
        """
        check_name(name)
        return CheckpointList(self._with("list_checkpoints").list_checkpoints(name))

    def watch_job(self, name: str, *, polling_interval: float = 2) -> None:
        """Show a job until it has stopped: its state, its progress, its curves, its events and its checkpoints.

        In a notebook, the output of the cell is one picture that is updated. The last picture stays in the notebook,
        and is shown when the notebook is opened again. In any other program, lines are printed. An interrupt of the
        cell, or Ctrl-C, ends the call with a KeyboardInterrupt, and does not affect the job.

        Args:
            name: the name of the job.
            polling_interval: seconds between two queries of the job.

        Raises:
            RuntimeError: there is no such job.
            ValueError: an argument is invalid.
            NotImplementedError: this backend has no such method.
        """
        check_name(name)
        check_interval(polling_interval)
        from safepoint.notebook.screens import screen_here  # takes as long to import as the rest of Safepoint
        from safepoint.notebook.watching import watch

        backend = self._with("read_watched")
        with as_kubeflow_raises():
            watch(lambda: backend.read_watched(name), screen_here(), interval_s=polling_interval)

    def _with(self, method: str) -> Any:
        """The backend, if it has the method.

        Raises:
            NotImplementedError: the backend does not have the method.
        """
        with as_kubeflow_raises():
            if method not in dir(self.backend):
                raise UnsupportedError(
                    f"{method} is not supported by {type(self.backend).__name__} yet",
                    hint="TrainerClient(LocalConfig()) supports it",
                )
        return self.backend
