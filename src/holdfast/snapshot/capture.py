"""The calls of a framework's save routine that would write tensors, handed over as images.

While a capture is open, `torch.save` and safetensors' `save_file`, under whatever name a module has imported them,
hand over what goes below one folder. Calls for other places, or with options that are not known here, are the
library's own.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import torch

from holdfast.foundation.files import regular_files
from holdfast.foundation.units import format_bytes
from holdfast.snapshot.image import Image
from holdfast.snapshot.safetensors_image import compose_safetensors
from holdfast.snapshot.torch_image import TorchImages, UncomposableError

_log = logging.getLogger("holdfast")
_LARGE_BYTES = 64 << 20
_Function = Callable[..., Any]


class Captured:
    """What one run of a save routine has handed over or written.

    Args:
        root: the folder that it wrote to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.by_path: dict[str, Image] = {}

    def relative(self, target: Any) -> str | None:
        """The path of `target` below the folder; None when it is elsewhere."""
        if not isinstance(target, str | os.PathLike):
            return None
        path = os.path.abspath(cast("str", target))
        prefix = f"{self.root}{os.sep}"
        return path.removeprefix(prefix).replace(os.sep, "/") if path.startswith(prefix) else None


class Capture:
    """Captures one save routine over and over, and remembers how its files look."""

    def __init__(self) -> None:
        self._torch_images: dict[str, TorchImages] = {}
        self._places: list[tuple[dict[str, Any], str, _Function]] = []
        self._seen: set[int] = set()
        self._told: set[str] = set()

    def prepare(self) -> None:
        """Look at all modules that are there now; it takes longer than a save, and belongs before the first step."""
        self._find(_originals())

    @contextlib.contextmanager
    def below(self, root: Path) -> Generator[Captured]:
        """Capture what goes below `root`, an absolute path; other threads' calls for other places pass."""
        captured = Captured(root)
        originals = _originals()
        replacements = {id(originals[0]): self._saving_with_torch(captured, originals[0])}
        for original in originals[1:]:
            replacements[id(original)] = self._saving_safetensors(captured, original)
        replaced: list[tuple[dict[str, Any], str, _Function]] = []
        for namespace, name, function in self._find(originals):
            replacement = replacements.get(id(function))
            if replacement is not None and namespace.get(name) is function:  # nobody has wrapped it since
                namespace[name] = replacement
                replaced.append((namespace, name, function))
        try:
            yield captured
        finally:
            for namespace, name, function in replaced:
                namespace[name] = function

    def _find(self, originals: list[_Function]) -> list[tuple[dict[str, Any], str, _Function]]:
        """Every module's name for one of the functions; a module is looked at once, when it is there as a whole."""
        wanted = {id(function): function for function in originals}
        for module in list(sys.modules.values()):
            if id(module) not in self._seen and isinstance(module, type(os)) and not _is_being_imported(module):
                self._seen.add(id(module))
                self._places += [
                    (vars(module), name, wanted[id(value)])
                    for name, value in list(vars(module).items())
                    if id(value) in wanted
                ]
        return self._places

    def _saving_with_torch(self, captured: Captured, original: _Function) -> _Function:
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
            path = captured.relative(f)
            if path is None or args or kwargs:
                return original(obj, f, *args, **kwargs)
            images = self._torch_images.setdefault(path.rsplit("/", 1)[-1], TorchImages(path))
            images.path = path
            try:
                captured.by_path[path] = images.compose(obj)
            except UncomposableError:
                return original(obj, f)
            return None

        return save

    def _saving_safetensors(self, captured: Captured, original: _Function) -> _Function:
        def save_file(tensors: Any, filename: Any, metadata: Any = None, *args: Any, **kwargs: Any) -> Any:
            path = captured.relative(filename)
            image = None
            if path is not None and not args and not kwargs:
                image = compose_safetensors(path, tensors, metadata)
            if image is None or path is None:
                return original(tensors, filename, metadata, *args, **kwargs)
            captured.by_path[path] = image
            return None

        return save_file

    def collect(self, captured: Captured) -> list[Image]:
        """Everything that the routine has handed over or written.

        Raises:
            OSError: a file that it wrote cannot be read.
        """
        images = dict(captured.by_path)
        for path, status in regular_files(captured.root):
            if path in images:
                continue  # written as well: what was handed over last is what the routine means
            images[path] = Image.of_bytes(path, (captured.root / path).read_bytes())
            name = path.rsplit("/", 1)[-1]
            if status.st_size >= _LARGE_BYTES and name not in self._told:
                self._told.add(name)
                _log.warning(
                    "%s, %s, was written while training waited: this way of writing it is not known",
                    name,
                    format_bytes(status.st_size),
                )
        return list(images.values())


def _originals() -> list[_Function]:
    """`torch.save`, and safetensors' function where that library is loaded."""
    safetensors: Any = sys.modules.get("safetensors.torch")
    return [torch.save] if safetensors is None else [torch.save, safetensors.save_file]


def _is_being_imported(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


__all__ = ["Capture", "Captured"]
