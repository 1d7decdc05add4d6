"""A run's progress in two formats: for OpenShift AI's controller, and for Kubeflow (KEP-2779).

OpenShift AI's controller polls `to_bytes` from the first pod, and reads the same record from the pod's termination
message. The controller refuses the whole record if a field has a wrong type, such as a fraction instead of a whole
number. `to_request` is the body of a status update of KEP-2779, in which every metric is a string.
"""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safepoint.foundation import clock
from safepoint.progress.record import OUTPUT_FOLDER, Progress, State

if TYPE_CHECKING:
    from safepoint.checkpoint.tools.receipt import CheckpointReceipt

ReadStatus = Callable[[], tuple[Progress, bool] | None]
"""Returns the current record and whether the job has ended; None before the first record."""

TERMINATION_LOG = Path("/dev/termination-log")
"""The file in which the platform looks for the termination message of a container that has ended."""
SAFE_TIME, SAVE_SECONDS = "safeTime", "saveSeconds"
"""The names of the metrics that hold `safe_s` and `save_s`."""
REPEATED = "repeatedSteps"
"""The name of the metric that holds `repeated_steps`."""
SPACE_SAVES, SPACE_SECONDS = "spaceSavesLeft", "spaceSeconds"
"""The names of the metrics that hold `space_saves` and `space_s`."""
FREE_BYTES, SIZE_BYTES, OUTPUT_SECONDS = "outputFreeBytes", "outputSizeBytes", "outputSeconds"
"""The names of the metrics that hold `free_bytes`, `size_bytes` and `output_s`."""
CHECKPOINT = "checkpoint"
"""The key of the newest checkpoint in a termination message."""
PROCESS_IMAGE = "processImage"
"""The key of the process image in the termination message of a pod that made one at its deadline."""
_MOST_S = 2**31 - 1
"""The largest number of seconds. The controllers store numbers in 32 bits."""
_MOST_METRICS = 256
"""A request with more metrics is refused (KEP-2779)."""
_MOST_TERMINATION_BYTES = 4000
"""The kubelet cuts a termination message off at 4096 bytes, and a record that is cut off is not valid JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """The progress of a job as the controllers read it. An unknown value is None.

    Args:
        percentage: how much of the training is done, from 0 to 100; 100 only when the job has succeeded and its
            training did not stop early.
        remaining_s: the seconds that are left; 0 only when the job has succeeded.
        step: see `Progress`.
        total_steps: see `Progress.max_steps`.
        epoch: see `Progress`.
        total_epochs: see `Progress.num_epochs`; rounded up.
        train_metrics: the metrics of the training whose values are finite.
        eval_metrics: the metrics of evaluations whose values are finite.
        updated: when the record was written.
        safe_step: the step of the newest checkpoint.
        attempt: which start of the run this is, from 1.
        safe_s: when training reached `safe_step`, seconds since 1970.
        save_s: see `SaveStatistics.expected_s`.
        early_end: see `Progress.early_end`.
        space_saves: if a folder is nearly full, the number of saves that still fit.
        space_s: if a folder is nearly full, seconds until a save does not fit.
        repeated_steps: see `Progress`.
        free_bytes: how much may still be written to the output folder.
        size_bytes: how much the output folder could hold if it were empty.
        output_s: seconds until a save does not fit into the output folder.
    """

    percentage: int | None
    remaining_s: int | None
    step: int
    total_steps: int | None
    epoch: float
    total_epochs: int | None
    train_metrics: Mapping[str, float]
    eval_metrics: Mapping[str, float]
    updated: str
    safe_step: int | None = None
    attempt: int = 0
    safe_s: float | None = None
    save_s: float | None = None
    early_end: str = ""
    space_saves: int | None = None
    space_s: float | None = None
    repeated_steps: int | None = None
    free_bytes: int | None = None
    size_bytes: int | None = None
    output_s: float | None = None

    @classmethod
    def of(cls, progress: Progress, *, has_ended: bool) -> "TrainerStatus":
        """The status of a job.

        Args:
            progress: the record of its first rank.
            has_ended: whether the job's program has ended, and not only the training in it.
        """
        is_done = has_ended and progress.state is State.FINISHED
        low = [one for one in progress.space if one.is_low]
        output = next((one for one in progress.space if one.place == OUTPUT_FOLDER), None)
        train_metrics = {"loss": progress.loss, **progress.train_metrics}
        train_metrics["throughput_samples_sec"] = progress.samples_per_s
        return cls(
            percentage=100 if is_done and not progress.early_end else _below_hundred(progress.percent),
            remaining_s=0 if is_done else _left(progress),
            step=progress.step,
            total_steps=progress.max_steps or None,
            epoch=progress.epoch,
            total_epochs=math.ceil(progress.num_epochs) or None,
            train_metrics=_known(train_metrics),
            eval_metrics=_known(progress.eval_metrics),
            updated=progress.time,
            safe_step=progress.safe_step,
            attempt=progress.attempt,
            safe_s=None if progress.safe_time is None else clock.parse_utc(progress.safe_time),
            save_s=progress.saves.expected_s,
            early_end=progress.early_end if has_ended else "",
            space_saves=min((one.saves_left for one in low if one.saves_left is not None), default=None),
            space_s=min((one.remaining_s for one in low if one.remaining_s is not None), default=None),
            repeated_steps=progress.repeated_steps,
            free_bytes=None if output is None else output.free_bytes,
            size_bytes=None if output is None else output.size_bytes,
            output_s=None if output is None else output.remaining_s,
        )

    def to_bytes(self) -> bytes:
        """The document that OpenShift AI's controller reads."""
        return json.dumps(self._record(), allow_nan=False).encode()

    def to_termination_message(
        self, checkpoint: "CheckpointReceipt | None" = None, *, image: Mapping[str, Any] | None = None
    ) -> bytes:
        """The document of `to_bytes` with the receipt and `early_end`. If it is too long, the metrics are left out.

        Args:
            checkpoint: the receipt of the newest checkpoint: its digest, and what was checked. `safepoint suspend`
                reads it. None if the checkpoint was not checked.
            image: what is known of the process image that the pod made instead of a checkpoint; None if there is
                none. With an image, the current step in the document is the step of the newest checkpoint, because
                readers take it for a saved step.
        """
        record = self._record() | ({} if checkpoint is None else {CHECKPOINT: asdict(checkpoint)})
        record |= {"message": self.early_end} if self.early_end else {}
        record |= {} if image is None else {PROCESS_IMAGE: dict(image), "currentStep": self.safe_step}
        data = json.dumps(record, allow_nan=False).encode()
        if len(data) <= _MOST_TERMINATION_BYTES:
            return data
        return json.dumps(record | {"trainMetrics": {}, "evalMetrics": {}}, allow_nan=False).encode()

    def write_termination_message(
        self,
        path: Path,
        checkpoint: "CheckpointReceipt | None" = None,
        *,
        image: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write the termination message.

        Args:
            path: a file that the platform has created. It is overwritten in place: a mounted file cannot be replaced.
            checkpoint: see `to_termination_message`.
            image: see `to_termination_message`.

        Returns:
            Whether the file exists and was written.
        """
        with contextlib.suppress(OSError):
            if path.is_file():
                path.write_bytes(self.to_termination_message(checkpoint, image=image))
                return True
        return False

    def _record(self) -> dict[str, Any]:
        return {
            "progressPercentage": self.percentage,
            "estimatedRemainingSeconds": self.remaining_s,
            "currentStep": self.step,
            "totalSteps": self.total_steps,
            "currentEpoch": round(self.epoch, 4),
            "totalEpochs": self.total_epochs,
            "trainMetrics": dict(self.train_metrics),
            "evalMetrics": dict(self.eval_metrics),
            "lastUpdatedTime": self.updated,
        }

    def to_request(self) -> bytes:
        """The body of a status update (KEP-2779)."""
        values: dict[str, float | None] = {
            "currentStep": self.step,
            "totalSteps": self.total_steps,
            "currentEpoch": round(self.epoch, 4),
            "totalEpochs": self.total_epochs,
            "safeStep": self.safe_step,
            "attempt": self.attempt or None,
            SAFE_TIME: self.safe_s,
            SAVE_SECONDS: self.save_s,
            SPACE_SAVES: self.space_saves,
            SPACE_SECONDS: self.space_s,
            REPEATED: self.repeated_steps,
            FREE_BYTES: self.free_bytes,
            SIZE_BYTES: self.size_bytes,
            OUTPUT_SECONDS: self.output_s,
            **self.train_metrics,
            **self.eval_metrics,
        }
        metrics = [
            {"name": name, "value": str(value)} for name, value in values.items() if name and value is not None
        ]
        status: dict[str, Any] = {"lastUpdatedTime": self.updated, "metrics": metrics[:_MOST_METRICS]}
        if self.percentage is not None:
            status["progressPercentage"] = self.percentage
        if self.remaining_s is not None:
            status["estimatedRemainingSeconds"] = self.remaining_s
        return json.dumps({"trainerStatus": status}, allow_nan=False).encode()


def _below_hundred(percent: float | None) -> int | None:
    return None if percent is None else min(99, int(percent))


def _left(progress: Progress) -> int | None:
    """The seconds left; None when unknown or after a failure.

    The result is never 0, because the controllers treat a job with 0 seconds left as complete.
    """
    if progress.state is State.FAILED or progress.remaining_s is None:
        return None
    return min(_MOST_S, max(1, math.ceil(progress.remaining_s)))


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}
