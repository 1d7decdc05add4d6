"""The loop of an older Trainer gets the methods that later ones have."""

import importlib.util
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from safepoint.errors import SafepointError
from safepoint.training.compatibility.transformers_releases import split_loop

LOOP = '''
class Trainer:
    def _inner_training_loop(self, epochs=3, resumed=0, trial=None):
        """As transformers 4.57, with all that does not matter left out."""
        start_time = 1.0
        num_train_samples = epochs * 2
        epochs_trained, steps_trained_in_current_epoch = resumed, 0
        tr_loss = 0.0
        self.done = []
        for epoch in range(epochs_trained, epochs):
            epoch_dataloader = [1.0, 2.0]
            self.done.append(f"begin {epoch}")
            self.control = self.handler.on_epoch_begin(self)
            for number, batch in enumerate(epoch_dataloader):
                if epoch == epochs_trained and number < steps_trained_in_current_epoch:
                    continue
                tr_loss = tr_loss + batch
            self.done.append(f"end {epoch}")
            if self.stop:
                break
        self.done.append("finish")
        metrics = {"loss": tr_loss, "samples": num_train_samples, "start": start_time}
        return metrics
'''


def release(folder: Path, source: str = LOOP) -> Any:
    """A module with a Trainer, and a file in which its source is."""
    path = folder / "older_trainer.py"
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location("older_trainer", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trainer(module: ModuleType) -> Any:
    made: Any = module.Trainer()
    made.stop = False
    made.handler = type("Handler", (), {"on_epoch_begin": staticmethod(lambda one: one.done.append("callback"))})
    return made


def test_the_result_is_the_same(tmp_path: Path) -> None:
    """The loop is the release's own."""
    before = trainer(release(tmp_path))._inner_training_loop()
    module = release(tmp_path)
    split_loop(module)
    after = trainer(module)
    assert after._inner_training_loop() == before
    assert after._tr_loss == before["loss"]
    assert module.Trainer._inner_training_loop.__qualname__ == "Trainer._inner_training_loop"


def test_an_epoch_can_be_skipped(tmp_path: Path) -> None:
    """Nothing of the epoch is done but `on_epoch_begin`, and training is finished."""
    module = release(tmp_path)
    split_loop(module)
    one = trainer(module)
    one._run_epoch = lambda *, train_dataloader, epoch: epoch < 1 and train_dataloader == [1.0, 2.0]
    assert one._inner_training_loop()["loss"] == 3.0
    assert one.done == ["begin 0", "callback", "end 0", "begin 1", "callback", "finish"]


def test_the_position_can_be_another(tmp_path: Path) -> None:
    """Epochs, and batches of the first of them."""
    module = release(tmp_path)
    split_loop(module)
    one = trainer(module)
    one._init_training_state = lambda epochs, batches: (epochs + 1, batches + 1)
    assert one._inner_training_loop(resumed=1)["loss"] == 2.0


def test_what_follows_the_epochs_can_wait(tmp_path: Path) -> None:
    """It takes another start time, and the loss is known before it runs."""
    module = release(tmp_path)
    split_loop(module)
    one = trainer(module)
    seen: list[Any] = []

    def finalize(trial: Any, num_train_samples: int, start_time: float, finish: Any) -> Any:
        seen.append((trial, one._tr_loss, one.done[-1]))
        return finish(trial, num_train_samples, start_time - 7)

    one._finalize_training = finalize
    assert one._inner_training_loop(trial="t") == {"loss": 9.0, "samples": 6, "start": -6.0}
    assert seen == [("t", 9.0, "end 2")]


def test_a_traceback_shows_the_line(tmp_path: Path) -> None:
    """The numbers of the lines are those of the release's file."""
    module = release(tmp_path)
    split_loop(module)
    one = trainer(module)
    del one.stop
    with pytest.raises(AttributeError) as caught:
        one._inner_training_loop()
    assert caught.traceback[-1].lineno + 1 == LOOP.splitlines().index("            if self.stop:") + 1


@pytest.mark.parametrize("what", ["on_epoch_begin", "for epoch in"])
def test_a_loop_of_another_form_is_refused(what: str, tmp_path: Path) -> None:
    """Before a training starts."""
    other = {"on_epoch_begin": "epoch_starts", "for epoch in": "for one in"}[what]
    with pytest.raises(SafepointError, match=r"unknown form .*; training was not started"):
        split_loop(release(tmp_path, LOOP.replace(what, other)))


def test_a_later_release_is_left_alone() -> None:
    """It has the methods."""
    module: Any = ModuleType("later")
    module.Trainer = type("Trainer", (), {"_run_epoch": 1, "_inner_training_loop": 2})
    split_loop(module)
    assert module.Trainer._inner_training_loop == 2
