"""Lets StochasticWeightAveraging continue after a resume: in the middle of an epoch, and at the end of the training.

When the averages begin, the callback of Lightning replaces the scheduler of the script by its own. After a resume it
does so only when an epoch begins. Until then there would be no scheduler: the learning rate would miss the end of the
epoch, and a checkpoint would contain neither the scheduler nor the number of averaged models. So the callback has to
do it as soon as its state and the state of the optimizer are restored.

At the end of the training, the callback copies the averages into the model. It does not if the checkpoint was saved
after the last step, because Lightning then skips the training with its end.
"""

from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.optim.swa_utils import SWALR

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.checkpoint.pickles.scheduler_states import checked_state
from safepoint.checkpoint.pickles.temporary_attributes import temporarily


def continue_averaging(trainer: Any, where: object = None) -> None:
    """Make the schedulers of all averages that have begun, and load their states.

    The training must not have begun its loop. The averages and the weights do not change. An average that has not
    begun does not change either: it begins with the epoch that the script names.

    Args:
        trainer: a Trainer that has restored all other states.
        where: the file that the states come from, named in errors; None if the states are not to be checked.

    Raises:
        CheckpointError: the state of a scheduler is invalid.
    """
    for callback in trainer.callbacks:
        one: Any = callback
        if isinstance(callback, StochasticWeightAveraging) and one._scheduler_state is not None:
            _continue(one, trainer, where)


def take_over_averages(trainer: Any) -> None:
    """Copy the averages into the model, as Lightning does at the end of a training.

    Call this function if Lightning has skipped the training, because no step was left. If the model has the averages
    already, it does not change.

    Args:
        trainer: a Trainer that has restored all states.
    """
    for callback in trainer.callbacks:
        one: Any = callback
        if not isinstance(callback, StochasticWeightAveraging) or not one._initialized:
            continue
        # With BatchNorm, Lightning has made one more epoch with the averages. Then the checkpoint has them.
        if one._max_epochs == -1 or trainer.current_epoch - 1 == one.swa_end:
            one.transfer_weights(one._average_model, trainer.lightning_module)


def _continue(callback: Any, trainer: Any, where: object) -> None:
    kind: Any = SWALR
    load = kind.load_state_dict

    def load_state_dict(scheduler: Any, state: Any) -> None:
        if where is None:
            load(scheduler, state)
            return
        with states_of(where):
            load(scheduler, checked_state(where, scheduler, state))

    epoch = trainer.current_epoch
    with (
        # This epoch has its average already, and is not the one after the last, which has to take over the average.
        temporarily(callback, _latest_update_epoch=epoch, _max_epochs=epoch + 1),
        temporarily(kind, load_state_dict=load_state_dict),
    ):
        # A class of the script may do more when an epoch begins, so only the method of Lightning is called.
        StochasticWeightAveraging.on_train_epoch_start(callback, trainer, trainer.lightning_module)
