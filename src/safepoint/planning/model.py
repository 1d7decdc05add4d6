"""The tensors of a model: from its `config.json`, the headers of its safetensors files, or a parameter count.

Promises: no tensor is read and no package for training is imported. Files are read within limits: pipes, devices and
files that are too large are refused with a message. Links are followed, because the cache of the Hugging Face Hub
consists of links.
"""

import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.safetensors_layout import SIZES
from safepoint.errors import UsageError
from safepoint.foundation.units import plural
from safepoint.planning.architectures.families import FAMILIES, tensors_of
from safepoint.planning.architectures.fields import EMBEDDINGS, Tensor, shown
from safepoint.planning.architectures.headers import DOWNLOAD_HINT, files_in_index, header_of, read_config

_CONFIG = "config.json"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART_OF = re.compile(r"(.+-)(\d{1,9})(-of-(\d{1,9})\.safetensors)", re.ASCII)
_MAX_FILES = 10_000
_MOST_TENSORS = 500_000
_MOST_PARAMETERS = 10**15
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_NOT_ADAPTED = {
    *EMBEDDINGS,
    *("lm_head", "embed_out", "classifier", "gate", "decoder"),
}
"""Modules that no adapter changes with the target `all-linear`: embeddings, output layers, routers of experts."""
_KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SPELLINGS = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "half": "float16",
    "float": "float32",
    **{name: name for name in ("float32", "float16", "bfloat16")},
}
"""For each spelling of a type in which weights are trained, torch's name of the type."""
_QUANTIZED_HINT = "pass the config.json of the model that was quantized; for QLoRA add --lora-rank and --quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The facts about a model on which the sizes of its files depend.

    Args:
        name: its name, for people.
        source: where the tensors come from, for people.
        family: the `model_type`, or None if it is not known.
        dtype: the type of the weights in the files, by its name in torch; None if it is not known. A `config.json`
            may state a type in which no model is trained: `dtype_of` checks it.
        tensors: parameters and persistent buffers. A tied weight is listed once, by its first name.
        tied: the further names of tied weights.
        is_exact: whether the tensors are exact. If False, they are an estimate from a parameter count.
        tokenizer_bytes: the size of the tokenizer's files in the folder of the model.
        stored_bytes: the size of the files with weights. None if there are no files; then the tensors give the size.
        is_quantized: whether the weights are loaded in fewer bits than `dtype` has, as `config.json` states.
        doubt: a sentence for people that says why the shape of this model is unusual; empty if the shape is usual.
    """

    name: str
    source: str
    family: str | None
    dtype: str | None
    tensors: tuple[Tensor, ...]
    tied: tuple[Tensor, ...] = ()
    is_exact: bool = True
    tokenizer_bytes: int = 0
    stored_bytes: int | None = None
    is_quantized: bool = False
    doubt: str = ""

    @property
    def num_parameters(self) -> int:
        """The number of parameters; buffers do not count."""
        return sum(math.prod(one.sizes) for one in self.tensors if not one.is_buffer)


def dtype_of(text: str, option: str = "--dtype") -> str:
    """Torch's name of a type of weights. A user may write the type as `bf16`, `bfloat16` or `torch.bfloat16`.

    Raises:
        UsageError: the text is not the type of a weight.
    """
    name = _SPELLINGS.get(text.strip().lower().removeprefix("torch."))
    if name is None:
        raise UsageError(
            f"{option} {text[:60]!r} is not a type of weights; nothing was computed",
            hint="use bf16, fp16 or fp32",
        )
    return name


# ---- from files ----------------------------------------------------------------------------------------------------


def read_model(path: Path) -> ModelShape:
    """The model in a folder, or the model that a `config.json` describes.

    In a folder, the headers of the safetensors files are read. If there are no such files, `config.json` is read.

    Raises:
        UsageError: there is no such file, or it does not describe a model.
    """
    try:
        if path.is_dir():
            return _of_folder(path)
        return of_config(_read_config(path), name=_name_of(path), where=str(path))
    except OSError as error:
        hint = "pass a config.json, a folder with a model, or --params with the number of parameters, such as 8B"
        if _HUB_NAME.fullmatch(str(path)):
            hint = f"for a model of the Hugging Face Hub, run `hf download {path} config.json`, and pass that file"
        raise UsageError(
            f"the model {shown_path(path)!r} cannot be read: {error.strerror or error}; nothing was computed",
            hint=hint,
        ) from error


def shown_path(path: Path) -> str:
    """A path for a message, cut off if it is long."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-97:]}"


