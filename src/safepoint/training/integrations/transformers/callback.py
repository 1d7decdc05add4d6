"""The Trainer's events, passed on to the run."""

from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

if TYPE_CHECKING:
    from safepoint.training.integrations.transformers.run import TrainerRun


class SafepointCallback(TrainerCallback):
    """Tells `run` where the training loop is.

    Args:
        run: the `train()` call that it serves.
    """

    def __init__(self, run: "TrainerRun") -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The loop begins."""
        self._run.begin_loop()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch begins; its sampler has not been drawn yet."""
        self._run.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of a step is next."""
        self._run.begin_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch is done, and the step is not."""
        self._run.end_micro_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are complete; the optimizer works next."""
        self._run.before_optimizer()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The epoch's steps are done; its log line, evaluation and save follow."""
        self._run.end_epoch()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch was evaluated or predicted."""
        self._run.poll()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Figures were logged."""
        self._run.note_figures(logs or {})
