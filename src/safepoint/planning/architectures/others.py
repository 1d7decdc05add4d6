"""Other decoders than those like Llama, and models with an encoder."""

from collections.abc import Iterator

from safepoint.planning.architectures.fields import MOST_LAYERS, Fields, Tensor
from safepoint.planning.architectures.layers import linear, norm


def gpt2(fields: Fields) -> Iterator[Tensor]:
    """GPT-2."""
    hidden, vocabulary = fields.count("n_embd"), fields.count("vocab_size")
    between = fields.optional("n_inner") or 4 * hidden
    yield Tensor("transformer.wte.weight", (vocabulary, hidden))
    yield Tensor("transformer.wpe.weight", (fields.count("n_positions"), hidden))
    for layer in range(fields.count("n_layer", most=MOST_LAYERS)):
        name = f"transformer.h.{layer}"
        yield from norm(f"{name}.ln_1", hidden, bias=True)
        yield from _turned(f"{name}.attn.c_attn", hidden, 3 * hidden)
        yield from _turned(f"{name}.attn.c_proj", hidden, hidden)
        yield from norm(f"{name}.ln_2", hidden, bias=True)
        yield from _turned(f"{name}.mlp.c_fc", hidden, between)
        yield from _turned(f"{name}.mlp.c_proj", between, hidden)
    yield from norm("transformer.ln_f", hidden, bias=True)
    yield Tensor("lm_head.weight", (vocabulary, hidden), is_tied=fields.flag("tie_word_embeddings"))


def _turned(name: str, into: int, out: int) -> Iterator[Tensor]:
    """A linear layer of GPT-2. Its matrix is stored transposed."""
    yield Tensor(f"{name}.weight", (into, out))
    yield Tensor(f"{name}.bias", (out,))


def gpt_neox(fields: Fields) -> Iterator[Tensor]:
    """GPT-NeoX and Pythia."""
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    between, bias = fields.count("intermediate_size"), fields.flag("attention_bias", default=True)
    yield Tensor("gpt_neox.embed_in.weight", (vocabulary, hidden))
    for layer in range(fields.num_layers):
        name = f"gpt_neox.layers.{layer}"
        yield from norm(f"{name}.input_layernorm", hidden, bias=True)
        yield from norm(f"{name}.post_attention_layernorm", hidden, bias=True)
        yield from linear(f"{name}.attention.query_key_value", 3 * hidden, hidden, bias=bias)
        yield from linear(f"{name}.attention.dense", hidden, hidden, bias=bias)
        yield from linear(f"{name}.mlp.dense_h_to_4h", between, hidden, bias=True)
        yield from linear(f"{name}.mlp.dense_4h_to_h", hidden, between, bias=True)
    yield from norm("gpt_neox.final_layer_norm", hidden, bias=True)
    yield Tensor("lm_head.weight", (vocabulary, hidden), is_tied=fields.flag("tie_word_embeddings"))


def opt(fields: Fields) -> Iterator[Tensor]:
    """OPT."""
    hidden, vocabulary, between = fields.count("hidden_size"), fields.count("vocab_size"), fields.count("ffn_dim")
    outer = fields.optional("word_embed_proj_dim") or hidden
    bias, has_weights = fields.flag("enable_bias"), fields.flag("layer_norm_elementwise_affine")
    yield Tensor("model.decoder.embed_tokens.weight", (vocabulary, outer))
    # OPT's positions begin at 2.
    yield Tensor("model.decoder.embed_positions.weight", (fields.count("max_position_embeddings") + 2, hidden))
    if outer != hidden:
        yield from linear("model.decoder.project_out", outer, hidden)
        yield from linear("model.decoder.project_in", hidden, outer)
    if has_weights and fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm"):
        yield from norm("model.decoder.final_layer_norm", hidden, bias=True)
    for layer in range(fields.num_layers):
        name = f"model.decoder.layers.{layer}"
        for part in ("k", "v", "q", "out"):
            yield from linear(f"{name}.self_attn.{part}_proj", hidden, hidden, bias=bias)
        if has_weights:
            yield from norm(f"{name}.self_attn_layer_norm", hidden, bias=True)
        yield from linear(f"{name}.fc1", between, hidden, bias=bias)
        yield from linear(f"{name}.fc2", hidden, between, bias=bias)
        if has_weights:
            yield from norm(f"{name}.final_layer_norm", hidden, bias=True)
    yield Tensor("lm_head.weight", (vocabulary, outer), is_tied=fields.flag("tie_word_embeddings"))


