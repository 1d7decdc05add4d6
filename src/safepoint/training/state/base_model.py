"""The base model of adapters. Its weights are frozen, so a checkpoint records only their digest.

If adapters were resumed on other base weights, training would continue without an error, but with a wrong result. To
prevent this, the checkpoint records the digest of the base weights, and each start compares it with the digest of the
loaded weights.
"""

import contextlib
import importlib
import itertools
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
import xxhash
from torch.distributed.tensor import DTensor

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import UNKNOWN_DIGEST
from safepoint.errors import ConflictError, without_credentials
from safepoint.training.state.zero_gathering import gathered

_log = logging.getLogger("safepoint")
_BASE_PREFIX = "base_model.model."
_WRAPPED = ".base_layer."
_REPLACED = ".original_module."
_HOLDERS = ("modules_to_save", "prompt_encoder", "trainable_tokens_delta")
"""Containers in which PEFT keeps tensors under the name of their adapter. The names of PEFT's other containers begin
with a prefix such as `lora_`."""
_CODES = "qweight"
_QUANTIZED_BUFFERS = {_CODES, "qzeros", "scales", "g_idx"}
"""The buffers in which GPTQ and AWQ keep weights. Other buffers, such as running statistics, may change."""


def has_adapters(model: Any) -> bool:
    """Whether the model has adapters of PEFT, which are trained while the base model is frozen."""
    return bool(getattr(model, "peft_config", None)) and hasattr(model, "get_base_model")


def frozen_buffers(module: torch.nn.Module) -> set[str]:
    """The names of this module's buffers with quantized weights, which never change. Submodules are left out."""
    names = {name for name, _ in module.named_buffers(recurse=False)}
    is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return names & _QUANTIZED_BUFFERS if _CODES in names and not is_trained else set()


def base_of(model: Any, *, num_ranks: int) -> dict[str, str] | None:
    """Name, revision and digest of the base model.

    The digest covers name, type, shape and content of every weight that is not trained. For a quantized weight, it
    also covers the scales. The digest leaves out:

    - adapters that are not trained, such as the reference of DPO: the checkpoint contains them;
    - the embeddings of input and output. The checkpoint contains them if the vocabulary was resized. The digest
      leaves them out in every case. Only a comparison with the original model shows whether the vocabulary was
      resized, and the original model may not be available when a run starts;
    - the frozen copy that PEFT keeps of a module which is trained as a whole (`modules_to_save`).

    If DeepSpeed has split the weights while they were loaded, the digest covers only this rank's part. Weights that
    `fully_shard` has split are gathered one at a time. In that case, all ranks call this function.

    Args:
        model: the model to train, not yet wrapped for training, but perhaps split by `fully_shard`.
        num_ranks: how many ranks share the weights, if DeepSpeed has split them.

    Returns:
        Name, revision and digest, as in `Manifest.base`; None when there are no adapters.
    """
    if not has_adapters(model):
        return None
    config = next(iter(model.peft_config.values()))
    inner = getattr(model.get_base_model(), "config", None)
    name = getattr(config, "base_model_name_or_path", None) or getattr(inner, "_name_or_path", None) or ""
    revision = getattr(inner, "_commit_hash", None) or getattr(config, "revision", None) or ""
    return {
        "name": without_credentials(str(name)),
        "revision": str(revision),
        "digest": _digest_of(model, num_ranks),
    }


