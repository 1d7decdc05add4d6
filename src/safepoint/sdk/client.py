"""`TrainerClient`: Kubeflow's client, extended with jobs on this machine, suspend, resume and scale."""

from typing import Any

from safepoint.errors import UnsupportedError
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.failures import JobStorageError, as_kubeflow_raises
from safepoint.sdk.upstream import KubernetesBackendConfig
from safepoint.sdk.upstream import trainer as kubeflow_trainer
from safepoint.sdk.values import Checkpoint, TrainJob


class TrainerClient(kubeflow_trainer.TrainerClient):
    """Submits and controls jobs from Python.

    It has every method of `kubeflow.trainer.TrainerClient`, with the same arguments and results. On this machine:

    - `safepoint submit` and this client make the same kind of job: it keeps running when this program ends, and
      `safepoint list` and other clients show it;
    - a job's `status` may also be Queued, Suspending, Suspended, Resuming, Preempted or Restarting, and
      `wait_for_job_status` accepts all of these;
    - `get_job_logs` takes `rank-N` as a step, for the output of one rank;
    - every error is an exception of Safepoint and also of the type that Kubeflow's client raises: RuntimeError for a
      failure and for a job that does not exist, TimeoutError for a wait that took too long, ValueError for an invalid
      argument.

    Args:
        backend_config: `LocalConfig()` for this machine. None or a `KubernetesBackendConfig` for a cluster, through
            Safepoint's own backend. Any other value is passed to Kubeflow's client, unchanged.
    """

    def __init__(self, backend_config: Any = None) -> None:
        if isinstance(backend_config, LocalConfig):
            from safepoint.sdk.local_backend import LocalBackend  # takes as long to import as the rest of Safepoint

            self.backend: Any = LocalBackend(backend_config)
            return
        try:
            if backend_config is None or isinstance(backend_config, KubernetesBackendConfig):
                from safepoint.sdk.cluster_backend import ClusterBackend  # needs lightkube

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

    def delete_job(self, name: str, *, with_checkpoints: bool = False) -> None:
        """Stop a job and remove it. Its checkpoints stay, unless `with_checkpoints` is set.

        Args:
            name: the job.
            with_checkpoints: also delete its checkpoints and its final model.

        Raises:
            RuntimeError: there is no such job.
            NotImplementedError: this backend cannot delete checkpoints.
        """
        if with_checkpoints:
            self._with("delete_with_checkpoints").delete_with_checkpoints(name)
        else:
            super().delete_job(name)

    def suspend_job(self, name: str, *, timeout: float | None = None) -> TrainJob:
        """Save a checkpoint and stop a job, and wait until it is suspended.

        Args:
            name: the job.
            timeout: seconds to wait; None for no limit. After a TimeoutError the job still stops.

        Raises:
            RuntimeError: there is no such job, or it has ended.
            TimeoutError: the job has not stopped yet.
            NotImplementedError: this backend has no such method.
        """
        return self._with("suspend_job").suspend_job(name, timeout=timeout)

    def resume_job(self, name: str) -> TrainJob:
        """Continue a suspended job, or on this machine also a failed one, from its newest valid checkpoint.

        Raises:
            RuntimeError: there is no such job, or it is active or complete. On a cluster: or it has failed.
            NotImplementedError: this backend has no such method.
        """
        return self._with("resume_job").resume_job(name)

    def scale_job(self, name: str, num_nodes: int, *, timeout: float | None = None) -> TrainJob:
        """Change a job's number of nodes; a running job is suspended and resumed.

        Args:
            name: the job.
            num_nodes: the new number of nodes.
            timeout: seconds to wait; None for no limit. After a TimeoutError the change continues.

        Raises:
            ValueError: `num_nodes` is invalid.
            RuntimeError: there is no such job, it is complete, or it failed while it stopped.
            TimeoutError: the change is not complete yet.
            NotImplementedError: this backend has no such method.
        """
        return self._with("scale_job").scale_job(name, num_nodes, timeout=timeout)

    def list_checkpoints(self, name: str) -> list[Checkpoint]:
        """A job's checkpoints, newest first, and after them its final model.

        Raises:
            RuntimeError: there is no such job, or its output location cannot be read.
            NotImplementedError: this backend has no such method.
        """
        return self._with("list_checkpoints").list_checkpoints(name)

    def _with(self, method: str) -> Any:
        """The backend, if it has the method.

        Raises:
            NotImplementedError: the backend does not have the method.
        """
        with as_kubeflow_raises():
            if method not in dir(self.backend):
                raise UnsupportedError(
                    f"{method} is not supported by {type(self.backend).__name__} yet",
                    hint="use TrainerClient(LocalConfig()) for it",
                )
        return self.backend