def _name_of(path: Path) -> str:
    return path.absolute().parent.name if path.name == _CONFIG else path.name


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_config(path)
    except ValueError as error:
        raise UsageError(
            f"{path} is not a model's config.json: {error}; nothing was computed",
            hint="pass the config.json of a model of Transformers, or the folder that holds it",
        ) from error


def of_config(config: Mapping[str, Any], *, name: str, where: str) -> ModelShape:
    """The model that a `config.json` describes. A model of several parts, such as text and images, is refused.

    Raises:
        UsageError: the family is not known, or a field is missing or invalid.
    """
    found = tensors_of(config, where)
    _check_size(where, found.tensors)
    return ModelShape(
        name=name,
        source=f"the fields of {where}",
        family=found.family,
        dtype=_dtype_in(config),
        tensors=found.tensors,
        tied=found.tied,
        is_quantized=bool(config.get("quantization_config")),
    )


def _dtype_in(config: Mapping[str, Any]) -> str | None:
    stated = next((config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None), None)
    # A value that is not a string is invalid, too: `dtype_of` reports it, unless an option gives the type.
    return stated if stated is None or isinstance(stated, str) else shown(stated)


def _of_folder(folder: Path) -> ModelShape:
    files = _weight_files(folder)
    config_path = folder / _CONFIG
    config = _read_config(config_path) if os.path.lexists(config_path) else None
    if config is None and (not files or os.path.lexists(folder / "adapter_config.json")):
        raise UsageError(
            f"{folder} holds no model: there is no config.json; nothing was computed",
            hint="pass the folder of a model, or --params with the number of parameters, such as 8B; for an adapter, "
            "pass the folder of its base model",
        )
    name = folder.absolute().name
    if not files:
        assert config is not None
        return replace(of_config(config, name=name, where=str(config_path)), tokenizer_bytes=_tokenizer_bytes(folder))
    if len(files) > _MAX_FILES:
        raise UsageError(f"{folder} holds more than {_MAX_FILES} safetensors files; nothing was computed")
    if config is not None and config.get("quantization_config"):
        raise UsageError(
            f"{config_path} has a quantization_config: the model is quantized; nothing was computed",
            hint=_QUANTIZED_HINT,
        )
    found: dict[str, tuple[Tensor, str]] = {}
    for path in files:
        tensors, num_bytes = header_of(path)
        found |= {tensor.name: (tensor, kind) for tensor, kind in tensors}
        _check_size(str(folder), [tensor for tensor, _ in found.values()])
        if path.stat().st_size < num_bytes:
            raise UsageError(
                f"{path} is cut off: it has {path.stat().st_size} of {num_bytes} bytes; nothing was computed",
                hint=DOWNLOAD_HINT,
            )
    if not found:
        raise UsageError(f"the safetensors files in {folder} hold no tensor; nothing was computed")
    kinds: dict[str, int] = {}
    for tensor, kind in found.values():
        kinds[kind] = kinds.get(kind, 0) + math.prod(tensor.sizes) * SIZES.get(kind, 1)
    most = max(kinds, key=lambda kind: kinds[kind])
    if most not in _KINDS:
        raise UsageError(
            f"the weights in {folder} are of the type {most[:20]!r}, not bf16, fp16 or fp32: the model is quantized; "
            "nothing was computed",
            hint=_QUANTIZED_HINT,
        )
    family = None if config is None else config.get("model_type")
    return ModelShape(
        name=name,
        source=f"the headers of {plural(len(files), 'safetensors file')} in {folder}",
        family=family if isinstance(family, str) and family in FAMILIES else None,
        dtype=_KINDS[most],
        tensors=tuple(tensor for tensor, _ in found.values()),
        tied=() if config is None else _tied_in(config, found.keys()),
        tokenizer_bytes=_tokenizer_bytes(folder),
        stored_bytes=sum(path.stat().st_size for path in files),
    )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads: one file, the files that an index lists, or the files whose
    names begin with `model`. If there are none of these, all safetensors files but those of adapters.

    Raises:
        UsageError: some of these files are missing. A plan without them would be for a smaller model.
    """
    # Other files may hold an adapter, or the same weights again, such as `consolidated.safetensors`.
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("adapter_")]
    names = {path.name for path in files[: _MAX_FILES + 1]}
    if _WHOLE in names or os.path.lexists(folder / _WHOLE):
        return [folder / _WHOLE]
    wanted: set[str] = set()
    if os.path.lexists(folder / _INDEX):
        wanted = files_in_index(folder / _INDEX)
    models = {name for name in names if name.startswith("model")} or names
    if not wanted:
        for part in filter(None, map(_PART_OF.fullmatch, models)):
            count, width = int(part[4]), len(part[2])
            # A name may state any number of files, so at most `_MAX_FILES` names are listed.
            wanted |= {f"{part[1]}{number:0{width}}{part[3]}" for number in range(1, min(count, _MAX_FILES) + 1)}
    missing = sorted(wanted - names)
    if missing:
        raise UsageError(
            f"{folder} holds {len(wanted) - len(missing)} of {len(wanted)} safetensors files of the model: "
            f"{missing[0][:100]!r} is missing; nothing was computed",
            hint=DOWNLOAD_HINT,
        )
    return [folder / name for name in sorted(wanted or models)]


def _tied_in(config: Mapping[str, Any], stored: Container[str]) -> tuple[Tensor, ...]:
    """The further names of tied weights that the files do not have; empty if `config` does not give these names."""
    try:
        return tuple(one for one in tensors_of(config, _CONFIG).tied if one.name not in stored)
    except UsageError:
        return ()


def _check_size(where: str, tensors: Sequence[Tensor]) -> None:
    """Refuse a model that no computer holds: its sizes would overflow the formats of files, and the list of
    its tensors would fill the memory of this process.

    Raises:
        UsageError: there are too many tensors, or too many parameters.
    """
    num_tensors = sum(one.num_pieces for one in tensors)
    num_elements = sum(math.prod(one.sizes) for one in tensors)
    if num_tensors > _MOST_TENSORS or num_elements > _MOST_PARAMETERS:
        what = "tensors" if num_tensors > _MOST_TENSORS else "parameters"
        raise UsageError(
            f"{where}: the model or adapter would have too many {what}; nothing was computed",
            hint=f"a plan may have {_MOST_TENSORS:,} tensors and {_MOST_PARAMETERS:.0e} parameters at most",
        )


_TOKENIZER_FILES = re.compile(
    r"(tokenizer|chat_template|vocab|merges|special_tokens_map|added_tokens|preprocessor_config|processor_config)"
    r".*\.(json|txt|jinja|model)|.*\.(model|spm|tiktoken)"
)
"""The names of the files that the tokenizers and processors of Transformers write."""


def _tokenizer_bytes(folder: Path) -> int:
    """The size of the tokenizer's files. Other files, such as data, do not belong to a model or a checkpoint."""
    files = [path for path in sorted(folder.glob("*"))[:_MAX_FILES] if _TOKENIZER_FILES.fullmatch(path.name)]
    return sum(path.stat().st_size for path in files if path.is_file())


