"""The tensors of the model families of Transformers, computed from the fields of a model's `config.json`.

Promises: names and shapes are those of `model.named_parameters()` in Transformers 5. A tied weight exists once. The
tests compare each family with Transformers' own model. Not covered: models with code of their own
(`trust_remote_code`), and adapters or quantized layers, which are no part of `config.json`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from safepoint.errors import UsageError
from safepoint.foundation.units import nearest

_MOST = 1 << 40
_ALIASES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Transformers 5 has renamed these fields of some families."""
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 65_536


class Tensor(NamedTuple):
    """A parameter of a model, or a persistent buffer.

    Args:
        name: as in the model.
        sizes: of its dimensions.
        num_pieces: as how many tensors `save_pretrained` writes it. The experts of a layer are one tensor in memory.
        is_buffer: whether it is a buffer, which has no gradient and no optimizer state.
    """

    name: str
    sizes: tuple[int, ...]
    num_pieces: int = 1
    is_buffer: bool = False


class Fields:
    """The fields of a `config.json`, read with checks.

    Args:
        values: the object in the file.
        defaults: for fields that are missing; Transformers leaves out fields that have the default of their class.
        where: the name of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._defaults = defaults
        self._where = where

    def count(self, name: str, *, most: int = _MOST, default: int | None = None, least: int = 1) -> int:
        """A whole number.

        Raises:
            UsageError: the field is missing, or is no whole number in the range.
        """
        value = self._values.get(name)
        value = self._values.get(_ALIASES.get(name, name)) if value is None else value
        value = self._defaults.get(name) if value is None else value
        value = default if value is None else value
        if value is None:
            raise UsageError(
                f"{self._where} has no field {name!r}, which the size of the model depends on; nothing was computed",
                hint=f"add {name!r}, or pass a folder with the model's safetensors files, or --params",
            )
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UsageError(
                f"{self._where} has {name} = {_short(value)}; nothing was computed",
                hint=f"{name!r} must be a whole number from {least} to {most}",
            )
        return value

    def optional(self, name: str) -> int | None:
        """A whole number, or None where the field is missing or null."""
        value = self._values.get(name, self._defaults.get(name))
        return None if value is None else self.count(name)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A field that is true or false.

        Raises:
            UsageError: it is something else.
        """
        value = self._values.get(name)
        value = self._defaults.get(name, default) if value is None else value
        if not isinstance(value, bool):
            raise UsageError(
                f"{self._where} has {name} = {_short(value)}; nothing was computed",
                hint=f"{name!r} must be true or false",
            )
        return value

    def text(self, name: str, default: str) -> str:
        """A field that is a string; `default` where it is missing or something else."""
        value = self._values.get(name)
        return value if isinstance(value, str) else default

    def numbers(self, name: str) -> list[int]:
        """A field that is a list of whole numbers; empty where it is missing."""
        found: object = self._values.get(name) or []
        value = cast("list[Any]", found) if isinstance(found, list) else [found]
        if not all(type(one) is int for one in value):
            raise UsageError(
                f"{self._where} has {name} = {_short(value)}; nothing was computed",
                hint=f"{name!r} must be a list of whole numbers",
            )
        return value

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.count("num_hidden_layers", most=_MOST_LAYERS)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _linear(name: str, out: int, into: int, *, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (out, into))
    if bias:
        yield Tensor(f"{name}.bias", (out,))


def _norm(name: str, size: int, *, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (size,))
    if bias:
        yield Tensor(f"{name}.bias", (size,))


# ---- decoders like Llama -------------------------------------------------------------------------------------------


class _Style(NamedTuple):
    """How a family differs from Llama."""

    qkv_bias: bool | None = None
    """Whether the projections of queries, keys and values have a bias; None: as `attention_bias` says."""
    has_qk_norms: bool = False
    is_fused: bool = False
    has_four_norms: bool = False
    experts: str = ""
    """The field with the number of experts."""


def _like_llama(style: _Style) -> Callable[[Fields], Iterator[Tensor]]:
    def tensors(fields: Fields) -> Iterator[Tensor]:
        hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
        yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
        for layer in range(fields.num_layers):
            name = f"model.layers.{layer}"
            yield from _attention(fields, style, f"{name}.self_attn", hidden)
            yield from _feed_forward(fields, style, f"{name}.mlp", hidden, layer)
            yield from _norm(f"{name}.input_layernorm", hidden)
            yield from _norm(f"{name}.post_attention_layernorm", hidden)
            if style.has_four_norms:
                yield from _norm(f"{name}.pre_feedforward_layernorm", hidden)
                yield from _norm(f"{name}.post_feedforward_layernorm", hidden)
        yield from _norm("model.norm", hidden)
        if not fields.flag("tie_word_embeddings"):
            yield Tensor("lm_head.weight", (vocabulary, hidden))

    return tensors


