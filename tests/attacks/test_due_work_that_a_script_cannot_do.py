"""A checkpoint states due work that nothing in the script can cause.

A due evaluation ended each start of a script without evaluation data, with an error that names no file. A training
that the checkpoint stated to have ended early ended at once, as if it were complete.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork
from safepoint.training.integrations.transformers.run import TrainerRun

_ALL = DeferredWork(evaluate=True, save=True, epoch_end=True, complete=True)


class Own(Trainer):
    pass


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        def stop() -> None:
            self.control.should_training_stop = True

        stop()


class OwnEvaluation(Trainer):
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return []


class OwnCallback(TrainerCallback):
    pass


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 40


def begin(
    kind: type[Any] = Trainer, *callbacks: Any, strategy: str = "no", train: Any = (), evaluation: Any = None,
    epoch: float = 0.5, pending: DeferredWork = _ALL,
) -> tuple[list[DeferredWork], bool]:  # fmt: skip
    """What a run does when its loop begins: the work that it does first, and whether it is complete."""
    trainer: Any = object.__new__(kind)
    trainer.train_dataset, trainer.eval_dataset = train, evaluation
    trainer.args = SimpleNamespace(eval_strategy=strategy)
    trainer.state = SimpleNamespace(epoch=epoch, max_steps=24, compute_steps=lambda *_: None)
    run: Any = object.__new__(TrainerRun)
    trainer.callback_handler = SimpleNamespace(callbacks=[DefaultFlowCallback(), *callbacks, run])
    trainer.is_world_process_zero = lambda: True
    done: list[DeferredWork] = []
    begins = SimpleNamespace(loop_begins=lambda: None)
    run._trainer, run._callbacks, run._boundary = trainer, begins, begins
    run._context = SimpleNamespace(progress=begins, log=logging.getLogger("safepoint"))
    run._resume = SimpleNamespace(
        restore=lambda: pending, deferred_work_done=lambda: None, is_complete=pending.complete
    )
    run._report_progress, run._do_deferred = lambda: None, done.append
    run.on_train_begin(trainer.args, trainer.state, None)
    return done, run._resume.is_complete


def test_nothing_of_the_script(caplog: pytest.LogCaptureFixture) -> None:
    """Each part is ignored, with a warning."""
    assert begin() == ([DeferredWork()], False)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "the checkpoint says that an evaluation is due",
        "the checkpoint says that the end of an epoch is due",
        "the checkpoint says that the training has ended before its last step",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strategy": "steps"}, False),  # the Trainer itself refuses such a script
        ({"evaluation": [1]}, False),
        ({"strategy": "steps", "evaluation": [1]}, True),
        ({"strategy": "epoch", "evaluation": [1]}, True),
        ({"kind": Own}, False),
        ({"kind": Own, "evaluation": [1]}, True),
        ({"kind": OwnEvaluation}, True),
    ],
)
def test_evaluations(options: dict[str, Any], expected: bool) -> None:
    ((done,), _) = begin(**options)
    assert (done.evaluate, done.save) == (expected, expected)


def test_an_evaluation_that_a_callback_requests() -> None:
    ((done,), _) = begin(Trainer, OwnCallback(), evaluation=[1])
    assert done.evaluate


@pytest.mark.parametrize(("epoch", "expected"), [(1.0, True), (1.5, False)])
def test_ends_of_epochs(epoch: float, expected: bool) -> None:
    ((done,), _) = begin(epoch=epoch)
    assert done.epoch_end is expected


def test_trainings_that_can_end_early() -> None:
    assert begin(Trainer, OwnCallback())[1]
    assert begin(Trainer, EarlyStoppingCallback())[1]
    assert begin(OwnStep)[1]
    assert not begin(Own)[1]
    assert not begin(OwnEvaluation)[1]
    assert begin(train=Stream())[1]
    assert begin(train=iter(()))[1]
    assert not begin(train=[1, 2])[1]


def test_no_due_work(caplog: pytest.LogCaptureFixture) -> None:
    assert begin(pending=DeferredWork()) == ([DeferredWork()], False)
    assert not caplog.records
