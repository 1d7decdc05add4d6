"""The record of a job's submission: program, options of the run, ranks, model of the initializer.

The record is an annotation of the TrainJob. Another person may have changed the annotation. So commands use the
record only for what they show and for checks. What is deleted, and where keys are sent, depends on `storage_record`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from safepoint.errors import UsageError
from safepoint.foundation.quantities import parse_count
from safepoint.jobs.cluster.objects import Object, at, items, texts
from safepoint.jobs.cluster.spec import RECORD, read_record
from safepoint.settings.run_settings import RunSettings

_MOST_RANKS = 1024
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRecord:
    """A job as it was submitted.

    Args:
        arguments: the arguments of its program.
        settings: the options of its run; None if they are not valid.
        ranks_per_node: ranks in each pod; None if the record does not state the number.
        model_uri: the `storageUri` of the model that its initializer fetches; None if it fetches no model.
    """

    arguments: tuple[str, ...] = ()
    settings: RunSettings | None = field(default_factory=RunSettings)
    ranks_per_node: int | None = None
    model_uri: str | None = None

    @property
    def makes_images(self) -> bool:
        """Whether its pods can make process images."""
        return self.settings is not None and self.settings.freeze_as_last_resort


def read_submitted(trainjob: Object) -> SubmittedRecord | None:
    """The record of a job; None for a job that Safepoint did not submit."""
    record = read_record(texts(trainjob, "metadata", "annotations").get(RECORD))
    if not record:
        return None
    given = {str(name): str(text) for name, text in texts(record, "settings").items()}
    uri = at(record, "initializer", "model", "storageUri")
    return SubmittedRecord(
        arguments=tuple(word for word in items(record, "program")[1:] if isinstance(word, str)),
        settings=settings_from(given),
        ranks_per_node=_ranks(record),
        model_uri=uri if isinstance(uri, str) else None,
    )


def settings_from(given: Mapping[str, str]) -> RunSettings | None:
    """The options of a run, from its variables; None if they are not valid."""
    try:
        return RunSettings.from_environment(given)
    except (UsageError, ValueError, OverflowError):
        return None


def _ranks(record: Object) -> int | None:
    stated = at(record, "ranks_per_node")
    if stated is None and at(record, "ranks_from") is None:
        try:
            stated = parse_count(str(at(record, "resources", _GPU)))
        except ValueError:
            return None
    return stated if type(stated) is int and 1 <= stated <= _MOST_RANKS else None
