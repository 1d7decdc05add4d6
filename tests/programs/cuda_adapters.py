"""Trains adapters beside quantized weights that have the shapes of a LLaMA of 8 billion parameters.

    cuda_adapters.py OUT STEPS [--pause-s S] [--width N] [--layers N] [--device D]

The weights are random bytes that do not change: 7 GB in int8, and the embedding of 1 GB in bf16. Each layer makes
bf16 weights of them when it needs them, forward and backward, as QLoRA does. The adapters have rank 16, and are
trained in fp32 with AdamW. No framework helps the program to save anything. It writes a line for each step, and
pauses after each step until there is a file OUT.fast. The last line has the digests of the adapters with their
moments, and of the weights.
"""

import argparse
import os
import time
from collections.abc import Iterable

import torch
import xxhash
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_NUM_HEADS, _NUM_SHARED, _RANK, _NUM_TOKENS = 32, 8, 16, 256


class Adapted(nn.Module):
    """A quantized linear layer with an adapter."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        weight = torch.randint(-128, 128, (num_out, num_in), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a = nn.Parameter(torch.randn(_RANK, num_in) / num_in**0.5)
        self.b = nn.Parameter(torch.zeros(num_out, _RANK))
        self.scale = 1 / (74 * num_in**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapter = x @ self.a.T.to(x.dtype) @ self.b.T.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype) * self.scale) + adapter


class Layer(nn.Module):
    """Attention with shared keys and values, and a gated block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shared, inner = width * _NUM_SHARED // _NUM_HEADS, width * 7 // 2
        self.q, self.k, self.v = Adapted(width, width), Adapted(width, shared), Adapted(width, shared)
        self.o = Adapted(width, width)
        self.gate, self.up, self.down = Adapted(width, inner), Adapted(width, inner), Adapted(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.rms_norm(x, x.shape[-1:])
        q, k, v = (self._heads(one(y)) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(_NUM_HEADS // _NUM_SHARED, dim=0) for one in (k, v))
        x = x + self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
        y = functional.rms_norm(x, x.shape[-1:])
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(_NUM_TOKENS, -1, self.q.weight.shape[0] // _NUM_HEADS).transpose(0, 1)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of all bytes."""
    found = xxhash.xxh3_128()
    for one in tensors:
        found.update(one.detach().flatten().contiguous().view(torch.uint8).cpu().numpy())
    return found.hexdigest()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_default_device(options.device)
    layers = nn.ModuleList(Layer(options.width) for _ in range(options.layers))
    embedding = torch.randn(options.width * 501 // 16, options.width, dtype=torch.bfloat16)
    adapters = [one for one in layers.parameters() if one.requires_grad]
    frozen = [*(one for one in layers.parameters() if not one.requires_grad), embedding]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    with (
        open(options.out, "a", buffering=1) as file,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        for step in range(options.steps):
            tokens = torch.randint(0, len(embedding), (_NUM_TOKENS + 1,))
            x = embedding[tokens[:-1]].requires_grad_()
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
            logits = functional.rms_norm(x, x.shape[-1:]) @ embedding.T / options.width**0.5
            loss = functional.cross_entropy(logits.float(), tokens[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            file.write(f"{step} {loss.item():.17g}\n")
            if not os.path.exists(f"{options.out}.fast"):
                time.sleep(options.pause_s)
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        file.write(f"end {digest([*adapters, *moments])} {digest(frozen)}\n")


if __name__ == "__main__":
    main()
