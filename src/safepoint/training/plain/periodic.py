"""Which steps of a loop are saved periodically: every n-th step, the last step of each epoch, or none."""

from safepoint.errors import UsageError
from safepoint.settings.run_settings import RunSettings
from safepoint.training.plain.data.position import DataProgress


class Periodic:
    """Decides after each step whether to save the state; all ranks decide the same.

    Saves by time (`--save-every`) are not decided here, but by the vote of the ranks (a small all-reduce in each
    step).

    Args:
        settings: the options of the run, which override the script's values.
        save_steps: the script's optimizer steps between checkpoints, or None.

    Raises:
        UsageError: `save_steps` is less than 1.
    """

    def __init__(self, settings: RunSettings, save_steps: int | None) -> None:
        steps = settings.save_steps or save_steps
        if steps is not None and steps < 1:
            raise UsageError(f"save_steps {steps} must be at least 1")
        is_by_steps = settings.save_every is None and settings.save_strategy in {None, "steps"}
        self._steps = steps if is_by_steps else None
        self._lacks_steps = settings.save_strategy == "steps" and steps is None
        self._is_by_epoch = settings.save_strategy == "epoch"
        self._epochs = 0

    def begin(self, data: DataProgress) -> str:
        """Begin at the position of `data`, in a new run or after a resume.

        Returns:
            Why a setting has no effect; empty if every setting has an effect.
        """
        self._epochs = _epochs_ended(data)
        if self._lacks_steps:
            return "--save-strategy steps has no effect without a number of steps; give --save-steps"
        if self._is_by_epoch and data.num_batches is None:
            self._is_by_epoch = False  # all ranks must save together, and their epochs may end at different steps
            return (
                "--save-strategy epoch has no effect, because the number of batches in an epoch is not known; give "
                "--save-steps"
            )
        return ""

    def is_due(self, step: int, data: DataProgress) -> bool:
        """Whether the step that has just ended is saved; called once for each step."""
        epochs, self._epochs = self._epochs, _epochs_ended(data)
        if self._is_by_epoch:
            return self._epochs > epochs
        return self._steps is not None and step % self._steps == 0


def _epochs_ended(data: DataProgress) -> int:
    """Epochs done, including the running epoch if the loop has received its last batch."""
    return data.epoch + (1 if data.num_batches and data.batches >= data.num_batches else 0)
