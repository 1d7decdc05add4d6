"""Decoders like Llama, with and without experts, and DeepSeek-V3."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from safepoint.planning.architectures.fields import MOST_EXPERTS, Fields, Tensor
from safepoint.planning.architectures.layers import linear, norm


class Style(NamedTuple):
    """How a family differs from Llama."""

    qkv_bias: bool | None = None
    """Whether the projections of queries, keys and values have a bias. If None, `attention_bias` decides."""
    has_qk_norms: bool = False
    is_fused: bool = False
    has_four_norms: bool = False
    experts: str = ""
    """The name of the field with the number of experts; empty for a family without experts."""


def like_llama(style: Style) -> Callable[[Fields], Iterator[Tensor]]:
    """Return the function that lists the tensors of a family like Llama, from the fields of `config.json`."""

    def tensors(fields: Fields) -> Iterator[Tensor]:
        hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
        yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
        for layer in range(fields.num_layers):
            name = f"model.layers.{layer}"
            yield from _attention(fields, style, f"{name}.self_attn", hidden)
            yield from _feed_forward(fields, style, f"{name}.mlp", hidden, layer)
            yield from norm(f"{name}.input_layernorm", hidden)
            yield from norm(f"{name}.post_attention_layernorm", hidden)
            if style.has_four_norms:
                yield from norm(f"{name}.pre_feedforward_layernorm", hidden)
                yield from norm(f"{name}.post_feedforward_layernorm", hidden)
        yield from norm("model.norm", hidden)
        yield Tensor("lm_head.weight", (vocabulary, hidden), is_tied=fields.flag("tie_word_embeddings"))

    return tensors


def _attention(fields: Fields, style: Style, name: str, hidden: int) -> Iterator[Tensor]:
    num_heads = fields.count("num_attention_heads")
    num_shared = fields.optional("num_key_value_heads") or num_heads
    size = fields.optional("head_dim")
    if size is None:
        size = fields.share("hidden_size", hidden, "num_attention_heads", num_heads)
    if style.is_fused:
        yield from linear(f"{name}.o_proj", hidden, num_heads * size)
        yield from linear(f"{name}.qkv_proj", (num_heads + 2 * num_shared) * size, hidden)
        return
    bias = fields.flag("attention_bias")
    qkv_bias = bias if style.qkv_bias is None else style.qkv_bias
    yield from linear(f"{name}.q_proj", num_heads * size, hidden, bias=qkv_bias)
    yield from linear(f"{name}.k_proj", num_shared * size, hidden, bias=qkv_bias)
    yield from linear(f"{name}.v_proj", num_shared * size, hidden, bias=qkv_bias)
    yield from linear(f"{name}.o_proj", hidden, num_heads * size, bias=bias and style.qkv_bias is None)
    if style.has_qk_norms:
        yield from norm(f"{name}.q_norm", size)
        yield from norm(f"{name}.k_norm", size)


def _feed_forward(fields: Fields, style: Style, name: str, hidden: int, layer: int) -> Iterator[Tensor]:
    if style.experts and _has_experts(fields, layer):
        num_experts = fields.count(style.experts, most=MOST_EXPERTS)
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
        yield from linear(f"{name}.gate_up_proj", 2 * between, hidden)
        yield from linear(f"{name}.down_proj", hidden, between)
    else:
        yield from _gated(name, between, hidden, bias=fields.flag("mlp_bias"))


def _gated(name: str, between: int, hidden: int, *, bias: bool = False) -> Iterator[Tensor]:
    yield from linear(f"{name}.gate_proj", between, hidden, bias=bias)
    yield from linear(f"{name}.up_proj", between, hidden, bias=bias)
    yield from linear(f"{name}.down_proj", hidden, between, bias=bias)


def _experts(name: str, num_experts: int, between: int, hidden: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.experts.gate_up_proj", (num_experts, 2 * between, hidden), 2 * num_experts)
    yield Tensor(f"{name}.experts.down_proj", (num_experts, hidden, between), num_experts)


def _has_experts(fields: Fields, layer: int) -> bool:
    every = fields.count("decoder_sparse_step", default=1)
    return layer not in fields.numbers("mlp_only_layers") and (layer + 1) % every == 0


def deepseek_v3(fields: Fields) -> Iterator[Tensor]:
    """DeepSeek-V3: attention through matrices of low rank; routed experts, and shared experts."""
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    num_heads = fields.count("num_attention_heads")
    rope, no_rope = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    value, rank = fields.count("v_head_dim"), fields.count("kv_lora_rank")
    query_rank = fields.optional("q_lora_rank")
    num_experts = fields.count("n_routed_experts", most=MOST_EXPERTS)
    own, num_shared = fields.count("moe_intermediate_size"), fields.count("n_shared_experts")
    num_dense = fields.count("first_k_dense_replace", least=0)
    bias = fields.flag("attention_bias")
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    for layer in range(fields.num_layers):
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        if query_rank is None:
            yield from linear(f"{attention}.q_proj", num_heads * (rope + no_rope), hidden)
        else:
            yield from linear(f"{attention}.q_a_proj", query_rank, hidden, bias=bias)
            yield from norm(f"{attention}.q_a_layernorm", query_rank)
            yield from linear(f"{attention}.q_b_proj", num_heads * (rope + no_rope), query_rank)
        yield from linear(f"{attention}.kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
        yield from norm(f"{attention}.kv_a_layernorm", rank)
        yield from linear(f"{attention}.kv_b_proj", num_heads * (no_rope + value), rank)
        yield from linear(f"{attention}.o_proj", hidden, num_heads * value, bias=bias)
        if layer < num_dense:
            yield from _gated(f"{name}.mlp", fields.count("intermediate_size"), hidden)
        else:
            yield from _experts(f"{name}.mlp", num_experts, own, hidden)
            yield Tensor(f"{name}.mlp.gate.weight", (num_experts, hidden))
            yield Tensor(f"{name}.mlp.gate.e_score_correction_bias", (num_experts,), is_buffer=True)
            yield from _gated(f"{name}.mlp.shared_experts", own * num_shared, hidden)
        yield from norm(f"{name}.input_layernorm", hidden)
        yield from norm(f"{name}.post_attention_layernorm", hidden)
    yield from norm("model.norm", hidden)
    yield Tensor("lm_head.weight", (vocabulary, hidden), is_tied=fields.flag("tie_word_embeddings"))
