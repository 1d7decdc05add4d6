"""Which steps of a loop are saved without anybody asking: every so many, the last one of each epoch, or none."""

from safepoint.errors import UsageError
from safepoint.settings.run_settings import RunSettings
from safepoint.training.plain.data.position import Feed


class Periodic:
    """Decides after each step, and likewise on all ranks; what goes by time is the vote's.

    Args:
        settings: of the run; they count more than the script.
        save_steps: what the script says: optimizer steps between checkpoints, or None.

    Raises:
        UsageError: `save_steps` is none.
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

    def begin(self, feed: Feed) -> str:
        """The loop begins, or goes on, where `feed` stands.

        Returns:
            Why a setting has no effect; empty when all have.
        """
        self._epochs = _epochs_ended(feed)
        if self._lacks_steps:
            return "--save-strategy steps has no effect: nobody says after how many; give --save-steps"
        if self._is_by_epoch and feed.num_batches is None:
            self._is_by_epoch = False  # ranks whose data end at different steps would not save together
            return (
                "--save-strategy epoch has no effect: how many batches an epoch has is not known; give --save-steps"
            )
        return ""

    def is_due(self, step: int, feed: Feed) -> bool:
        """Whether the step that has just ended is saved; call it once for each step."""
        epochs, self._epochs = self._epochs, _epochs_ended(feed)
        if self._is_by_epoch:
            return self._epochs > epochs
        return self._steps is not None and step % self._steps == 0


def _epochs_ended(feed: Feed) -> int:
    """With the one whose last batch the loop has had; what it does not step for is the next step's."""
    return feed.epoch + (1 if feed.num_batches and feed.batches >= feed.num_batches else 0)
