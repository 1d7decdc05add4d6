"""Which files of a checkpoint are parts of a model, and are exported.

A checkpoint may contain files of any name, and someone else may have written it. At the target of an export, the
files would belong to this user. A program that is started there could use them as its settings (`.git/hooks`,
`Makefile`), a coding agent as its instructions (`AGENTS.md`), and Python as modules in place of its own (`json.py`).
So only files of the kinds that models consist of are exported. Many programs read files of the kinds `.json` and
`.txt`. Of these kinds, only files with names that models use are exported.

Python code is exported only if a person asks for it. Without `trust_remote_code=True`, most loaders run no code of a
model. But some loaders import the modules that a configuration in the same folder names.

`may_export` decides about a file before it is exported. For some names, the content of the file decides, too. The
owner of the file may change it after this decision. So an export applies the same rule to the bytes that it writes:
`checking` to a file that is uploaded, `check_written` to files in the working folder.
"""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.remote.verified_upload import SourceFile
from safepoint.errors import CheckpointError, ObjectNotFoundError, SafepointError, printable
from safepoint.foundation.bounded_json import MAX_BYTES, parse_value
from safepoint.foundation.shared_folders.opening import read_regular
from safepoint.storage.browsing import StorePath
from safepoint.storage.store import Content, Sink

_KINDS = {
    # Weights.
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npy", ".npz", ".gguf", ".onnx"),
    ".onnx_data",
    # Vocabularies, templates and tables.
    *(".jsonl", ".model", ".vocab", ".bpe", ".codes", ".spm", ".tiktoken", ".tsv", ".csv", ".jinja"),
    # Pictures of a description.
    *(".png", ".jpg", ".jpeg", ".gif"),
}
"""The endings of the names of data files, in lower case. No program runs such a file when it is opened."""
_TEXTS = re.compile(r"(readme|license|licence|notice|copying|use_policy|model_?card)(\.(md|txt))?")
"""The names of texts for people, in lower case. Coding agents obey other texts, such as `AGENTS.md`."""
_CODE = ".py"
_OF_MODELS = re.compile(
    r".*(config|token|vocab|merges|special|template|process|index|weight|map|label|class|param|args|result|metric|stat"
    r"|dict|module|adapter|embed|quant|calib|matrix|scheduler|feature|speaker|voice|lang|normali|sentence|word|char|gram"
    r"|symbol|lexicon|alphabet|phone|tag|emoji|piece|bpe|codes|pooling|prompt|model|data|cache|id2|2id|tekken|info"
    r"|requirements).*\.(json|txt)"
)
"""The names of a model's configurations and vocabularies, in lower case. Many programs use other `.json` and `.txt`
files as their settings. The names of such files are too many to list, so the names that models use are listed
instead."""
_OBEYED = re.compile(
    r"(package|package-lock|composer|deno|turbo|nx|lerna|devbox|project|renovate|vercel|firebase|now|app|angular"
    r"|biome|rome|nodemon|nest-cli|ng-package|tslint|jsconfig|tsconfig(\..+)?|pyrightconfig|basedpyrightconfig"
    r"|cmakepresets|cmakeuserpresets|vcpkg(-configuration)?|conanfile|docker-bake(\.override)?|docker-compose|compose"
    r"|mcp|opencode|cdk|bower|bsconfig|ormconfig|langgraph"
    r"|(jupyter|ipython)(_\w+)?_config|.+\.tf|.+\.tfvars|.+\.config)\.json"
    r"|(cmakelists|meson_options|conanfile)\.txt",
    re.ASCII,
)
"""The names, in lower case, of files that programs use as their settings. They are never exported, although a file of
a model could have such a name."""
_FOLDERS = re.compile(r"[.-].*|__\w+__|wandb|node_modules|egg-info|.+\.(dist-info|egg-info|egg)|\w+-packages")
"""The names of folders, in lower case, in which programs look for settings or for installed packages. A shell passes
a name that begins with a hyphen to a command as an option."""


_UNPICKLED = re.compile(r".*\.(pt|pth|ckpt)|(.*(pytorch|adapter)_model.*|optimizer|scheduler|learned_embeds)\.bin")
"""The names, in lower case, of files that programs load with `torch.load`. Other files with the ending `.bin` often
hold plain numbers, such as the weights beside an ONNX model."""
_ARCHIVE = b"PK\x03\x04"
"""The first bytes of a file of `torch.save`. A file with a name in `_UNPICKLED` that begins with other bytes would be
read as a pickle."""
_MODULES = "modules.json"
_OF_LIBRARY = re.compile(r"sentence_transformers(\.\w+)*\.[A-Z]\w*")


