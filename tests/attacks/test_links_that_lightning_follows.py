"""Links in the folder of Lightning's ModelCheckpoint, which lies in the output folder that another user has changed.

ModelCheckpoint deletes the files that its state names, and writes new ones. Through a link, it would do so elsewhere.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")

_PROGRAM = """
import shutil, sys, warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from safepoint.lightning import SafepointCallback
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.support.checkpoints import reseal

warnings.simplefilter("ignore")


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, number):
        self.log("loss", self.layer(batch[0]).square().mean())
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Later(pl.Callback):
    def on_train_epoch_start(self, trainer, module):
        if case == "later" and trainer.current_epoch == 1:
            (best / "sub").rename(best / "old")
            (best / "sub").symlink_to(victim)
        if case == "the whole folder later" and trainer.current_epoch == 1:
            best.rename(output / "old")
            best.symlink_to(victim)


def fit(epochs):
    callbacks = [SafepointCallback(output, save_steps=4), Later()]
    callbacks.append(ModelCheckpoint(best, filename="{step}", monitor="loss", save_top_k=1, save_last=True))
    trainer = pl.Trainer(
        max_epochs=epochs, logger=False, accelerator="cpu", enable_progress_bar=False, callbacks=callbacks
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))
    return callbacks[-1]


root, case = Path(sys.argv[1]), ""
output = root / "base"
best = output / "best"
fit(1)
for case in sys.argv[2:]:
    output, victim = root / case / "out", root / case / "victim"
    best = output / "best"
    shutil.copytree(root / "base", output)
    (victim / "a.ckpt").mkdir(parents=True)
    (victim / "a.ckpt" / "papers").touch()
    (victim / "step=4.ckpt").write_text("papers")
    path, last = f"{best}/sub/a.ckpt", f"{best}/last.ckpt"
    if case == "in the folder":
        (best / "sub").symlink_to(victim)
    elif case == "last":
        (best / "sub").symlink_to(victim)
        path, last = f"{best}/step=4.ckpt", path
    elif case == "later":
        (best / "sub" / "a.ckpt").mkdir(parents=True)
    elif case == "the whole folder":
        shutil.rmtree(best)
        best.symlink_to(victim)
        path, last = f"{victim}/a.ckpt", ""
    elif case in {"the whole folder later", "honest"}:
        path = f"{best}/step=4.ckpt"
    elif case == "above":
        shutil.move(output, root / case / "real")
        output.symlink_to(root / case / "real")
        path, last = (f"{root}/{case}/real/best/{name}.ckpt" for name in ("step=4", "last"))
    file = output / "checkpoint-4" / "lightning.ckpt"
    content = torch.load(file, weights_only=True)
    key = next(key for key in content["callbacks"] if key.startswith("ModelCheckpoint"))
    worst = torch.tensor(1e9)
    content["callbacks"][key] |= {
        "dirpath": str(best.resolve()), "best_model_path": path, "best_k_models": {path: worst},
        "kth_best_model_path": path, "kth_value": worst, "best_model_score": worst, "last_model_path": last,
    }
    torch.save(content, file)
    reseal(file.parent)
    try:
        done = fit(3)
        print(f"CASE [{case}] trained", *sorted(path.name for path in best.iterdir()), flush=True)
    except BaseException as error:
        print(f"CASE [{case}]", type(error).__name__, error, flush=True)
"""
_CASES = ("in the folder", "last", "later", "the whole folder", "the whole folder later", "above", "honest")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of all cases, and what was printed. One process runs all cases, because its imports take long."""
    folder = tmp_path_factory.mktemp("cases")
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH') or root / 'src'}:{root}"
    command = [sys.executable, str(program), str(folder), *_CASES]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=280)
    return folder, done.stdout + done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", _CASES)
def test_what_is_deleted(case: str, ended: tuple[Path, str]) -> None:
    """Nothing outside of the folder, also if the link is put in place while the run trains."""
    folder, text = ended
    [line] = [line for line in text.splitlines() if line.startswith(f"CASE [{case}] ")]
    victim = folder / case / "victim"
    assert (victim / "a.ckpt" / "papers").exists(), text
    assert (victim / "step=4.ckpt").read_text() == "papers", text
    if case == "the whole folder":
        assert f"StorageError {folder / case}/out/best is a link in the output folder" in line, text
        assert set(os.listdir(victim)) == {"a.ckpt", "step=4.ckpt"}
    elif case == "the whole folder later":
        assert "the model was not saved" in line, text
    else:
        assert "trained" in line, text
    if case in {"honest", "above"}:
        assert line.split()[3:] == ["last.ckpt", "step=12.ckpt"], text


def test_links_inside(tmp_path: Path) -> None:
    from safepoint.training.integrations.lightning.checkpoint_links import link_inside

    root, elsewhere = tmp_path / "real", tmp_path / "elsewhere"
    for path in (root / "a", elsewhere):
        path.mkdir(parents=True)
    (root / "link").symlink_to(elsewhere)
    (root / "circle").symlink_to("circle")
    (tmp_path / "above").symlink_to(root)
    (elsewhere / "back").symlink_to(root / "link" / "..")
    assert link_inside(root, root / "a" / "missing" / "b") is None
    assert link_inside(tmp_path / "above", tmp_path / "above" / "a") is None
    for path in ("above/link/b", "real/link", "real/link/../real/a", "elsewhere/back/x"):
        assert link_inside(tmp_path / "above", tmp_path / path) == str(root / "link")
    assert link_inside(root, root / "circle" / "a")


def test_files_that_loggers_upload(tmp_path: Path) -> None:
    """A logger uploads the files that ModelCheckpoint names, with their content."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from safepoint.training.integrations.lightning.checkpoint_links import CheckpointLinks

    (tmp_path / "key").write_text("secret")
    callback: Any = ModelCheckpoint(tmp_path / "out" / "best", monitor="loss")
    (tmp_path / "out" / "best").mkdir(parents=True)
    own = {name: f"{callback.dirpath}/{name}.ckpt" for name in ("a", "link", "last")}
    Path(own["a"]).touch()
    Path(own["link"]).symlink_to(tmp_path / "key")
    Path(own["last"]).symlink_to("a.ckpt")
    links = CheckpointLinks(SimpleNamespace(callbacks=[callback], world_size=1), tmp_path / "out")
    links.check_folders()
    for name, kept in (("a", own["a"]), ("link", "")):
        state = {**callback.state_dict(), "best_model_path": own[name], "last_model_path": own["last"]}
        callback.load_state_dict(state)
        links.forget_links()
        assert callback.best_model_path == kept
