"""Checks what a checkpoint of adapters holds."""

from pathlib import Path

from safetensors.torch import load_file

from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.weights.dcp_weights import dcp_weights
from safepoint.checkpoint.weights.torch_file import read_torch_file


def assert_without_base(checkpoint: Path) -> dict[str, str]:
    """The checkpoint is valid, has adapters, and has no weight of the base model, which is many times larger.

    Returns:
        What it says of that model.
    """
    verdict = verify(checkpoint)
    assert verdict.is_valid, verdict.faults
    manifest = verdict.manifest
    assert manifest is not None
    assert manifest.base is not None
    assert manifest.base["digest"].startswith("xxh3-128:")
    names: set[str] = set()
    for path in (checkpoint / entry.path for entry in manifest.files):
        if path.suffix == ".safetensors":
            names |= load_file(path).keys()
        elif path.name == ".metadata" and "model" in path.parent.name:
            names |= {weight.shape.name for weight in dcp_weights(path.parent)}
        elif path.name.endswith("model_states.pt"):
            names |= read_torch_file(path)["module"].keys()
    assert names
    assert all("lora_" in name for name in names), names
    return dict(manifest.base)


__all__ = ["assert_without_base"]