def base_as_saved(
    model: Any, saved: Mapping[str, str] | None, now: dict[str, str] | None, *, ranks_before: int, is_first: bool
) -> dict[str, str] | None:
    """What `base_of` has returned, but with the checkpoint's digest if that digest belongs to the same weights.

    The checkpoint's digest and this run's digest may cover different parts of the weights. This happens if DeepSpeed
    has split the weights in only one of the two runs, or among different numbers of ranks. All ranks call this
    function, because split weights are gathered one at a time.

    Args:
        model: as for `base_of`.
        saved: the base model that the checkpoint records.
        now: what `base_of` has returned.
        ranks_before: how many ranks wrote the checkpoint.
        is_first: whether this rank compares the weights. The other ranks only help to gather them.

    Returns:
        `now`, but with the digest of `saved` if that digest belongs to the same weights.
    """
    if saved is None or now is None or saved["digest"] == now["digest"]:
        return now
    whole: dict[str, str] = {}
    part: dict[str, str] = {}
    for name, parameter in _frozen(model):
        with gathered(parameter):
            if is_first:
                tensor: torch.Tensor = parameter.data
                count = -(-tensor.numel() // ranks_before)
                whole[name] = _describe(tensor, None)
                part[name] = _describe(tensor.reshape(-1)[:count], ranks_before)
    found = saved["digest"] in {_combine(whole), _combine(part)}
    return {**now, "digest": saved["digest"]} if found else now


def base_entries(model: Any) -> set[str]:
    """The keys of a model's state that a checkpoint of its adapters need not contain.

    The keys are as `plain_key` returns them. They belong to:

    - the weights that the digest of `base_of` covers, and everything that is saved with quantized weights;
    - embeddings of input and output, unless they are trained or the vocabulary was resized. PEFT may read the
      original model to find out whether the vocabulary was resized;
    - the frozen copy that PEFT keeps of a module which is trained as a whole (`modules_to_save`).

    Args:
        model: the model, with adapters, perhaps split by `fully_shard`. The ranks need not call this function
            together.
    """
    frozen = {id(tensor) for _, tensor in _frozen(model)} | _embeddings_left_out(model)
    left_out: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        parameters = dict(module.named_parameters(recurse=False))
        buffers = dict(module.named_buffers(recurse=False))
        below = {
            key
            for key, tensor in {**parameters, **buffers}.items()
            if id(tensor) in frozen
            or (key in parameters and not tensor.requires_grad and _REPLACED in f"{name}.{key}")
        }
        if below:
            state: dict[str, Any] = {}
            module._save_to_state_dict(state, "", keep_vars=True)  # with the scales of quantized weights
            others = {*parameters, *buffers} - below
            left_out |= {plain_key(f"{name}.{key}") for key in state if key not in others}
    return left_out


def plain_key(key: str) -> str:
    """The key of an entry of a model's state, without the names that `torch.compile` and checkpoint wrappers add."""
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").lstrip(".")


def without(state: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """The entries of a module's state that are not among `left_out`."""
    return {key: value for key, value in state.items() if plain_key(key) not in left_out}


def _embeddings_left_out(model: Any) -> set[int]:
    """The `id` of each embedding tensor of the base model that PEFT does not save with the adapters."""
    of_base = {
        id(one) for name, one in model.named_parameters() if not one.requires_grad and not _is_of_adapter(name, model)
    }
    found = of_base & {id(one) for one in _embeddings(model)}
    if not found:
        return found
    peft: Any = importlib.import_module("peft")
    with warnings.catch_warnings(action="ignore"):  # PEFT warns that it saves embeddings, but nothing is saved here
        saved: dict[str, Any] = peft.get_peft_model_state_dict(model, state_dict=model.state_dict(keep_vars=True))
    return found - {id(tensor) for tensor in saved.values()}


def check_base(saved: Mapping[str, str] | None, now: Mapping[str, str] | None, step: int) -> None:
    """Compare the base model that a checkpoint records with the base model that is loaded.

    Args:
        saved: the base model that the checkpoint records; None if the checkpoint has no adapters.
        now: the base model of this run; None if the run has no adapters.
        step: the step of the checkpoint.

    Raises:
        ConflictError: the weights differ, or only the checkpoint or only the run has adapters.
    """
    if saved is None and now is None:
        return
    if saved is not None and now is not None and saved["digest"] == UNKNOWN_DIGEST:
        _log.warning(
            "the checkpoint of step %s does not record the base model of its adapters, so it was not compared", step
        )
        return
    if saved is None or now is None:
        has, lacks = (
            ("this run trains", "the checkpoint of step {0} has none")
            if saved is None
            else ("the checkpoint of step {0} holds", "this run trains the whole model")
        )
        raise ConflictError(
            f"{has} adapters, {lacks}".format(step) + "; training was not started",
            hint="train with adapters only if the run that wrote the checkpoint did; or start a new run with "
            "--from-scratch",
        )
    if saved["digest"] != now["digest"]:
        raise ConflictError(
            f"the adapters of step {step} were trained on {_name_of(saved)}, this run has loaded {_name_of(now)}: "
            "the weights differ; training was not started",
            hint="load the weights that the run began with; if the adapter's initialization changes them (PiSSA, "
            "OLoRA), call transformers.set_seed before the adapter is made; or start a new run with --from-scratch",
        )


def _name_of(base: Mapping[str, str]) -> str:
    name = base["name"] or "a model without a name"
    revision = f" at {base['revision'][:12]}" if base["revision"] else ""
    return f"{name}{revision} ({base['digest'].partition(':')[2][:12]})"


def _digest_of(model: Any, num_ranks: int) -> str:
    described: dict[str, str] = {}
    for name, tensor in _frozen(model):
        split = getattr(tensor, "ds_tensor", None)
        described[name] = _describe((tensor if split is None else split).data, None if split is None else num_ranks)
    return _combine(described)


def _frozen(model: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of the base model that its digest covers, each with the name that it has without adapters."""
    seen = {id(parameter) for parameter in _embeddings(model)}
    for module_name, module in model.named_modules():
        for name, tensor in _frozen_in(module):
            full = f"{module_name}.{name}".lstrip(".")
            if _REPLACED in full or id(tensor) in seen or _is_of_adapter(full, model):
                continue
            if isinstance(
                tensor, torch.nn.Parameter
            ):  # other tensors are temporary, and a later tensor may have the same id
                seen.add(id(tensor))
            yield full.removeprefix(_BASE_PREFIX).replace(_WRAPPED, "."), tensor


def _describe(tensor: torch.Tensor, num_ranks: int | None) -> str:
    where = "" if num_ranks is None else f"one of {num_ranks} "
    return f"{where}{tensor.dtype} {tuple(tensor.shape)} {_hash(tensor)}"


def _combine(digests: Mapping[str, str]) -> str:
    # Each weight has its own line, sorted by name, because releases of PEFT order and wrap the weights differently.
    return digest_bytes("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode())


def _is_of_adapter(name: str, model: Any) -> bool:
    """Whether a tensor belongs to an adapter, by its name, such as `lora_A.default.weight`."""
    prefix = getattr(model.base_model, "prefix", None) or _HOLDERS
    return any(
        adapter in model.peft_config and (before.startswith(prefix) or before in _HOLDERS)
        for before, adapter in itertools.pairwise(name.split("."))
    )


def _frozen_in(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The untrained weights of a module, and the scales of quantized weights. Submodules are left out."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            continue
        yield name, parameter
        state = getattr(parameter, "quant_state", None)  # bitsandbytes, 4 bits
        if state is not None:
            for part, tensor in cast("dict[str, torch.Tensor]", state.as_dict(packed=True)).items():
                yield f"{name}.{part}", tensor
        scales = getattr(parameter, "SCB", None)  # 8 bits; the first forward moves the scales to the module
        scales = getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales
        if scales is not None:
            yield f"{name}.SCB", scales
    for name, buffer in module.named_buffers(recurse=False):
        if name in _QUANTIZED_BUFFERS:
            yield name, buffer


def _embeddings(model: Any) -> list[Any]:
    inner = model.get_base_model()
    found: list[Any] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(AttributeError, NotImplementedError):
            module = getattr(inner, name)()
            found += [] if module is None else list(module.parameters())
    return found


def _hash(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if tensor.device.type == "meta":  # only the first rank has loaded it
        return ""
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors, as torchao's quantized weights are
        names, _ = cast("Any", tensor).__tensor_flatten__()
        return " ".join(f"{name} {_hash(getattr(tensor, name))}" for name in names)
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(content.numpy().data)
