"""The model families that Safepoint can compute, by the `model_type` in `config.json`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from safepoint.errors import UsageError
from safepoint.foundation.units import nearest
from safepoint.planning.architectures.fields import Fields, Tensor, shown
from safepoint.planning.architectures.like_llama import Style, deepseek_v3, like_llama
from safepoint.planning.architectures.others import bert, falcon, gpt2, gpt_neox, opt, t5


class Family(NamedTuple):
    """A family of models.

    Args:
        tensors: computes the parameters from the fields.
        defaults: the values of the fields that `config.json` may leave out: the defaults of Transformers' class.
        lora: the modules that PEFT adapts if none are named (peft/utils/constants.py); empty if PEFT has no default.
    """

    tensors: Callable[[Fields], Iterator[Tensor]]
    defaults: Mapping[str, Any]
    lora: tuple[str, ...]


_QV = ("q_proj", "v_proj")
_UNTIED = {"tie_word_embeddings": False}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA3 = {**_GEMMA, "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
_OPT = {
    "tie_word_embeddings": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "do_layer_norm_before": True,
    "max_position_embeddings": 2048,
}
_FALCON = {"tie_word_embeddings": True, "parallel_attn": True, "multi_query": True}
_BERT = {"type_vocab_size": 2, "max_position_embeddings": 512}
_DEEPSEEK = {
    "tie_word_embeddings": False,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "n_shared_experts": 1,
}
FAMILIES: dict[str, Family] = {
    "llama": Family(like_llama(Style()), _UNTIED, _QV),
    "mistral": Family(like_llama(Style()), {**_UNTIED, "num_key_value_heads": 8}, _QV),
    "ministral3": Family(like_llama(Style()), {**_UNTIED, "num_key_value_heads": 8, "head_dim": 128}, ()),
    "granite": Family(like_llama(Style()), _UNTIED, ()),
    "smollm3": Family(like_llama(Style()), {"tie_word_embeddings": True, "num_key_value_heads": 4}, ()),
    "qwen2": Family(like_llama(Style(qkv_bias=True)), {**_UNTIED, "num_key_value_heads": 32}, _QV),
    "qwen3": Family(
        like_llama(Style(has_qk_norms=True)), {**_UNTIED, "head_dim": 128, "num_key_value_heads": 32}, _QV
    ),
    "gemma": Family(like_llama(Style()), {**_GEMMA, "num_key_value_heads": 16}, _QV),
    "gemma2": Family(like_llama(Style(has_four_norms=True)), {**_GEMMA, "num_key_value_heads": 4}, _QV),
    "gemma3_text": Family(like_llama(Style(has_four_norms=True, has_qk_norms=True)), _GEMMA3, _QV),
    "phi3": Family(like_llama(Style(is_fused=True)), _UNTIED, ()),
    "mixtral": Family(like_llama(Style(experts="num_local_experts")), {**_UNTIED, "num_key_value_heads": 8}, _QV),
    "qwen3_moe": Family(
        like_llama(Style(experts="num_experts", has_qk_norms=True)), {**_UNTIED, "num_key_value_heads": 4}, ()
    ),
    "deepseek_v3": Family(deepseek_v3, _DEEPSEEK, ()),
    "gpt2": Family(gpt2, {"tie_word_embeddings": True, "n_positions": 1024}, ("c_attn",)),
    "gpt_neox": Family(gpt_neox, _UNTIED, ("query_key_value",)),
    "opt": Family(opt, _OPT, _QV),
    "falcon": Family(falcon, _FALCON, ("query_key_value",)),
    "bert": Family(bert, _BERT, ("query", "value")),
    "t5": Family(t5, {"relative_attention_num_buckets": 32}, ("q", "v")),
}
"""The families, by their `model_type` in `config.json`."""


class Architecture(NamedTuple):
    """A model.

    Args:
        family: its `model_type`.
        tensors: parameters and persistent buffers, each once.
        tied: the additional names of tied weights. FSDP2 and ZeRO save a tied weight under each of its names.
    """

    family: str
    tensors: tuple[Tensor, ...]
    tied: tuple[Tensor, ...]


def tensors_of(config: Mapping[str, Any], where: str) -> Architecture:
    """The tensors of a model.

    Args:
        config: the object in `config.json`.
        where: the name of the file, for messages.

    Raises:
        UsageError: the family is not known, or a field is missing or invalid.
    """
    kind = config.get("model_type")
    text = config.get("text_config")
    text_kind = cast("dict[str, Any]", text).get("model_type") if isinstance(text, dict) else None
    if isinstance(kind, str) and kind not in FAMILIES and isinstance(text_kind, str):
        # A plan with the tensors of the text model alone would be for a smaller model.
        hint = "pass a folder with the model's safetensors files, whose headers are read"
        if text_kind in FAMILIES:
            hint += f"; to train only the text model, write its text_config ({text_kind}) to a file, and pass that"
        raise UsageError(
            f"{where} has model_type = {shown(kind)}, a model of several parts, whose tensors Safepoint cannot "
            "compute; nothing was computed",
            hint=hint,
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = nearest(kind, FAMILIES) if isinstance(kind, str) and len(kind) < 100 else ""
        raise UsageError(
            f"{where} has model_type = {shown(kind)}, whose tensors Safepoint cannot compute; nothing was computed",
            hint="pass a folder with the model's safetensors files, whose headers are read, or --params with the "
            f"number of parameters{f' ({known})' if known else ''}",
        )
    family = FAMILIES[kind]
    architectures = config.get("architectures")
    values = dict(config)
    if isinstance(architectures, list) and architectures:
        values["_architecture"] = architectures[0]
    if isinstance(config.get("id2label"), dict):
        values["_num_labels"] = len(config["id2label"])
    tensors = list(family.tensors(Fields(values, family.defaults, where)))
    return Architecture(
        family=kind,
        tensors=tuple(one for one in tensors if not one.is_tied),
        tied=tuple(one for one in tensors if one.is_tied),
    )
