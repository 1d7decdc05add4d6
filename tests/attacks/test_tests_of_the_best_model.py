"""After a training with Lightning, someone changes the checkpoints in the output folder, or adds one.

`Trainer.test(ckpt_path="best")` then reads a checkpoint once more. It must be one of this run, and what it contains
must not run: the state of a module may be a pickle. This also applies to the files of the script's ModelCheckpoint.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")
_PROGRAM = """
import json, os, pickle, shutil, sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.lightning import SafepointCallback
from tests.support.checkpoints import sealed
from tests.support.pickles import Call


class Layer(torch.nn.Linear):
    def get_extra_state(self):
        return torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8)

    def set_extra_state(self, state):
        pickle.loads(state.numpy().tobytes())


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = Layer(4, 4)

    def training_step(self, batch, number):
        return self.layer(batch[0]).square().mean()

    def test_step(self, batch, number):
        self.log("weight", self.layer.weight.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plant(folder, *, step, run_id=None, calls):
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    if newest != folder:
        shutil.copytree(newest, folder)
    state = torch.load(folder / "lightning.ckpt", weights_only=True)
    state["state_dict"]["layer.weight"] = torch.full((4, 4), 1e6)
    if calls:
        data = bytearray(pickle.dumps(Call(output / "called")))
        state["state_dict"]["layer._extra_state"] = torch.frombuffer(data, dtype=torch.uint8)
    torch.save(state, folder / "lightning.ckpt")
    record = json.loads((folder / MANIFEST_NAME).read_bytes())
    record |= {"step": step, "run_id": run_id or record["run_id"]}
    for entry in record["files"]:
        content = (folder / entry["path"]).read_bytes()
        entry |= {"digest": digest_bytes(content), "size_bytes": len(content)}
    (folder / MANIFEST_NAME).write_bytes(sealed(record))


output, attack = Path(sys.argv[1]), sys.argv[2]
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
callback = SafepointCallback(output)
trainer = pl.Trainer(max_epochs=1, callbacks=[callback], logger=False, accelerator="cpu")
module = Module()
trainer.fit(module, loader)
if attack == "another run":
    plant(output / "checkpoint-900", step=900, run_id="other", calls=True)
elif attack == "a later step":
    plant(output / "checkpoint-900", step=900, calls=True)
elif attack == "the same step":
    plant(output / "checkpoint-4", step=4, calls=True)
print("TESTED", trainer.test(module, loader, ckpt_path="best"))
assert trainer.fit_loop is not None and not callback._overrides._exit_callbacks
"""


@pytest.mark.parametrize("attack", ["none", "another run", "a later step", "the same step"])
def test_what_is_tested(attack: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(program), str(tmp_path / "out"), attack]
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=200)
    assert not (tmp_path / "out" / "called").exists()
    if attack == "the same step":
        assert "posix.mkdir" in ended.stderr
        assert "TESTED" not in ended.stdout
    else:
        assert ended.returncode == 0, ended.stderr
        assert "1e+06" not in ended.stdout.partition("TESTED")[2]
        assert "'weight': " in ended.stdout.partition("TESTED")[2]


_OWN = (
    _PROGRAM.partition("output, attack =")[0]
    + """
output, word = Path(sys.argv[1]), sys.argv[2]
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
own = pl.callbacks.ModelCheckpoint(output / "best", save_last=True)
options = dict(max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False)
module = Module()
Module.validation_step = Module.test_step
Module.predict_step = lambda self, batch, number: self.layer(batch[0])
if word != "only test":
    trainer = pl.Trainer(callbacks=[SafepointCallback(output), own], **options)
    trainer.fit(module, loader)
else:
    pl.Trainer(callbacks=[own], **options).fit(module, loader)
    trainer = pl.Trainer(callbacks=[SafepointCallback(output), own], **options)
if word == "honest":
    print("TESTED", trainer.test(module, loader, ckpt_path="best", weights_only=None))
    raise SystemExit
for path in (output / "best").iterdir():
    state = torch.load(path, weights_only=False)
    data = bytearray(pickle.dumps(Call(output / "called")))
    state["state_dict"]["layer._extra_state"] = torch.frombuffer(data, dtype=torch.uint8)
    torch.save(state, path)
if word == "fit":
    shutil.rmtree(output / "checkpoint-4")
    shutil.rmtree(output / ".safepoint")
    trainer = pl.Trainer(callbacks=[SafepointCallback(output / "other"), own], **options)
    print("TESTED", trainer.fit(module, loader, ckpt_path="last"))
else:
    method, _, path = word.partition(" ")
    if word == "only test":
        method, path = "test", "last"
    print("TESTED", getattr(trainer, method)(module, loader, ckpt_path=path))
"""
)


@pytest.mark.parametrize("word", ["honest", "test best", "predict best", "only test", "fit"])
def test_files_of_the_scripts_own_callback(word: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_OWN)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH') or root / 'src'}:{root}"
    command = [sys.executable, str(program), str(tmp_path / "out"), word]
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=200)
    assert not (tmp_path / "out" / "called").exists()
    if word == "honest":
        assert "'weight': " in ended.stdout.partition("TESTED")[2], ended.stderr
    else:
        assert "posix.mkdir" in ended.stderr, ended.stderr
        assert "TESTED" not in ended.stdout
