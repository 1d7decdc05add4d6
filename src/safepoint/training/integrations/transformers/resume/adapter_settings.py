"""Settings that scale an adapter's output: PEFT takes them from the script, and no weight shows a difference."""

import json
from pathlib import Path
from typing import Any, cast

from safepoint.errors import ConflictError

_SCALING = ("peft_type", "lora_alpha", "alpha", "alpha_pattern", "use_rslora", "use_dora")


def check_adapter_settings(model: Any, folder: Path, *, step: int) -> None:
    """Compare the settings in a checkpoint with the script's; a setting that only one of them has is ignored.

    Args:
        model: that is trained, not yet wrapped for training.
        folder: the checkpoint.
        step: of the checkpoint.

    Raises:
        ConflictError: an adapter has another scale, or is of another kind.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return
    for name, config in cast("dict[str, Any]", configs).items():
        file = (folder if name == "default" else folder / name) / "adapter_config.json"
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        now = json.loads(json.dumps(config.to_dict(), default=str))
        for setting in _SCALING:
            before, after = saved.get(setting), now.get(setting)
            if setting in saved and setting in now and (before or after) and before != after:
                raise ConflictError(
                    f"the adapter {name} of step {step} was trained with {setting}={before}, this run has {after}; "
                    "training was not started",
                    hint="make the adapter as it was in that run, or start from the beginning with --from-scratch",
                )
