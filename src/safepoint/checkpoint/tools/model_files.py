"""Which files of a checkpoint are parts of a model, and are exported.

A checkpoint may contain files of any name, and someone else may have written it. At the target of an export, the
files would belong to this user. A program that is started there could use them as its settings (`.git/hooks`,
`Makefile`), a coding agent as its instructions (`AGENTS.md`), and Python as modules in place of its own (`json.py`).
So only files of the kinds that models consist of are exported. Many programs read files of the kinds `.json` and
`.txt`. Of these kinds, only files with names that models use are exported.

Python code is exported only if a person asks for it. Without `trust_remote_code=True`, most loaders run no code of a
model. But some loaders import the modules that a configuration in the same folder names.
"""

import re

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
ARCHIVE = b"PK\x03\x04"
"""The first bytes of a file of `torch.save`. A file with a name in `_UNPICKLED` that begins with other bytes would be
read as a pickle."""


def must_be_archive(path: str) -> bool:
    """Whether a file at a path in a checkpoint is exported only if it begins with `ARCHIVE`."""
    return _UNPICKLED.fullmatch(path.rpartition("/")[2].casefold()) is not None


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