def falcon(fields: Fields) -> Iterator[Tensor]:
    """Falcon, in its three designs."""
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
        yield from linear(f"{name}.self_attention.query_key_value", qkv, hidden, bias=bias)
        yield from linear(f"{name}.self_attention.dense", hidden, hidden, bias=bias)
        yield from linear(f"{name}.mlp.dense_h_to_4h", between, hidden, bias=bias)
        yield from linear(f"{name}.mlp.dense_4h_to_h", hidden, between, bias=bias)
        if is_new and num_norms == 2:
            yield from norm(f"{name}.ln_attn", hidden, bias=True)
            yield from norm(f"{name}.ln_mlp", hidden, bias=True)
        else:
            if not is_parallel:
                yield from norm(f"{name}.post_attention_layernorm", hidden, bias=True)
            yield from norm(f"{name}.input_layernorm", hidden, bias=True)
    yield from norm("transformer.ln_f", hidden, bias=True)
    yield Tensor("lm_head.weight", (vocabulary, hidden), is_tied=fields.flag("tie_word_embeddings"))


def bert(fields: Fields) -> Iterator[Tensor]:
    """BERT's encoder with its head for masked words, or with a classifier."""
    hidden, vocabulary, between = (fields.count(name) for name in ("hidden_size", "vocab_size", "intermediate_size"))
    for name, rows in (
        ("word", vocabulary),
        ("position", fields.count("max_position_embeddings")),
        ("token_type", fields.count("type_vocab_size")),
    ):
        yield Tensor(f"bert.embeddings.{name}_embeddings.weight", (rows, hidden))
    yield from norm("bert.embeddings.LayerNorm", hidden, bias=True)
    for layer in range(fields.num_layers):
        name = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from linear(f"{name}.attention.self.{part}", hidden, hidden, bias=True)
        yield from linear(f"{name}.attention.output.dense", hidden, hidden, bias=True)
        yield from norm(f"{name}.attention.output.LayerNorm", hidden, bias=True)
        yield from linear(f"{name}.intermediate.dense", between, hidden, bias=True)
        yield from linear(f"{name}.output.dense", hidden, between, bias=True)
        yield from norm(f"{name}.output.LayerNorm", hidden, bias=True)
    if "Classification" in fields.text("_architecture", ""):
        yield from linear("bert.pooler.dense", hidden, hidden, bias=True)
        yield from linear("classifier", fields.count("_num_labels", default=2), hidden, bias=True)
    else:
        yield Tensor("cls.predictions.bias", (vocabulary,))
        yield from linear("cls.predictions.transform.dense", hidden, hidden, bias=True)
        yield from norm("cls.predictions.transform.LayerNorm", hidden, bias=True)
        yield Tensor("cls.predictions.decoder.weight", (vocabulary, hidden), is_tied=True)
        yield Tensor("cls.predictions.decoder.bias", (vocabulary,), is_tied=True)


def t5(fields: Fields) -> Iterator[Tensor]:
    """T5: an encoder and a decoder."""
    hidden, between = fields.count("d_model"), fields.count("d_ff")
    num_heads = fields.count("num_heads")
    inner = num_heads * fields.count("d_kv")
    depth = fields.count("num_layers", most=MOST_LAYERS)
    stacks = {"encoder": depth, "decoder": fields.count("num_decoder_layers", most=MOST_LAYERS, default=depth)}
    is_gated = fields.text("feed_forward_proj", "relu").startswith("gated")
    vocabulary = fields.count("vocab_size")
    yield Tensor("shared.weight", (vocabulary, hidden))
    # Transformers 5 ties the head of every T5, even if `tie_word_embeddings` is false.
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"):
        yield Tensor(f"{name}.weight", (vocabulary, hidden), is_tied=True)
    for stack, num_layers in stacks.items():
        for layer in range(num_layers):
            block = f"{stack}.block.{layer}.layer"
            parts = ["SelfAttention", "EncDecAttention"] if stack == "decoder" else ["SelfAttention"]
            for number, part in enumerate(parts):
                for matrix in ("q", "k", "v"):
                    yield from linear(f"{block}.{number}.{part}.{matrix}", inner, hidden)
                yield from linear(f"{block}.{number}.{part}.o", hidden, inner)
                if layer == 0 and number == 0:
                    buckets = fields.count("relative_attention_num_buckets")
                    yield Tensor(f"{block}.0.{part}.relative_attention_bias.weight", (buckets, num_heads))
                yield from norm(f"{block}.{number}.layer_norm", hidden)
            last = f"{block}.{len(parts)}"
            for matrix in ("wi_0", "wi_1") if is_gated else ("wi",):
                yield from linear(f"{last}.DenseReluDense.{matrix}", between, hidden)
            yield from linear(f"{last}.DenseReluDense.wo", hidden, between)
            yield from norm(f"{last}.layer_norm", hidden)
        yield from norm(f"{stack}.final_layer_norm", hidden)
