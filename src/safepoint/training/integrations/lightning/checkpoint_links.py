"""Keeps Lightning from writing and deleting through links that another user has put into a folder.

A link is refused if it lies in the output folder, or in the folder of a ModelCheckpoint when a file is deleted. Links
above the output folder stay allowed, because a user may have linked the whole folder to a larger disk.

Lightning itself writes the files. If another user replaces a folder by a link between the check and the write, the
file is written to the target of the link. Files are deleted without this gap.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from safepoint.checkpoint.pickles.temporary_attributes import Overrides
from safepoint.errors import StorageError, printable
from safepoint.foundation.files import delete_tree
from safepoint.training.integrations.lightning.checkpoint_files import is_local, own_path

_log = logging.getLogger("safepoint")
_GIVEN = "_safepoint_folder"
"""The attribute of a ModelCheckpoint with the folder that the script has given to it."""
_MOST_NAMES = 4096
"""The most names and links on the way to a file. More make a circle of links."""


def remember_folders() -> None:
    """Record the folder that a script gives to each ModelCheckpoint from now on.

    ModelCheckpoint follows all links in this path, and keeps only the result.
    """
    kind: Any = ModelCheckpoint
    name = "_ModelCheckpoint__init_ckpt_dir"
    original = getattr(kind, name, None)
    if original is None or hasattr(original, _GIVEN):
        return

    def initialize(self: Any, dirpath: Any, *arguments: Any, **named: Any) -> None:
        if dirpath and is_local(dirpath):
            setattr(self, _GIVEN, os.path.join(os.getcwd(), os.path.expanduser(dirpath)))
        original(self, dirpath, *arguments, **named)

    setattr(initialize, _GIVEN, True)
    setattr(kind, name, initialize)


def link_inside(root: str | Path, path: str | Path) -> str | None:
    """The first link on the way to `path` that lies in the folder `root`; None if there is none.

    Args:
        root: the folder. Its own path may lead through links.
        path: a path; what it names may be missing. It is not normalized before links are followed.
    """
    inside = os.path.realpath(root)
    pending = os.path.join(os.getcwd(), path).split("/")[::-1]
    current = "/"
    for _ in range(_MOST_NAMES):
        if not pending:
            return None
        name = pending.pop()
        if name == "..":
            current = os.path.dirname(current)
            continue
        place = os.path.join(current, name) if name not in {"", "."} else current
        try:
            target = os.readlink(place)
        except OSError:  # it is no link, or is missing
            current = place
            continue
        if Path(current).is_relative_to(inside):
            return place
        current = "/" if target.startswith("/") else current
        pending += target.split("/")[::-1]
    return str(path)


class CheckpointLinks:
    """The folders of the callbacks of a Trainer that write checkpoints.

    Args:
        trainer: a `lightning.pytorch.Trainer`.
        root: the output folder; None if there is none on this machine.
    """

    def __init__(self, trainer: Any, root: Path | None) -> None:
        self._trainer = trainer
        self._root = None if root is None else Path(os.path.realpath(root))
        self._real: dict[str, Path] = {}
        """The folder of a callback → the folder to which it led when the training began."""
        self._before: list[tuple[Any, dict[str, Any]]] = []

    def check_folders(self) -> None:
        """Refuse a folder of a callback if the path to it leads through a link in the output folder.

        Raises:
            StorageError: there is such a link.
        """
        for callback in self._trainer.callbacks:
            folder: Any = getattr(callback, "dirpath", None)
            if (
                not isinstance(callback, ModelCheckpoint | OnExceptionCheckpoint)
                or not folder
                or not is_local(folder)
            ):
                continue
            for path in (getattr(callback, _GIVEN, folder), folder):
                self._check(path, "training was not started")
            self._real[str(folder)] = Path(os.path.realpath(folder))
            if isinstance(callback, ModelCheckpoint):
                self._before.append((callback, callback.state_dict()))

    def refused(self) -> Overrides:
        """Refuse links when files are written and deleted: until the returned `Overrides` is closed."""
        overrides = Overrides()
        overrides.override(self._trainer.strategy, "remove_checkpoint", self._remove)
        for callback, _ in self._before:
            overrides.override(callback, "_save_checkpoint", self._save)
            overrides.override(callback, "_link_checkpoint", self._link)
        return overrides

    def forget_links(self) -> None:
        """Undo the load of each state of a ModelCheckpoint that names a link. Loggers would upload its target.

        The first rank decides: the other ranks may not see the files. A link to another file of the callback stays,
        because ModelCheckpoint itself makes such a link with `save_last="link"`.
        """
        found = [self._named_link(callback) for callback, _ in self._before]
        if self._trainer.world_size > 1:
            found = self._trainer.strategy.broadcast(found)
        for (callback, before), path in zip(self._before, found, strict=True):
            if path:
                _log.warning(
                    "the state of ModelCheckpoint names %s, and there is a link: this state is not restored, and the "
                    "best models are chosen among new models",
                    printable(repr(path)),
                )
                ModelCheckpoint.load_state_dict(callback, {**before, "dirpath": callback.dirpath})

    def _named_link(self, callback: Any) -> str:
        folder = self._real[str(callback.dirpath)]
        paths = [*callback.best_k_models, callback.best_model_path, callback.kth_best_model_path]
        for path in filter(None, dict.fromkeys([*paths, callback.last_model_path])):
            own = self._place(path, callback)
            if own is None or link_inside(folder, own.parent):
                return path
            if os.path.islink(own):
                target = Path(os.path.normpath(own.parent / os.readlink(own)))
                if not target.is_relative_to(folder) or link_inside(folder, target):
                    return path
        return ""

    def _place(self, path: str, callback: Any) -> Path | None:
        """Where a file of a callback was when the training began, whatever has happened to its folder since."""
        own = own_path(path, callback)
        if own is None:
            return None
        return self._real[str(callback.dirpath)] / own.removeprefix(str(callback.dirpath).rstrip("/")).lstrip("/")

    def _check(self, path: str | Path, consequence: str) -> None:
        link = None if self._root is None else link_inside(self._root, path)
        if link is not None:
            raise StorageError(
                f"{printable(link)} is a link in the output folder, and ModelCheckpoint would write through it to "
                f"{printable(os.path.realpath(link))}; {consequence}",
                hint="delete the link; if you made it yourself, give ModelCheckpoint the path to which it leads",
            )

    def _save(self, original: Callable[..., None], trainer: Any, filepath: Any) -> None:
        if trainer.is_global_zero and is_local(filepath):
            self._check(os.path.dirname(filepath), "the model was not saved")
        original(trainer, filepath)

    def _link(self, original: Callable[..., None], trainer: Any, filepath: Any, linkpath: Any) -> None:
        if trainer.is_global_zero and is_local(linkpath):
            self._check(os.path.dirname(linkpath), "the model was not saved")
        original(trainer, filepath, linkpath)

    def _remove(self, original: Callable[..., None], filepath: Any) -> None:
        if not self._trainer.is_global_zero or not is_local(filepath):
            original(filepath)
            return
        owner = next((one for one, _ in self._before if own_path(str(filepath), one)), None)
        given, name = os.path.split(str(filepath))
        folder = self._real.get(given if owner is None else str(owner.dirpath)) or Path(os.path.realpath(given))
        place = (None if owner is None else self._place(str(filepath), owner)) or folder / name
        below = self._root if self._root is not None and folder.is_relative_to(self._root) else folder
        link = link_inside(below, place.parent)
        if link is not None:
            _log.warning("%s was not deleted, because %s is a link", printable(str(place)), printable(link))
        elif _is_of_lightning(self._trainer.strategy.checkpoint_io):
            delete_tree(place, below=below)
        else:
            original(filepath)


def _is_of_lightning(plugin: Any) -> bool:
    """Whether Lightning's own code deletes files, also inside of a plugin that wraps another one."""
    while plugin is not None:
        if not type(plugin).__module__.startswith(("lightning.", "pytorch_lightning.")):
            return False
        inner = getattr(plugin, "checkpoint_io", None)
        plugin = None if inner is plugin else inner
    return True
