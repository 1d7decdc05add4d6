"""Makes images of the files that a framework's save routine would write. An image is the bytes of a file, in memory.

While a capture is open, these functions make an image of each file below one folder, and do not write it:

- `torch.save` and safetensors' `save_file`, under every name by which a module has imported them;
- the file system writer of torch.distributed.checkpoint.

A call for another folder, or with options that this module does not support, writes the file as usual.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import sys
import uuid
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from safepoint.foundation.files import walk_files
from safepoint.foundation.units import format_bytes
from safepoint.snapshot.images.function_patch import Function, FunctionPatch
from safepoint.snapshot.images.image import Image
from safepoint.snapshot.images.safetensors_image import compose_safetensors
from safepoint.snapshot.images.torch_image import TorchImages, UncomposableError

_log = logging.getLogger("safepoint")
_LARGE_BYTES = 64 << 20
_NOTE = f"safepoint image {uuid.uuid4().hex} ".encode()
_USUAL = {"_use_new_zipfile_serialization": True, "pickle_protocol": 2, "pickle_module": pickle}


class Captured:
    """The images and files of one call of a save routine.

    Args:
        root: the folder that the routine wrote to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images: list[Image] = []

    def keep(self, image: Image) -> None:
        """Keep an image, and write a small placeholder instead of its file.

        The routine may move or delete the placeholder.

        Raises:
            OSError: the placeholder cannot be written. The routine's own write would have failed too.
        """
        (self.root / image.path).write_bytes(_NOTE + str(len(self.images)).encode())
        self.images.append(image)

    def relative(self, target: Any) -> str | None:
        """The path of `target` below the folder; None when `target` is elsewhere."""
        if not isinstance(target, str | os.PathLike):
            return None
        path = os.path.abspath(cast("str", target))
        prefix = f"{self.root}{os.sep}"
        return path.removeprefix(prefix).replace(os.sep, "/") if path.startswith(prefix) else None


@functools.cache
def _patch_of_process() -> FunctionPatch:
    """The names of the save functions in this process. All captures share them, because the search takes long."""
    return FunctionPatch()


def find_save_functions() -> None:
    """Search all imported modules for the functions that captures replace. Later captures search only new modules."""
    _patch_of_process().find(_originals())


class Capture:
    """Captures one save routine at each save, and remembers the layouts of its files."""

    def __init__(self) -> None:
        self._torch_images: dict[str, TorchImages] = {}
        self._dcp_images: dict[str, Any] = {}
        self._patch = _patch_of_process()
        self._reported: set[str] = set()

    def prepare(self) -> None:
        """Search all imported modules for the functions to replace. Call this before the first step, because the
        search takes long."""
        self._patch.look_again()
        self._patch.find(_originals())

    @contextlib.contextmanager
    def below(self, root: Path) -> Generator[Captured]:
        """Capture the files that are saved below `root`, an absolute path; other files are written as usual."""
        captured = Captured(root)
        save, *others = _originals()
        replacements = {save: self._saving_with_torch(captured, save)}
        replacements |= {other: self._saving_safetensors(captured, other) for other in others}
        with self._patch.exchanged(replacements), self._dcp_captured(captured):
            yield captured

    @contextlib.contextmanager
    def _dcp_captured(self, captured: Captured) -> Generator[None]:
        writer = _dcp_writer()
        if writer is None:
            yield
            return
        original = writer.write_data
        writer.write_data = self._writing_with_dcp(captured, writer, original)
        try:
            yield
        finally:
            writer.write_data = original

    def _saving_with_torch(self, captured: Captured, original: Function) -> Function:
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
            path = captured.relative(f)
            if path is None or args or not _are_usual(kwargs):
                return original(obj, f, *args, **kwargs)
            images = self._torch_images.setdefault(path.rsplit("/", 1)[-1], TorchImages(path))
            images.path = path
            try:
                captured.keep(images.compose(obj))
            except UncomposableError:
                return original(obj, f, **kwargs)
            return None

        return save

    def _saving_safetensors(self, captured: Captured, original: Function) -> Function:
        def save_file(tensors: Any, filename: Any, metadata: Any = None, *args: Any, **kwargs: Any) -> Any:
            path = captured.relative(filename)
            image = None if path is None or args or kwargs else compose_safetensors(path, tensors, metadata)
            if image is None:
                return original(tensors, filename, metadata, *args, **kwargs)
            captured.keep(image)
            return None

        return save_file

    def _writing_with_dcp(self, captured: Captured, writer: Any, original: Function) -> Function:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

        from safepoint.snapshot.images.dcp_image import DcpImages

        def write_data(self_: Any, plan: Any, planner: Any) -> Any:
            folder = captured.relative(self_.path)
            is_known = (
                type(self_) in {FileSystemWriter, writer}
                and folder is not None
                and self_.single_file_per_rank
                and self_.serialization_format == SerializationFormat.TORCH_SAVE
                and not self_.transforms.extensions
            )
            if not is_known:
                return original(self_, plan, planner)
            path = f"{folder}/{plan.storage_data.prefix}0.distcp"
            images = self._dcp_images.setdefault(path, DcpImages(path))
            image, results = images.compose([(item, planner.resolve_data(item)) for item in plan.items])
            captured.keep(image)
            future = cast("Any", torch.futures.Future)()
            future.set_result(results)
            return future

        return write_data

    def forget(self, paths: Iterable[str]) -> None:
        """Release the layouts of these files, and the tensors that they refer to."""
        for path in paths:
            self._torch_images.pop(path.rsplit("/", 1)[-1], None)
            self._dcp_images.pop(path, None)

    def collect(self, captured: Captured) -> list[Image]:
        """One image for each file: the captured images, and an image of each file that was written as usual.

        Raises:
            OSError: a file that the routine wrote cannot be read.
        """
        images: list[Image] = []
        for path, status in walk_files(captured.root):
            content = (captured.root / path).read_bytes()
            if content.startswith(_NOTE):
                image = captured.images[int(content[len(_NOTE) :])]
                images.append(image if image.path == path else dataclasses.replace(image, path=path))
                continue
            images.append(Image.of_bytes(path, content))
            name = path.rsplit("/", 1)[-1]
            if status.st_size >= _LARGE_BYTES and name not in self._reported:
                self._reported.add(name)
                _log.warning(
                    "training waited while %s (%s) was written: Safepoint writes a file in the background only if "
                    "torch.save, safetensors or torch.distributed.checkpoint saves it with the usual options",
                    name,
                    format_bytes(status.st_size),
                )
        return images


def _are_usual(options: Mapping[str, Any]) -> bool:
    """Whether these options of `torch.save` have their default values, which the layout of an image assumes."""
    return all(name in _USUAL and _USUAL[name] == value for name, value in options.items())


def _originals() -> list[Function]:
    """`torch.save`, and safetensors' `save_file` if that library is imported."""
    safetensors: Any = sys.modules.get("safetensors.torch")
    return [torch.save] if safetensors is None else [torch.save, safetensors.save_file]


def _dcp_writer() -> Any:
    """The class of torch.distributed.checkpoint (DCP) that writes files; None if that package is not imported."""
    module: Any = sys.modules.get("torch.distributed.checkpoint.filesystem")
    return None if module is None else module._FileSystemWriter
