"""States of older releases of Lightning, which Lightning changes after it has read them.

A check of the file does not see what the change makes of it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.foundation.environment import Place

pytest.importorskip("lightning")


def _restored(folder: Path, checkpoint: dict[str, Any]) -> Any:
    """A ModelCheckpoint after a resume from this checkpoint."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from safepoint.training.integrations.lightning.lightning_parts import LightningParts

    callback = ModelCheckpoint(folder / "best", monitor="loss")
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback], enable_progress_bar=False)
    connector = trainer._checkpoint_connector

    def restore(path: Path, weights_only: bool | None) -> None:
        connector.resume_start(path, weights_only)
        connector.restore_callbacks()

    torch.save({"epoch": 0, "global_step": 2, "state_dict": {}, **checkpoint}, folder / "lightning.ckpt")
    LightningParts(trainer, Place()).restore(folder, None, restore)
    return callback


def _state(folder: Path, path: str) -> dict[str, Any]:
    return {
        "dirpath": str(folder / "best"), "best_model_path": path, "best_model_score": torch.ones(()),
        "kth_best_model_path": path, "kth_value": torch.ones(()), "best_k_models": {path: torch.ones(())},
        "last_model_path": path,
    }  # fmt: skip


def _key(folder: Path) -> str:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(folder / "best", monitor="loss").state_key


@pytest.mark.parametrize("where", ["s3://bucket/a.ckpt", "/etc/passwd.ckpt"])
def test_a_key_of_lightning_1_8(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning removes a part of the key, and finds the state of the callback under the rest."""
    key = f"{_key(tmp_path)[:-1]}, 'save_on_train_epoch_end': None}}"
    states = {key: _state(tmp_path, where)}
    found = _restored(tmp_path, {"pytorch-lightning_version": "1.8.0", "loops": {}, "callbacks": states})
    assert (found.best_model_path, found.last_model_path, found.best_k_models) == ("", "", {})
    assert "which is not a file of" in caplog.text


@pytest.mark.filterwarnings("ignore:You have multiple", "ignore:Be aware that when using")
def test_a_value_of_lightning_0_9(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning moves it into the states of the callbacks."""
    checkpoint: dict[str, Any] = {
        "pytorch-lightning_version": "0.9.0",
        "checkpoint_callback_best_model_path": "https://host/a.ckpt",
        "checkpoint_callback_best_model_score": torch.ones(()),
    }
    from lightning.pytorch.utilities.migration.migration import _get_fit_loop_initial_state_1_6_0

    found = _restored(tmp_path, {**checkpoint, "loops": {"fit_loop": _get_fit_loop_initial_state_1_6_0()}})
    assert found.best_model_path == ""
    assert "which is not a file of" in caplog.text


def test_the_state_of_this_run(tmp_path: Path) -> None:
    import lightning

    path = str(tmp_path / "best" / "a.ckpt")
    checkpoint = {"pytorch-lightning_version": lightning.__version__, "loops": {}}
    found = _restored(tmp_path, {**checkpoint, "callbacks": {_key(tmp_path): _state(tmp_path, path)}})
    assert (found.best_model_path, found.last_model_path, list(found.best_k_models)) == (path, path, [path])
