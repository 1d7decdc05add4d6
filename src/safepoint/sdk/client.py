"""The client: Kubeflow's, for the jobs of this machine too, and with what Kubeflow's lacks."""

from typing import Any

from safepoint.errors import UnsupportedError
from safepoint.sdk.config import LocalConfig
from safepoint.sdk.failures import JobStorageError, as_kubeflow_raises
from safepoint.sdk.local_backend import LocalBackend
from safepoint.sdk.upstream import trainer as kubeflow_trainer
from safepoint.sdk.values import Checkpoint, TrainJob


class TrainerClient(kubeflow_trainer.TrainerClient):
    """Jobs from Python.

    Every method of `kubeflow.trainer.TrainerClient` is there, with its arguments and results. On this machine:

    - jobs are those of `safepoint submit`; they outlive this program, and `safepoint list` and other clients see
      them;
    - a job's `status` may also be Queued, Suspending, Suspended, Resuming, Preempted or Restarting, and all of these
      can be waited for;
    - `get_job_logs` takes `rank-N` as a step, for what one rank has printed;
    - what Kubeflow raises is raised, as an error of Safepoint's at the same time: RuntimeError for what failed and
      for a job that is not there, TimeoutError, and ValueError for what cannot be meant.

    Args:
        backend_config: `LocalConfig()` for this machine; anything else is Kubeflow's, as is None: a cluster.
    """

    def __init__(self, backend_config: Any = None) -> None:
        if isinstance(backend_config, LocalConfig):
            self.backend: Any = LocalBackend(backend_config)
            return
        try:
            super().__init__(backend_config)
        except ValueError:
            raise
        except Exception as error:
            if backend_config is not None:
                raise
            raise JobStorageError(
                f"no cluster can be reached: {error}", hint="for jobs on this machine, TrainerClient(LocalConfig())"
            ) from error

    def delete_job(self, name: str, *, with_checkpoints: bool = False) -> None:
        """Stop a job and forget it.

        Args:
            name: the job.
            with_checkpoints: delete its checkpoints and its final model, too; they stay otherwise.

        Raises:
            RuntimeError: there is no such job.
            NotImplementedError: this backend cannot delete checkpoints.
        """
        if with_checkpoints:
            self._local("with_checkpoints").delete_job(name, with_checkpoints=True)
        else:
            super().delete_job(name)

    def suspend_job(self, name: str, *, timeout: float | None = None) -> TrainJob:
        """Stop a job with a checkpoint, and wait until that is safe.

        Args:
            name: the job.
            timeout: seconds; the job is stopped all the same when it takes longer.

        Raises:
            RuntimeError: there is no such job, or it has ended.
            TimeoutError: it is still at it.
            NotImplementedError: this backend cannot do it.
        """
        return self._local("suspend_job").suspend_job(name, timeout=timeout)

    def resume_job(self, name: str) -> TrainJob:
        """Let a suspended or failed job go on from its newest valid checkpoint.

        Raises:
            RuntimeError: there is no such job, or it runs, or is complete.
            NotImplementedError: this backend cannot do it.
        """
        return self._local("resume_job").resume_job(name)

    def scale_job(self, name: str, num_nodes: int, *, timeout: float | None = None) -> TrainJob:
        """Suspend a job, change its number of nodes, and let it go on as before.

        Args:
            name: the job.
            num_nodes: how many nodes it is to have.
            timeout: seconds until it goes on with them; it will all the same when that takes longer.

        Raises:
            ValueError: no such number of nodes.
            RuntimeError: there is no such job, or it is complete, or failed while it stopped.
            TimeoutError: it is still being stopped.
            NotImplementedError: this backend cannot do it.
        """
        return self._local("scale_job").scale_job(name, num_nodes, timeout=timeout)

    def list_checkpoints(self, name: str) -> list[Checkpoint]:
        """A job's checkpoints, newest first, the final model last.

        Raises:
            RuntimeError: there is no such job, or the place cannot be read.
            NotImplementedError: this backend cannot do it.
        """
        return self._local("list_checkpoints").list_checkpoints(name)

    def _local(self, method: str) -> LocalBackend:
        with as_kubeflow_raises():
            if not isinstance(self.backend, LocalBackend):
                raise UnsupportedError(
                    f"{method} is not supported here yet: {type(self.backend).__name__} has no such thing",
                    hint="it works with TrainerClient(LocalConfig())",
                )
        return self.backend
