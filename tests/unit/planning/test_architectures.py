"""The tensors of each family are those of Transformers' own model, which is built on torch's meta device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from safepoint.errors import UsageError
from safepoint.planning.architectures.families import FAMILIES, tensors_of
from safepoint.planning.checkpoint_files import weights_file_bytes
from safepoint.planning.model import of_config, read_model

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
_WITHOUT_SHARED = {
    **{name: value for name, value in _SMALL.items() if name != "num_key_value_heads"},
    "head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 48,
}
_OF_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
_FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", _SMALL),
    ("Llama", {**_SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("Mistral", {name: value for name, value in _SMALL.items() if name != "num_key_value_heads"} | {"head_dim": 8}),
    ("Ministral3", {**_SMALL, "head_dim": 24}),
    *((name, _WITHOUT_SHARED) for name in ("Llama", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Qwen3Moe")),
    ("Phi3", {**_WITHOUT_SHARED, "pad_token_id": 0}),
    ("Granite", {**_SMALL, "attention_bias": True, "pad_token_id": 0}),
    ("SmolLM3", {**_SMALL, "pad_token_id": 0}),
    ("Qwen2", _SMALL),
    ("Qwen2", {**_SMALL, "tie_word_embeddings": True}),
    ("Qwen3", {**_SMALL, "head_dim": 32}),
    ("Gemma", {**_SMALL, "head_dim": 32}),
    ("Gemma2", {**_SMALL, "head_dim": 32}),
    ("Gemma3", {**_SMALL, "head_dim": 32}),
    ("Phi3", {**_SMALL, "pad_token_id": 0}),
    ("Mixtral", {**_SMALL, "num_local_experts": 4}),
    ("Qwen3Moe", {**_SMALL, **_EXPERTS}),
    ("Qwen3Moe", {**_SMALL, **_EXPERTS, "mlp_only_layers": [0]}),
    ("Qwen3Moe", {**_SMALL, **_EXPERTS, "decoder_sparse_step": 2}),
    ("DeepseekV3", {**_SMALL, **_DEEPSEEK}),
    ("DeepseekV3", {**_SMALL, **_DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2, "attention_bias": True}),
    ("GPT2", _OF_GPT2),
    ("GPT2", {**_OF_GPT2, "n_inner": 80, "tie_word_embeddings": False}),
    ("GPTNeoX", _SMALL),
    ("GPTNeoX", {**_SMALL, "attention_bias": False, "tie_word_embeddings": True}),
    ("OPT", {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32}),
    ("OPT", {**_SMALL, "ffn_dim": 96, "enable_bias": False, "do_layer_norm_before": False}),
    ("Falcon", _FALCON),
    ("Falcon", {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("Bert", _SMALL),
    ("T5", _T5),
    ("T5", {**_T5, "num_decoder_layers": 1, "feed_forward_proj": "gated-gelu"}),
]
_CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Bert": ("BertConfig", "BertForMaskedLM"),
    "T5": ("T5Config", "T5ForConditionalGeneration"),
}


def _build(name: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """The configuration and the model, without memory for weights."""
    config_name, model_name = _CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    config = getattr(transformers, config_name)(**fields)
    with torch.device("meta"):
        return config, getattr(transformers, model_name)(config)


@pytest.mark.parametrize(("name", "fields"), _CASES)
def test_every_tensor_of_a_family(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """From the file that Transformers itself writes, which leaves fields out that have their default."""
    config, model = _build(name, fields)
    config.save_pretrained(tmp_path)
    found = tensors_of(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert found.family == config.model_type
    ours = {one.name: one.sizes for one in found.tensors if not one.is_buffer}
    theirs = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert ours == theirs
    others = {key: tuple(value.shape) for key, value in model.state_dict().items() if key not in theirs}
    buffers = {one.name: one.sizes for one in found.tensors if one.is_buffer}
    assert buffers == {key: sizes for key, sizes in others.items() if key in dict(model.named_buffers())}
    tied = {one.name: one.sizes for one in found.tied}
    assert tied == {key: sizes for key, sizes in others.items() if key not in buffers}


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Qwen3Moe"])
def test_keys_and_values_have_the_heads_that_transformers_assumes(name: str) -> None:
    """In a file without num_key_value_heads."""
    fields = {**_WITHOUT_SHARED, "num_attention_heads": 64}  # each family's number divides it
    config, model = _build(name, fields)
    found = tensors_of({**fields, "model_type": config.model_type}, "config.json")
    theirs = {key: tuple(value.shape) for key, value in model.named_parameters() if ".k_proj." in key}
    assert theirs == {one.name: one.sizes for one in found.tensors if ".k_proj." in one.name}


def test_every_family_has_a_case() -> None:
    kinds = {_build(name, fields)[0].model_type for name, fields in _CASES}
    assert kinds == FAMILIES.keys()


def test_the_defaults_of_a_family_are_those_of_transformers() -> None:
    """Fields that a small model sets in the cases above, and that a real config.json leaves out."""
    for kind, family in FAMILIES.items():
        theirs = transformers.CONFIG_MAPPING[kind]()
        for name, value in family.defaults.items():
            assert getattr(theirs, name) == value, (kind, name)


@pytest.mark.parametrize(("name", "fields"), [case for case in _CASES if case[0] in {"Qwen2", "Mixtral", "Gemma2"}])
def test_weights_file_is_what_save_pretrained_writes(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Byte for byte where experts are not written one by one, whose names are longer than ours."""
    config_name, model_name = _CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**fields))
    model.save_pretrained(tmp_path)
    real = (tmp_path / "model.safetensors").stat().st_size
    for path in (tmp_path / "config.json", tmp_path):
        shape = read_model(path)
        assert shape.dtype == "float32"
        assert shape.num_parameters == sum(one.numel() for one in model.parameters())
        ours = weights_file_bytes(shape.tensors, "float32")
        assert ours == (real if name != "Mixtral" or path == tmp_path else pytest.approx(real, rel=0.02))


def test_a_classifier_has_its_labels(tmp_path: Path) -> None:
    config = transformers.BertConfig(**_SMALL, num_labels=5, architectures=["BertForSequenceClassification"])
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    config.save_pretrained(tmp_path)
    found = tensors_of(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert {one.name: one.sizes for one in found.tensors} == {k: tuple(v.shape) for k, v in model.named_parameters()}


# ---- mistakes ------------------------------------------------------------------------------------------------------

_LLAMA = {"model_type": "llama", **_SMALL}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -4}, "hidden_size = -4"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": 64.0}, "hidden_size = 64.0"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"hidden_size": 1 << 60}, "hidden_size"),
        ({"hidden_size": None}, "no field 'hidden_size'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
        ({"model_type": "no-such"}, "model_type = 'no-such'"),
        ({"model_type": None}, "model_type = None"),
        ({"model_type": ["llama"]}, "model_type = ['llama']"),
        ({"model_type": "x" * 10_000}, "model_type = 'xxx"),
    ],
)
def test_an_invalid_config_is_a_message(changes: dict[str, Any], message: str) -> None:
    """It names the file, the field and the value, and what to do."""
    with pytest.raises(UsageError) as raised:
        of_config({**_LLAMA, **changes}, name="m", where="config.json")
    assert message in str(raised.value)
    assert "config.json has" in str(raised.value)
    assert raised.value.hint
    assert len(str(raised.value)) < 400