def is_exported(path: str, *, with_code: bool = False) -> bool:
    """Whether the file at a path in a checkpoint is exported.

    Args:
        path: the path, with `/`.
        with_code: whether the code of the model is exported, too.
    """
    *folders, name = path.casefold().split("/")  # some file systems ignore the case of names
    if any(map(_FOLDERS.fullmatch, folders)) or name.startswith((".", "-")) or _OBEYED.fullmatch(name):
        return False
    suffix = f".{name.rpartition('.')[2]}"
    is_known = suffix in _KINDS or any(kind.fullmatch(name) for kind in (_OF_MODELS, _TEXTS))
    return is_known or (with_code and suffix == _CODE)


def may_export(file: StorePath, *, with_code: bool = False) -> bool:
    """Whether a file is exported: its name must allow it, and for some names its content, too.

    Without `with_code`, no usual loader may run code because of the file, or import anything but the loader's own
    classes. A file that programs load with `torch.load` must be an archive of `torch.save`: loaders apply
    `weights_only` to archives, but some programs unpickle a file that is not an archive. sentence-transformers before
    release 6 imports the classes and functions that `modules.json` names, even from installed packages, and calls
    them with a path that the file states. If such a function unpickles a file, it runs code.

    Args:
        file: the file. Its key is its path in the checkpoint.
        with_code: whether the code of the model is exported, too.

    Returns:
        True also for a file that is missing, if its name allows the export: the export reports that it is missing.

    Raises:
        StorageError: the file cannot be read.
    """
    if not is_exported(file.key, with_code=with_code):
        return False
    num_bytes = _num_examined(file.key)
    if with_code or not num_bytes:
        return True
    # Other errors of the store end the export: it must not leave out weights because of them.
    with contextlib.suppress(FileNotFoundError, ObjectNotFoundError), file.open("rb") as opened:
        return _has_no_code(file.key, opened.read(num_bytes))
    return True


def is_examined(path: str) -> bool:
    """Whether the content of a file at a path decides whether it is exported, and not only its name."""
    return _num_examined(path) > 0


def checking(file: SourceFile, content: Content) -> SourceFile:
    """A file that is uploaded only if its content may be exported. The bytes that are sent are examined.

    Args:
        file: the file.
        content: its content. An upload raises CheckpointError if it may not be exported.
    """
    num_bytes = _num_examined(file.path)

    def write_to(sink: Sink) -> None:
        first = bytearray()

        def take(block: memoryview) -> None:
            first.extend(block[: num_bytes - len(first)])
            sink(block)

        content.write_to(take)
        _check(file.path, bytes(first))

    return file._replace(source=Content(size_bytes=content.size_bytes, write_to=write_to)) if num_bytes else file


def check_written(folder: Path, paths: Iterable[str]) -> None:
    """Examine the files that were written to the working folder of an export.

    Raises:
        CheckpointError: a file may not be exported.
        OSError: a file cannot be read.
    """
    for path in filter(is_examined, paths):
        _check(path, read_regular(folder / path, _num_examined(path) - 1))


def _check(path: str, first: bytes) -> None:
    if not _has_no_code(path, first):
        raise CheckpointError(
            f"{printable(path)} has changed while it was read, and a program that loads it could now run code; "
            "nothing was exported",
            hint="if you trust the code in the checkpoint, use --with-code",
        )


def _num_examined(path: str) -> int:
    """How many of the first bytes of a file decide whether it is exported; 0 if its name alone decides."""
    name = path.rpartition("/")[2].casefold()
    if _UNPICKLED.fullmatch(name):
        return len(_ARCHIVE)
    return MAX_BYTES + 1 if name == _MODULES else 0


def _has_no_code(path: str, first: bytes) -> bool:
    """See `may_export`. `first` are the first bytes of the file, as many as `_num_examined` states."""
    if path.rpartition("/")[2].casefold() != _MODULES:
        return first == _ARCHIVE
    with contextlib.suppress(ValueError, SafepointError):
        modules: Any = parse_value(first)
        listed = cast("list[Any]", modules) if isinstance(modules, list) else [None]
        named = [cast("dict[str, Any]", one).get("type") if isinstance(one, dict) else None for one in listed]
        return all(isinstance(one, str) and _OF_LIBRARY.fullmatch(one) for one in named)
    return False