def _attention(fields: Fields, style: _Style, name: str, hidden: int) -> Iterator[Tensor]:
    num_heads = fields.count("num_attention_heads")
    num_shared = fields.optional("num_key_value_heads") or num_heads
    size = fields.optional("head_dim") or hidden // num_heads
    if style.is_fused:
        yield from _linear(f"{name}.o_proj", hidden, num_heads * size)
        yield from _linear(f"{name}.qkv_proj", (num_heads + 2 * num_shared) * size, hidden)
        return
    bias = fields.flag("attention_bias")
    qkv_bias = bias if style.qkv_bias is None else style.qkv_bias
    yield from _linear(f"{name}.q_proj", num_heads * size, hidden, bias=qkv_bias)
    yield from _linear(f"{name}.k_proj", num_shared * size, hidden, bias=qkv_bias)
    yield from _linear(f"{name}.v_proj", num_shared * size, hidden, bias=qkv_bias)
    yield from _linear(f"{name}.o_proj", hidden, num_heads * size, bias=bias and style.qkv_bias is None)
    if style.has_qk_norms:
        yield from _norm(f"{name}.q_norm", size)
        yield from _norm(f"{name}.k_norm", size)


def _feed_forward(fields: Fields, style: _Style, name: str, hidden: int, layer: int) -> Iterator[Tensor]:
    if style.experts and _has_experts(fields, layer):
        num_experts = fields.count(style.experts, most=_MOST_EXPERTS)
        own = fields.optional("moe_intermediate_size") or fields.count("intermediate_size")
        if style.has_qk_norms:
            yield from _experts(name, num_experts, own, hidden)
            yield Tensor(f"{name}.gate.weight", (num_experts, hidden))
        else:
            yield Tensor(f"{name}.gate.weight", (num_experts, hidden))
            yield from _experts(name, num_experts, own, hidden)
        return
    between = fields.count("intermediate_size")
    if style.is_fused:
        yield from _linear(f"{name}.gate_up_proj", 2 * between, hidden)
        yield from _linear(f"{name}.down_proj", hidden, between)
    else:
        yield from _gated(name, between, hidden, bias=fields.flag("mlp_bias"))


def _gated(name: str, between: int, hidden: int, *, bias: bool = False) -> Iterator[Tensor]:
    yield from _linear(f"{name}.gate_proj", between, hidden, bias=bias)
    yield from _linear(f"{name}.up_proj", between, hidden, bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, between, bias=bias)