# ---- from a parameter count ----------------------------------------------------------------------------------------

_LAYERS = (
    (0.0, 12),
    (0.4e9, 24),
    (1.3e9, 16),
    (3.3e9, 28),
    (8e9, 32),
    (14e9, 40),
    (32e9, 64),
    (70e9, 80),
    (405e9, 126),
)
"""(parameters, layers) of published models: GPT-2, Qwen 2.5 0.5B, Llama 3.x, Qwen 3 14B and 32B."""
_VOCABULARY = 128_256
_LEAST_WIDTH = 8
_USUAL_RATIOS = (1, 16)
_POSSIBLE_RATIOS = (1 / 16, 64)
"""The lower and the upper limit of a ratio: the width of the feed-forward part, divided by the width of the layer.
Published models have ratios of 2.5 to 8."""


def of_count(
    num_parameters: int, *, layers: int | None = None, hidden: int | None = None, vocabulary: int | None = None
) -> ModelShape:
    """A model like Llama 3 with this many parameters. The number is exact; the tensors are an estimate.

    Args:
        num_parameters: the number of parameters of the whole model.
        layers: the number of layers; None for the number that published models of about this size have.
        hidden: the width of a layer, at least 8; None for a width that fits the layers and the parameters.
        vocabulary: the number of rows of the embedding; None for 128,256, or fewer if the model is small.

    Raises:
        UsageError: `num_parameters` is out of range, or the numbers contradict each other. They do if there are more
            layers than the width of a layer, or if the feed-forward part would have a width that no model has.
    """
    if not 10_000 <= num_parameters <= _MOST_PARAMETERS:
        raise UsageError(
            f"--params {num_parameters:.12g} is not the number of parameters of a model; nothing was computed",
            hint="write a number such as 8B, 350M or 70e9, from 10k to 1000T",
        )
    depth = layers or min(_LAYERS, key=lambda pair: abs(pair[0] - num_parameters))[1]
    # A layer of width h has 12.5 h² parameters if it has a quarter as many keys and values as queries, and if the
    # feed-forward part is 3.33 times as wide as the layer. In Llama 3 8B, this part is 3.5 times as wide.
    width = hidden or max(8, _rounded(math.sqrt(num_parameters / (12.5 * depth))))
    rows = vocabulary or max(16, min(_VOCABULARY, num_parameters // (8 * width)))
    shared = max(1, width // 4)
    attention = 2 * width * width + 2 * shared * width
    embeddings = 2 * rows * width
    rest = num_parameters - embeddings - depth * (attention + 2 * width) - width
    between = rest // (3 * width * depth)
    if between < 1:
        raise UsageError(
            f"--params {short_count(num_parameters)} is too little for {depth} layers of width {width} and a "
            f"vocabulary of {rows:,} tokens; nothing was computed",
            hint="pass fewer --layers, a smaller --hidden or a smaller --vocabulary, or the model's config.json",
        )
    doubt = "" if layers is hidden is None else _check_shape(num_parameters, depth, width, between)
    tensors = [Tensor("model.embed_tokens.weight", (rows, width))]
    for layer in range(depth):
        name = f"model.layers.{layer}"
        for part, sizes in (
            ("self_attn.q_proj", (width, width)),
            ("self_attn.k_proj", (shared, width)),
            ("self_attn.v_proj", (shared, width)),
            ("self_attn.o_proj", (width, width)),
            ("mlp.gate_proj", (between, width)),
            ("mlp.up_proj", (between, width)),
            ("mlp.down_proj", (width, between)),
            ("input_layernorm", (width,)),
            ("post_attention_layernorm", (width,)),
        ):
            tensors.append(Tensor(f"{name}.{part}.weight", sizes))
    tensors += [Tensor("model.norm.weight", (width,)), Tensor("lm_head.weight", (rows, width))]
    left = num_parameters - sum(math.prod(one.sizes) for one in tensors)
    if left:
        tensors.append(Tensor("rest.weight", (left,)))
    return ModelShape(
        name=f"a model of {short_count(num_parameters)} parameters",
        source=f"the number of parameters, as a model like Llama 3 with {depth} layers of width {width}",
        family="llama",
        dtype=None,
        tensors=tuple(tensors),
        is_exact=False,
        doubt=doubt,
    )


def _check_shape(num_parameters: int, depth: int, width: int, between: int) -> str:
    """Refuse numbers that contradict each other. Return why the model is unusual; empty if it is usual.

    Raises:
        UsageError: the numbers contradict each other. Without this check, the feed-forward part would get all
            parameters that do not fit elsewhere. Then the sizes of adapters and of optimizers such as Adafactor would
            be wrong.
    """
    ratio = between / width
    wanted = f"--params {short_count(num_parameters)} with {depth} layers of width {width}"
    why = ""
    if width < _LEAST_WIDTH:
        why = f"a layer has at least a width of {_LEAST_WIDTH}"
    elif depth > width:
        why = "no model has more layers than the width of a layer"
    elif not _POSSIBLE_RATIOS[0] <= ratio <= _POSSIBLE_RATIOS[1]:
        why = f"the feed-forward part of each layer would have {between:,} rows, which is {ratio:.3g} times the width"
    if why:
        raise UsageError(
            f"{wanted} contradict each other: {why}; nothing was computed",
            hint="leave --layers or --hidden out, or pass the model's config.json",
        )
    if _USUAL_RATIOS[0] <= ratio <= _USUAL_RATIOS[1]:
        return ""
    return (
        f"{wanted} is an unusual model: the feed-forward part of a layer has {ratio:.3g} times the width of the "
        "layer, and in published models 2.5 to 8 times. Check --params, --layers and --hidden"
    )


def _rounded(width: float) -> int:
    unit = 128 if width >= 512 else 8
    return max(1, round(width / unit)) * unit


def short_count(count: int) -> str:
    """A number of parameters for people: `8.03B`, `350M`."""
    rounded = float(f"{count:.3g}")  # first, so that 999,600 is `1M`, and not a thousand of the smaller unit
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if rounded >= size:
            return f"{rounded / size:g}{unit}"
    return str(count)


# ---- adapters ------------------------------------------------------------------------------------------------------


def adapter_of(model: ModelShape, *, rank: int, targets: Sequence[str]) -> tuple[Tensor, ...]:
    """The tensors of a LoRA adapter: two for each adapted matrix.

    Args:
        model: the base model.
        rank: the rank of the adapter.
        targets: the names of modules, or `all-linear`; empty for PEFT's default of the family.

    Raises:
        UsageError: PEFT has no default for the family, the model has no such module, or the adapter would have too
            many parameters.
    """
    default = FAMILIES[model.family].lora if model.family in FAMILIES else ()
    wanted = tuple(targets) or default
    if not wanted:
        raise UsageError(
            f"--lora-rank {rank}: PEFT has no default modules for {model.family or 'this model'}",
            hint="name them with --lora-targets, such as --lora-targets q_proj,v_proj or --lora-targets all-linear",
        )
    chosen = [one for one in _matrices(model.tensors) if _is_target(one.name, wanted)]
    names = {one.name.removesuffix(".weight").rsplit(".", 1)[-1] for one in chosen}
    missing = [target for target in wanted if target != "all-linear" and target.rsplit(".", 1)[-1] not in names]
    if not chosen or missing:
        known = sorted({one.name.removesuffix(".weight").rsplit(".", 1)[-1] for one in _matrices(model.tensors)})
        raise UsageError(
            f"--lora-targets {','.join(missing or wanted)[:200]}: the model has no such linear layer; nothing was "
            "computed",
            hint=f"its linear layers are {', '.join(known[:40])}",
        )
    tensors: list[Tensor] = []
    for one in chosen:
        out, into = one.sizes
        module = f"base_model.model.{one.name.removesuffix('.weight')}"
        if one.is_embedding:
            # PEFT holds the transposed matrices of an embedding as parameters.
            tensors += [
                Tensor(f"{module}.lora_embedding_A", (rank, out)),
                Tensor(f"{module}.lora_embedding_B", (into, rank)),
            ]
            continue
        tensors += [
            Tensor(f"{module}.lora_A.weight", (rank, into)),
            Tensor(f"{module}.lora_B.weight", (out, rank)),
        ]
    _check_size(f"--lora-rank {rank}", tensors)
    return tuple(tensors)


def linear_parameters(model: ModelShape) -> int:
    """The number of parameters that QLoRA quantizes: all linear layers but the output layer. Embeddings do not
    count."""
    return sum(math.prod(one.sizes) for one in _matrices(model.tensors) if _is_target(one.name, ("all-linear",)))


def _matrices(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for one in tensors:
        if len(one.sizes) == 2 and one.name.endswith(".weight") and not one.is_buffer:
            yield one


def _is_target(name: str, targets: Sequence[str]) -> bool:
    module = name.removesuffix(".weight")
    last = module.rsplit(".", 1)[-1]
    if "all-linear" in targets and last not in _NOT_ADAPTED:
        return True
    return any(module == target or module.endswith(f".{target}") for target in targets)
