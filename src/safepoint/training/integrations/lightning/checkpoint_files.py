"""The files of Lightning's ModelCheckpoint. Another user may have written their paths into a checkpoint.

ModelCheckpoint deletes the files that its state names, and `Trainer.test(ckpt_path="best")` loads one of them. So a
state may name only files in the folder that the script gave to the callback. Lightning never receives a path of a
checkpoint: it receives the path that is built from the script's folder and the checked names in this folder.
"""

import logging
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from safepoint.errors import printable

_log = logging.getLogger("safepoint")
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
_MOST_MODELS = 10_000
"""The most best models that a callback which deletes none of them has after a resume."""
_MOST_BYTES = 255
"""The longest name of a file, on all file systems that are in use."""


def is_local(path: object) -> bool:
    """Whether a path is not an address, such as `s3://bucket/best`."""
    return "://" not in str(path)


def own_path(path: object, callback: ModelCheckpoint) -> str | None:
    """The path of a file in the folder of a ModelCheckpoint; None if `path` does not name such a file.

    Args:
        path: a path from a checkpoint. It is compared as it is: it may not contain `..`, empty names or the names of
            file systems.
        callback: the callback. The script decides about its folder.

    Returns:
        The folder of the callback, with the names that follow in `path`.
    """
    folder = str(callback.dirpath or "").rstrip("/")
    if not isinstance(path, str) or not folder or not path.endswith(callback.FILE_EXTENSION):
        return None
    inner = path.removeprefix(f"{folder}/")
    if inner == path and is_local(folder) and _are_names(path.removeprefix("/")):
        # Lightning makes the folder absolute, but not each path in it.
        absolute = os.path.join(os.getcwd(), path)
        inner = absolute.removeprefix(f"{os.path.abspath(folder).rstrip('/')}/")
        path = absolute
    if inner == path or not _are_names(inner):
        return None
    # In an object store, Lightning would delete all objects that match a pattern.
    return f"{folder}/{inner}" if is_local(folder) or not set(inner) & set("*?[") else None


def with_own_paths(callback: ModelCheckpoint, state: dict[str, Any]) -> dict[str, Any] | None:
    """The state of a ModelCheckpoint, with the paths of `own_path`; None if it names a file of no such path.

    Raises:
        ValueError: the worst of the best models is not one of them.
    """
    scores: dict[Any, Any] = state.get("best_k_models") or {}
    named = [*scores, *(state.get(name) for name in _PATHS)]
    paths: dict[Any, str | None] = {path: own_path(path, callback) for path in named if path}
    other = next((path for path, own in paths.items() if own is None), None)
    if other is not None or "" in scores:
        _report(callback, other or "")
        return None
    own = {**state, **{name: paths[state[name]] for name in _PATHS if state.get(name)}}
    if not scores:
        return own
    best = {paths[path]: score for path, score in scores.items()}
    if own.get("kth_best_model_path") and own["kth_best_model_path"] not in best:
        raise ValueError("'kth_best_model_path' of ModelCheckpoint is not one of its best models")
    return _with_worst(callback, {**own, "best_k_models": _limited(callback, best)})


def is_of_run(path: object, root: Path | None, callbacks: Iterable[Any]) -> bool:
    """Whether a file is in the output folder, or in the folder of a callback. Other users may be able to write there.

    Args:
        path: the path or the address of the file.
        root: the output folder; None if it is not known.
        callbacks: the callbacks of the Trainer.
    """
    kinds = (ModelCheckpoint, OnExceptionCheckpoint)
    folders = [root, *(one.dirpath for one in callbacks if isinstance(one, kinds))]
    return isinstance(path, str | Path) and any(_is_below(str(path), str(one)) for one in folders if one)


def _is_below(path: str, folder: str) -> bool:
    if not is_local(path) or not is_local(folder):
        return path.startswith(f"{folder.rstrip('/')}/")
    whole: tuple[Callable[[str], str], ...] = (os.path.abspath, os.path.realpath)
    return any(Path(one(path)).is_relative_to(other(folder)) for one in whole for other in whole)


def _are_names(path: str) -> bool:
    """Whether a relative path consists of names of files only, and no part of it has a meaning for a library."""
    if "::" in path or "\0" in path:
        return False
    try:
        return not any(name in {"", ".", ".."} or len(os.fsencode(name)) > _MOST_BYTES for name in path.split("/"))
    except UnicodeEncodeError:
        return False


def _limited(callback: ModelCheckpoint, scores: dict[Any, Any]) -> dict[Any, Any]:
    """The best of the best models: as many as the callback keeps. It would keep all others for ever."""
    most = _MOST_MODELS if callback.save_top_k < 0 else callback.save_top_k
    if len(scores) <= most:
        return scores
    _log.warning(
        "the state of ModelCheckpoint names %d best models, and it keeps %d: it does not count the others any more, "
        "and does not delete their files",
        len(scores),
        most,
    )
    sign = 1 if callback.mode == "min" else -1
    numbers = {path: sign * float(score) for path, score in scores.items()}
    kept = set(sorted(numbers, key=lambda path: (math.isnan(numbers[path]), numbers[path]))[:most])
    return {path: score for path, score in scores.items() if path in kept}


def _report(callback: ModelCheckpoint, path: object) -> None:
    _log.warning(
        "the state of ModelCheckpoint names %s, which is not a file of %s: this state is not restored, and the "
        "best models are chosen among new models",
        printable(repr(path)),
        callback.dirpath,
    )


def _with_worst(callback: ModelCheckpoint, saved: dict[str, Any]) -> dict[str, Any]:
    """The state with a `kth_best_model_path` that is one of the best models. ModelCheckpoint looks up its score."""
    best: dict[str, Any] = saved["best_k_models"]
    if saved.get("kth_best_model_path") in best:
        return saved
    if 0 < callback.save_top_k <= len(best):
        worst = (max if callback.mode == "min" else min)(best, key=best.__getitem__)
        return {**saved, "kth_best_model_path": worst, "kth_value": best[worst]}
    return {**saved, "kth_best_model_path": ""}
