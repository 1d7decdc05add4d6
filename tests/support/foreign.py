"""Checkpoints of a plain Trainer, which the tiny script writes without Safepoint."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.format.digest import digest_file
from tests.support.deepspeed import deepspeed_variables
from tests.support.jobs import environment, tiny


def write_tensors(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> None:
    """A safetensors file with any header, and any length of it."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def write_foreign(output: Path, step: int) -> Path:
    """What a Trainer on one rank writes, as far as it is looked at, without a training."""
    made = output / f"checkpoint-{step}"
    made.mkdir(parents=True)
    write_tensors(made / "model.safetensors", {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
    torch.save({"state": {0: {"step": torch.tensor(float(step))}}}, made / "optimizer.pt")
    torch.save({"last_epoch": step}, made / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, made / "rng_state.pth")
    state = {
        "global_step": step,
        "epoch": 0.5,
        "train_batch_size": 2,
        "log_history": [{"step": step, "eval_loss": 1.5}],
    }
    (made / "trainer_state.json").write_text(json.dumps(state))
    return made


_ABORTED = "terminate called without an active exception"
"""What a rank of torchrun says when a thread of torch is still there at its end, which happens on a busy machine."""

LAYOUTS = ("single", "lora", "ddp", "fsdp", "fsdp-full", "zero3")


def arguments_of(layout: str) -> tuple[str, ...]:
    """The arguments with which the tiny script trains in this layout."""
    if layout in {"single", "ddp"}:
        return ()
    return ("--lora",) if layout == "lora" else ("--strategy", layout)


def ranks_of(layout: str) -> int:
    return 1 if layout in {"single", "lora"} else 2


def variables_of(layout: str) -> dict[str, str]:
    return deepspeed_variables() if layout.startswith("zero") else {}


def train_plain(output: Path, layout: str, *arguments: str) -> None:
    """Train without Safepoint."""
    program = tiny(output, "--end", "end", *arguments_of(layout), *arguments)
    ranks = ranks_of(layout)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, *program]
    for _ in range(3):
        done = subprocess.run(
            command, env=environment(**variables_of(layout)), capture_output=True, text=True, check=False
        )
        if _ABORTED not in done.stderr:
            break
        shutil.rmtree(output)
    assert done.returncode == 0, done.stdout + done.stderr


def copy_checkpoints(source: Path, target: Path) -> Path:
    """Copy the checkpoints of an output folder into a new one."""
    for path in source.glob("checkpoint-*"):
        shutil.copytree(path, target / path.name)
    return target


def contents(folder: Path) -> dict[str, Any]:
    """Path → digest and time of everything in the folders of checkpoints that have no manifest."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("checkpoint-*/**/*")):
        has_manifest = (folder / path.relative_to(folder).parts[0] / "safepoint-manifest.json").exists()
        if path.is_file() and not has_manifest:
            found[str(path.relative_to(folder))] = (digest_file(path).digest, path.stat().st_mtime_ns)
    return found


__all__ = [
    "LAYOUTS",
    "arguments_of",
    "contents",
    "copy_checkpoints",
    "ranks_of",
    "train_plain",
    "variables_of",
    "write_foreign",
    "write_tensors",
]
