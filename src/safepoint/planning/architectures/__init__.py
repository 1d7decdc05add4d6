"""The tensors of the model families of Transformers, computed from the fields of a model's `config.json`.

fields      reads the fields with checks
layers      linear layers and norms
like_llama  decoders like Llama, with and without experts, and DeepSeek-V3
others      other decoders, and models with an encoder
families    the families by their `model_type`
headers     the tensors that a model's safetensors files have

Promises: names and shapes equal the names and shapes of `model.named_parameters()` in Transformers 5. A tied weight
exists once. The tests compare each family with Transformers' own model. Not covered: models with code of their own
(`trust_remote_code`), and adapters or quantized layers, which `config.json` does not describe.
"""
