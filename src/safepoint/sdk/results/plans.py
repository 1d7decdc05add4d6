"""The needs of a job before it is submitted: sizes of checkpoints, memory of snapshots, and the time of a save."""

import contextlib
from dataclasses import dataclass
from typing import Any

from safepoint.errors import UsageError
from safepoint.estimates.job_needs import JobNeeds, JobOutline
from safepoint.jobs.model.function_source import as_options
from safepoint.jobs.model.outlines import outline_for
from safepoint.planning.submitted import needs_of
from safepoint.sdk.trainers import TransformersTrainer
from safepoint.sdk.upstream import types

_UNKNOWN = "neither func_args nor the initializer names a model that is on this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The needs of a job. A notebook shows them as a table.

    Args:
        needs: sizes in bytes and times in seconds. If they are not known, the field `problem` says why.
        grace_period_seconds: the time between SIGTERM and SIGKILL that the trainer sets; None if it sets none.
    """

    needs: JobNeeds
    grace_period_seconds: float | None = None

    def _repr_html_(self) -> str | None:
        from safepoint.notebook.html import plan_html

        return plan_html(self.needs, self.grace_period_seconds)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from safepoint.notebook.text import plan_text

        printer.text(repr(self) if cycle else plan_text(self.needs, self.grace_period_seconds))


def plan_for(
    trainer: TransformersTrainer, initializer: types.Initializer | None, *, ranks_per_node: int | None
) -> JobPlan:
    """The plan of the job that `train` would submit.

    Args:
        trainer: describes the training.
        initializer: may name the model.
        ranks_per_node: ranks of each node; None if the runtime or the pod decides.
    """
    outline = outline_for(trainer.run_settings(), num_nodes=trainer.num_nodes or 1, ranks_per_node=ranks_per_node)
    uri = getattr(getattr(initializer, "model", None), "storage_uri", None)
    needs = needs_for(trainer, outline, model_uri=uri)
    found = JobNeeds(model="", problem=_UNKNOWN) if needs is None else needs
    return JobPlan(needs=found, grace_period_seconds=trainer.grace_period_seconds)


def needs_for(trainer: TransformersTrainer, outline: JobOutline, *, model_uri: str | None) -> JobNeeds | None:
    """The needs of a job; None if its arguments and its initializer name no model that is on this machine.

    Args:
        trainer: describes the training.
        outline: the outline of the job.
        model_uri: the `storage_uri` of its model initializer; None without one.
    """
    arguments: list[str] = []
    if callable(trainer.function):
        for name, value in (trainer.func_args or {}).items():
            with contextlib.suppress(UsageError):  # a function may have arguments that are not options
                arguments += as_options({name: value})
    else:
        arguments += as_options(trainer.func_args)
    return needs_of(outline, arguments, model_uri=model_uri)