def _experts(name: str, num_experts: int, between: int, hidden: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.experts.gate_up_proj", (num_experts, 2 * between, hidden), 2 * num_experts)
    yield Tensor(f"{name}.experts.down_proj", (num_experts, hidden, between), num_experts)


def _has_experts(fields: Fields, layer: int) -> bool:
    every = fields.count("decoder_sparse_step", default=1)
    return layer not in fields.numbers("mlp_only_layers") and (layer + 1) % every == 0


def _deepseek_v3(fields: Fields) -> Iterator[Tensor]:
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    num_heads = fields.count("num_attention_heads")
    rope, no_rope = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    value, rank = fields.count("v_head_dim"), fields.count("kv_lora_rank")
    query_rank = fields.optional("q_lora_rank")
    num_experts = fields.count("n_routed_experts", most=_MOST_EXPERTS)
    own, num_shared = fields.count("moe_intermediate_size"), fields.count("n_shared_experts")
    num_dense = fields.count("first_k_dense_replace", least=0)
    bias = fields.flag("attention_bias")
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for layer in range(fields.num_layers):
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        if query_rank is None:
            yield from _linear(f"{attention}.q_proj", num_heads * (rope + no_rope), hidden)
        else:
            yield from _linear(f"{attention}.q_a_proj", query_rank, hidden, bias=bias)
            yield from _norm(f"{attention}.q_a_layernorm", query_rank)
            yield from _linear(f"{attention}.q_b_proj", num_heads * (rope + no_rope), query_rank)
        yield from _linear(f"{attention}.kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
        yield from _norm(f"{attention}.kv_a_layernorm", rank)
        yield from _linear(f"{attention}.kv_b_proj", num_heads * (no_rope + value), rank)
        yield from _linear(f"{attention}.o_proj", hidden, num_heads * value, bias=bias)
        if layer < num_dense:
            yield from _gated(f"{name}.mlp", fields.count("intermediate_size"), hidden)
        else:
            yield from _experts(f"{name}.mlp", num_experts, own, hidden)
            yield Tensor(f"{name}.mlp.gate.weight", (num_experts, hidden))
            yield Tensor(f"{name}.mlp.gate.e_score_correction_bias", (num_experts,), is_buffer=True)
            yield from _gated(f"{name}.mlp.shared_experts", own * num_shared, hidden)
        yield from _norm(f"{name}.input_layernorm", hidden)
        yield from _norm(f"{name}.post_attention_layernorm", hidden)
    yield from _norm("model.norm", hidden)
    if not fields.flag("tie_word_embeddings"):
        yield Tensor("lm_head.weight", (vocabulary, hidden))


# ---- other decoders, and models with an encoder --------------------------------------------------------------------


def _gpt2(fields: Fields) -> Iterator[Tensor]:
    hidden, vocabulary = fields.count("n_embd"), fields.count("vocab_size")
    between = fields.optional("n_inner") or 4 * hidden
    yield Tensor("transformer.wte.weight", (vocabulary, hidden))
    yield Tensor("transformer.wpe.weight", (fields.count("n_positions"), hidden))
    for layer in range(fields.count("n_layer", most=_MOST_LAYERS)):
        name = f"transformer.h.{layer}"
        yield from _norm(f"{name}.ln_1", hidden, bias=True)
        yield from _turned(f"{name}.attn.c_attn", hidden, 3 * hidden)
        yield from _turned(f"{name}.attn.c_proj", hidden, hidden)
        yield from _norm(f"{name}.ln_2", hidden, bias=True)
        yield from _turned(f"{name}.mlp.c_fc", hidden, between)
        yield from _turned(f"{name}.mlp.c_proj", between, hidden)
    yield from _norm("transformer.ln_f", hidden, bias=True)
    if not fields.flag("tie_word_embeddings"):
        yield Tensor("lm_head.weight", (vocabulary, hidden))


def _turned(name: str, into: int, out: int) -> Iterator[Tensor]:
    """GPT-2's layers, which hold the matrix transposed."""
    yield Tensor(f"{name}.weight", (into, out))
    yield Tensor(f"{name}.bias", (out,))


def _gpt_neox(fields: Fields) -> Iterator[Tensor]:
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    between, bias = fields.count("intermediate_size"), fields.flag("attention_bias", default=True)
    yield Tensor("gpt_neox.embed_in.weight", (vocabulary, hidden))
    for layer in range(fields.num_layers):
        name = f"gpt_neox.layers.{layer}"
        yield from _norm(f"{name}.input_layernorm", hidden, bias=True)
        yield from _norm(f"{name}.post_attention_layernorm", hidden, bias=True)
        yield from _linear(f"{name}.attention.query_key_value", 3 * hidden, hidden, bias=bias)
        yield from _linear(f"{name}.attention.dense", hidden, hidden, bias=bias)
        yield from _linear(f"{name}.mlp.dense_h_to_4h", between, hidden, bias=True)
        yield from _linear(f"{name}.mlp.dense_4h_to_h", hidden, between, bias=True)
    yield from _norm("gpt_neox.final_layer_norm", hidden, bias=True)
    if not fields.flag("tie_word_embeddings"):
        yield Tensor("lm_head.weight", (vocabulary, hidden))


def _opt(fields: Fields) -> Iterator[Tensor]:
    hidden, vocabulary, between = fields.count("hidden_size"), fields.count("vocab_size"), fields.count("ffn_dim")
    outer = fields.optional("word_embed_proj_dim") or hidden
    bias, has_weights = fields.flag("enable_bias"), fields.flag("layer_norm_elementwise_affine")
    yield Tensor("model.decoder.embed_tokens.weight", (vocabulary, outer))
    # OPT's positions begin at 2.
    yield Tensor("model.decoder.embed_positions.weight", (fields.count("max_position_embeddings") + 2, hidden))
    if outer != hidden:
        yield from _linear("model.decoder.project_out", outer, hidden)
        yield from _linear("model.decoder.project_in", hidden, outer)
    if has_weights and fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm"):
        yield from _norm("model.decoder.final_layer_norm", hidden, bias=True)
    for layer in range(fields.num_layers):
        name = f"model.decoder.layers.{layer}"
        for part in ("k", "v", "q", "out"):
            yield from _linear(f"{name}.self_attn.{part}_proj", hidden, hidden, bias=bias)
        if has_weights:
            yield from _norm(f"{name}.self_attn_layer_norm", hidden, bias=True)
        yield from _linear(f"{name}.fc1", between, hidden, bias=bias)
        yield from _linear(f"{name}.fc2", hidden, between, bias=bias)
        if has_weights:
            yield from _norm(f"{name}.final_layer_norm", hidden, bias=True)
    if not fields.flag("tie_word_embeddings"):
        yield Tensor("lm_head.weight", (vocabulary, outer))


def _falcon(fields: Fields) -> Iterator[Tensor]:
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    num_heads = fields.count("num_attention_heads")
    between = fields.optional("ffn_hidden_size") or 4 * hidden
    is_new, is_parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn")
    bias, size = fields.flag("bias"), hidden // num_heads
    if is_new:
        qkv = (2 * (fields.optional("num_kv_heads") or num_heads) + num_heads) * size
    else:
        qkv = hidden + 2 * size if fields.flag("multi_query") else 3 * hidden
    num_norms = fields.optional("num_ln_in_parallel_attn") or (2 if is_new else 1)
    yield Tensor("transformer.word_embeddings.weight", (vocabulary, hidden))
    for layer in range(fields.num_layers):
        name = f"transformer.h.{layer}"
        yield from _linear(f"{name}.self_attention.query_key_value", qkv, hidden, bias=bias)
        yield from _linear(f"{name}.self_attention.dense", hidden, hidden, bias=bias)
        yield from _linear(f"{name}.mlp.dense_h_to_4h", between, hidden, bias=bias)
        yield from _linear(f"{name}.mlp.dense_4h_to_h", hidden, between, bias=bias)
        if is_new and num_norms == 2:
            yield from _norm(f"{name}.ln_attn", hidden, bias=True)
            yield from _norm(f"{name}.ln_mlp", hidden, bias=True)
        else:
            if not is_parallel:
                yield from _norm(f"{name}.post_attention_layernorm", hidden, bias=True)
            yield from _norm(f"{name}.input_layernorm", hidden, bias=True)
    yield from _norm("transformer.ln_f", hidden, bias=True)
    if not fields.flag("tie_word_embeddings"):
        yield Tensor("lm_head.weight", (vocabulary, hidden))


def _bert(fields: Fields) -> Iterator[Tensor]:
    """The encoder with its head for masked words, or with a classifier of two labels."""
    hidden, vocabulary, between = (fields.count(name) for name in ("hidden_size", "vocab_size", "intermediate_size"))
    for name, rows in (
        ("word", vocabulary),
        ("position", fields.count("max_position_embeddings")),
        ("token_type", fields.count("type_vocab_size")),
    ):
        yield Tensor(f"bert.embeddings.{name}_embeddings.weight", (rows, hidden))
    yield from _norm("bert.embeddings.LayerNorm", hidden, bias=True)
    for layer in range(fields.num_layers):
        name = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from _linear(f"{name}.attention.self.{part}", hidden, hidden, bias=True)
        yield from _linear(f"{name}.attention.output.dense", hidden, hidden, bias=True)
        yield from _norm(f"{name}.attention.output.LayerNorm", hidden, bias=True)
        yield from _linear(f"{name}.intermediate.dense", between, hidden, bias=True)
        yield from _linear(f"{name}.output.dense", hidden, between, bias=True)
        yield from _norm(f"{name}.output.LayerNorm", hidden, bias=True)
    if "Classification" in fields.text("_architecture", ""):
        yield from _linear("bert.pooler.dense", hidden, hidden, bias=True)
        yield from _linear("classifier", fields.count("_num_labels", default=2), hidden, bias=True)
    else:
        yield Tensor("cls.predictions.bias", (vocabulary,))
        yield from _linear("cls.predictions.transform.dense", hidden, hidden, bias=True)
        yield from _norm("cls.predictions.transform.LayerNorm", hidden, bias=True)


def _t5(fields: Fields) -> Iterator[Tensor]:
    hidden, between = fields.count("d_model"), fields.count("d_ff")
    num_heads = fields.count("num_heads")
    inner = num_heads * fields.count("d_kv")
    depth = fields.count("num_layers", most=_MOST_LAYERS)
    stacks = {"encoder": depth, "decoder": fields.count("num_decoder_layers", most=_MOST_LAYERS, default=depth)}
    is_gated = fields.text("feed_forward_proj", "relu").startswith("gated")
    yield Tensor("shared.weight", (fields.count("vocab_size"), hidden))
    for stack, num_layers in stacks.items():
        for layer in range(num_layers):
            block = f"{stack}.block.{layer}.layer"
            parts = ["SelfAttention", "EncDecAttention"] if stack == "decoder" else ["SelfAttention"]
            for number, part in enumerate(parts):
                for matrix in ("q", "k", "v"):
                    yield from _linear(f"{block}.{number}.{part}.{matrix}", inner, hidden)
                yield from _linear(f"{block}.{number}.{part}.o", hidden, inner)
                if layer == 0 and number == 0:
                    buckets = fields.count("relative_attention_num_buckets")
                    yield Tensor(f"{block}.0.{part}.relative_attention_bias.weight", (buckets, num_heads))
                yield from _norm(f"{block}.{number}.layer_norm", hidden)
            last = f"{block}.{len(parts)}"
            for matrix in ("wi_0", "wi_1") if is_gated else ("wi",):
                yield from _linear(f"{last}.DenseReluDense.{matrix}", between, hidden)
            yield from _linear(f"{last}.DenseReluDense.wo", hidden, between)
            yield from _norm(f"{last}.layer_norm", hidden)
        yield from _norm(f"{stack}.final_layer_norm", hidden)


# ---- the families --------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """A family of models.

    Args:
        tensors: the parameters, from the fields.
        defaults: of the fields that `config.json` may leave out: those of Transformers' class.
        lora: the modules that PEFT adapts if none are named (peft/utils/constants.py); empty where PEFT has none.
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
    "llama": Family(_like_llama(_Style()), _UNTIED, _QV),
    "mistral": Family(_like_llama(_Style()), {**_UNTIED, "num_key_value_heads": 8}, _QV),
    "qwen2": Family(_like_llama(_Style(qkv_bias=True)), _UNTIED, _QV),
    "qwen3": Family(_like_llama(_Style(has_qk_norms=True)), {**_UNTIED, "head_dim": 128}, _QV),
    "gemma": Family(_like_llama(_Style()), _GEMMA, _QV),
    "gemma2": Family(_like_llama(_Style(has_four_norms=True)), _GEMMA, _QV),
    "gemma3_text": Family(_like_llama(_Style(has_four_norms=True, has_qk_norms=True)), _GEMMA3, _QV),
    "phi3": Family(_like_llama(_Style(is_fused=True)), _UNTIED, ()),
    "mixtral": Family(_like_llama(_Style(experts="num_local_experts")), {**_UNTIED, "num_key_value_heads": 8}, _QV),
    "qwen3_moe": Family(_like_llama(_Style(experts="num_experts", has_qk_norms=True)), _UNTIED, ()),
    "deepseek_v3": Family(_deepseek_v3, _DEEPSEEK, ()),
    "gpt2": Family(_gpt2, {"tie_word_embeddings": True, "n_positions": 1024}, ("c_attn",)),
    "gpt_neox": Family(_gpt_neox, _UNTIED, ("query_key_value",)),
    "opt": Family(_opt, _OPT, _QV),
    "falcon": Family(_falcon, _FALCON, ("query_key_value",)),
    "bert": Family(_bert, _BERT, ("query", "value")),
    "t5": Family(_t5, {"relative_attention_num_buckets": 32}, ("q", "v")),
}
"""By `model_type` in `config.json`."""


def tensors_of(config: Mapping[str, Any], where: str) -> tuple[str, list[Tensor]]:
    """The family of a model, and its tensors.

    Args:
        config: the object in `config.json`.
        where: the name of the file, for messages.

    Raises:
        UsageError: the family is not known, or a field is missing or invalid.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = nearest(kind, FAMILIES) if isinstance(kind, str) and len(kind) < 100 else ""
        raise UsageError(
            f"{where} has model_type = {_short(kind)}, whose tensors Safepoint cannot compute; nothing was computed",
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
    return kind, list(family.tensors(Fields(values, family.defaults, where)))
