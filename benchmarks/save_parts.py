"""Measures where the training thread spends its time in a save, by timing functions of Safepoint and the Trainer.

A part's own time is its time less that of the parts inside it, so that the own times add up to the whole. Calls on
other threads are not looked at.
"""

import atexit
import functools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHOLE = "the rest of the boundary's save"


class Parts:
    """Collects calls: a list of (saves before it, clock seconds, processor seconds) for each part."""

    def __init__(self) -> None:
        self.own: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
        self.num_saves = 0
        self._thread = threading.get_ident()
        self._inner: list[list[float]] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            inner = [0.0, 0.0]
            self._inner.append(inner)
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                taken_s, taken_cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
                self._inner.pop()
                self.own[part].append((self.num_saves, taken_s - inner[0], taken_cpu_s - inner[1]))
                self.num_saves += part == WHOLE
                if self._inner:
                    self._inner[-1][0] += taken_s
                    self._inner[-1][1] += taken_cpu_s

        setattr(owner, name, timed)


def watch(target: Path) -> None:
    """Time everything that a save calls, and write `target` when the process ends; does nothing without Safepoint."""
    import sys

    if "safepoint.training.integrations.transformers.run" not in sys.modules:
        return
    import transformers

    from safepoint.snapshot.images import capture, function_patch, torch_image
    from safepoint.snapshot.keeper_client import arena, snapshotter
    from safepoint.snapshot.staging import stager
    from safepoint.training.engine import scratch, snapshots
    from safepoint.training.integrations.transformers import run, trainer_loop
    from safepoint.training.integrations.transformers.resume import trainer_state

    parts = Parts()
    for owner, name, part in (
        (run.TrainerRun, "_save_checkpoint", WHOLE),
        (snapshots.Snapshots, "take", "the snapshot's own book-keeping"),
        (snapshots.Snapshots, "_agree", "agreement of the ranks"),
        (scratch.Scratch, "images", "scratch folder made and removed"),
        (snapshots.Snapshots, "_facts", "facts for the manifest"),
        (function_patch.FunctionPatch, "find", "looking for names of save functions"),
        (capture.Capture, "collect", "small files read back"),
        (transformers.Trainer, "_save_checkpoint", "the Trainer's save: the rest"),
        (trainer_loop.TrainerLoop, "_finish_trainer_state", "trainer_state.json again"),
        (trainer_state.RankState, "write", "the rank's own state"),
        (transformers.Trainer, "save_model", "the Trainer's save_model"),
        (transformers.PreTrainedModel, "save_pretrained", "save_pretrained"),
        (transformers.PretrainedConfig, "save_pretrained", "config.json"),
        (transformers.GenerationConfig, "save_pretrained", "generation_config.json"),
        (transformers.Trainer, "_save_optimizer_and_scheduler", "optimizer and scheduler, state_dict"),
        (transformers.Trainer, "_save_rng_state", "random number states"),
        (transformers.TrainerState, "save_to_json", "trainer_state.json"),
        (torch_image.TorchImages, "compose", "images of torch.save"),
        (capture, "compose_safetensors", "image of the weights"),
        (snapshotter.Snapshotter, "take", "the snapshotter's own"),
        (arena.Arena, "take", "blocks"),
        (arena.Arena, "could_take", "blocks"),
        (stager.Stager, "stage", "staging at the boundary"),
        (stager.Stager, "wait", "waiting for the last snapshot's copy"),
        (stager.Stager, "before_step", "guard before the next optimizer.step"),
    ):
        parts.wrap(owner, name, part)

    def write() -> None:
        target.write_text(json.dumps({"own": parts.own, "num_saves": parts.num_saves}))

    atexit.register(write)
