"""Checkpoints that are exchanged while a framework loads them: no look at a path says what a later use of it finds.

So all that the loading thread loads is data, wherever the file is.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.training.integrations.deepspeed.loading import with_checked_tag
from safepoint.training.state import data_only
from safepoint.training.state.data_only import only_data
from tests.support.pickles import Call


class Script:
    """A class of the script, which it loads from its own files."""


def _folders(tmp_path: Path) -> tuple[Path, Path]:
    folder, elsewhere = tmp_path / "checkpoint-4", tmp_path / "elsewhere"
    for path in (folder, elsewhere):
        path.mkdir()
    torch.save({"called": Call(tmp_path / "called")}, elsewhere / "a.pt")
    torch.save({"called": 1}, folder / "a.pt")
    return folder, elsewhere


def _in_new_thread(task: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("in_thread", [False, True])
def test_files_elsewhere(in_thread: bool, tmp_path: Path) -> None:
    """As if the folder had been another one at the moment of the look: DeepSpeed loads without restrictions."""
    folder, elsewhere = _folders(tmp_path)

    def load() -> None:
        torch.load(elsewhere / "a.pt", weights_only=False)

    with pytest.raises(CheckpointError, match="could run code") as raised, only_data(folder):
        _in_new_thread(load) if in_thread else load()
    assert not (tmp_path / "called").exists()
    assert "load this file before training starts" in str(raised.value)


def test_a_folder_that_is_exchanged_at_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = _folders(tmp_path)
    look = data_only._is_in

    def exchange() -> None:
        folder.rename(tmp_path / "third")
        elsewhere.rename(folder)
        (tmp_path / "third").rename(elsewhere)

    def exchanging(*arguments: Any) -> bool:
        exchange()  # others see another folder now
        found = look(elsewhere, arguments[1])
        exchange()
        return found

    monkeypatch.setattr(data_only, "_is_in", exchanging)
    with only_data(folder):
        torch.load(folder / "a.pt", weights_only=False)
    exchange()
    with pytest.raises(CheckpointError, match="could run code"), only_data(folder):
        torch.load(folder / "a.pt", weights_only=False)
    assert not (tmp_path / "called").exists()


def test_a_framework_that_ignores_the_error(tmp_path: Path) -> None:
    folder, elsewhere = _folders(tmp_path)
    with pytest.raises(CheckpointError, match="could run code"), only_data(folder), contextlib.suppress(Exception):
        torch.load(elsewhere / "a.pt", weights_only=False)


def test_what_a_script_loads_meanwhile(tmp_path: Path) -> None:
    """Data, classes that it has allowed, and anything in a thread of its own that it has started before."""
    folder, elsewhere = _folders(tmp_path)
    torch.save({"weights": torch.ones(3)}, elsewhere / "data.pt")
    torch.save(Script(), elsewhere / "object.pt")
    asked, done, found = threading.Event(), threading.Event(), list[Any]()

    def work() -> None:
        asked.wait()
        found.append(torch.load(elsewhere / "object.pt", weights_only=False))
        try:
            torch.load(folder / "b.pt", weights_only=False)
        except CheckpointError as error:
            found.append(error)
        done.set()

    torch.save({"called": Call(tmp_path / "called")}, folder / "b.pt")
    thread = threading.Thread(target=work)
    thread.start()
    with contextlib.suppress(CheckpointError), only_data(folder):
        asked.set()
        assert done.wait(30)
        torch.load(elsewhere / "data.pt", weights_only=False)
        with torch.serialization.safe_globals([Script]):
            assert isinstance(torch.load(elsewhere / "object.pt", weights_only=False), Script)
    thread.join()
    assert isinstance(found[0], Script)
    assert isinstance(found[1], CheckpointError)
    assert not (tmp_path / "called").exists()


# ---- DeepSpeed ---------------------------------------------------------------------------------------------------


class Engine(torch.nn.Module):
    """As DeepSpeed's engine: without a tag it reads the tag from the checkpoint."""

    def load_checkpoint(self, load_dir: str, tag: str | None = None, load_module_strict: bool = True) -> Any:
        if tag is None:
            tag = (Path(load_dir) / "latest").read_text().strip()
        return torch.load(os.path.join(load_dir, tag, "a.pt"), weights_only=False)


def test_the_name_that_deepspeed_loads(tmp_path: Path) -> None:
    """It changes after it has been checked."""
    folder, elsewhere = tmp_path / "checkpoint-4", tmp_path / "elsewhere"
    (folder / "global_step4").mkdir(parents=True)
    elsewhere.mkdir()
    torch.save({"a": 1}, folder / "global_step4" / "a.pt")
    torch.save({"a": 2}, elsewhere / "a.pt")
    (folder / "latest").write_text("global_step4\n")
    engine = Engine()
    with only_data(folder), with_checked_tag(engine, folder):
        (folder / "latest").write_text(str(elsewhere))
        assert engine.load_checkpoint(str(folder), load_module_strict=True) == {"a": 1}
    assert "load_checkpoint" not in vars(engine)


@pytest.mark.parametrize("tag", [None, "../elsewhere", "/tmp", ""])
def test_a_name_that_cannot_be_loaded(tag: str | None, tmp_path: Path) -> None:
    if tag is not None:
        (tmp_path / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="latest"), with_checked_tag(Engine(), tmp_path):
        pass
