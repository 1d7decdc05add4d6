"""`safepoint plan storage` against real trainings: the bytes of a checkpoint, and the most that the folder holds.

`make test` runs two strategies, `make test-long` all of them.
"""

import contextlib
import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.planning.checkpoint_files import Training, checkpoint_bytes, files_of
from safepoint.planning.model import adapter_of, of_config
from safepoint.planning.storage import Run, peak_bytes, plan_storage
from tests.support.deepspeed import deepspeed_variables, skip_without_deepspeed
from tests.support.jobs import committed_steps, no_orphans, safepoint, tiny
from tests.support.moto_server import MotoServer
from tests.support.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

_HIDDEN, _KEEP = 256, 2
_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Of the model of `tests/programs/tiny.py`."""
_CUT = {("fsdp", "full"), ("zero2", "lora")}
_MIXED = ((Strategy.ZERO2, "lora-bf16"), (Strategy.ZERO3, "full-bf16"), (Strategy.FSDP, "full-bf16"))
_MATRIX = [
    pytest.param(strategy, kind, marks=[] if (strategy, kind) in _CUT else pytest.mark.long)
    for strategy in Strategy
    for kind in ("full", "lora", "tied")
] + [pytest.param(strategy, kind, marks=pytest.mark.long) for strategy, kind in _MIXED]


class PeakOfFolder:
    """Samples how many bytes a folder holds, on a thread, as often as it can."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.most_bytes = 0

    def __enter__(self) -> "PeakOfFolder":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.is_set():
            self.most_bytes = max(self.most_bytes, self._now())
            self._is_over.wait(0.002)  # the trainings need the processor, too

    def _now(self) -> int:
        sizes: dict[int, int] = {}  # by inode: a folder that is renamed meanwhile may be listed under both names
        folders = [str(self._folder)]
        while folders:
            # What the script writes at its end is no checkpoint.
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            folders += [entry.path] * (entry.name != "end")
                        else:
                            sizes[entry.inode()] = entry.stat(follow_symlinks=False).st_size
        return sum(sizes.values())


def _planned(strategy: Strategy, kind: str) -> Run:
    config = {**_CONFIG, "tie_word_embeddings": kind == "tied"}
    model = of_config(config, name="tiny", where="config.json")
    num_ranks = 1 if strategy is Strategy.SINGLE else 2
    training = Training(
        tensors=model.tensors,
        dtype="float32",
        adapter=adapter_of(model, rank=4, targets=["q_proj", "v_proj"]) if kind.startswith("lora") else (),
        strategy=strategy,
        optimizer=OPTIMIZERS["adamw"],
        num_ranks=num_ranks,
        tied=model.tied,
        is_mixed=kind.endswith("bf16"),
    )
    return Run(model=model, training=training, gpus=num_ranks, keep=_KEEP)


def _options_of(kind: str) -> tuple[str, ...]:
    trained = kind.removesuffix("-bf16")
    mixed = ("--settings", '{"bf16": true}') if kind.endswith("bf16") else ()
    return (*mixed, *(() if trained == "full" else (f"--{trained}",)))


@pytest.mark.parametrize(("strategy", "kind"), _MATRIX)
def test_a_checkpoint_is_as_large_as_planned(strategy: Strategy, kind: str, tmp_path: Path) -> None:
    """Its bytes within 2 %, and what the folder holds at the worst moment within 5 %."""
    skip_without_deepspeed(strategy)
    output = tmp_path / "run"
    given = () if strategy in {Strategy.SINGLE, Strategy.DDP} else ("--strategy", str(strategy))
    program = tiny(
        output,
        *(
            "--end",
            "end",
            "--hidden",
            str(_HIDDEN),
            *given,
            *_options_of(kind),
        ),
        # The epoch does not end: at its end the state of the data has no second random number state.
        *("--samples", "1024", "--max-steps", "24", "--save-strategy", "steps", "--save-steps", "4"),
        *("--save-total-limit", str(_KEEP), "--step-ms", "60"),
    )
    ranks = "1" if strategy is Strategy.SINGLE else "2"
    job = safepoint(
        output,
        *("--nproc-per-node", ranks),
        program=program,
        **(deepspeed_variables() if strategy.is_zero else {}),
    )
    with no_orphans(job), PeakOfFolder(output) as peak:
        assert job.wait(120) == 0, job.text
    assert "synchronous" not in job.text
    newest = output / f"checkpoint-{committed_steps(output)[-1]}"
    real = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    run = _planned(strategy, kind)
    plan = plan_storage(run)
    print(strategy, kind, "real", real, peak.most_bytes, "planned", plan.checkpoint_bytes, peak_bytes(plan))
    assert plan.checkpoint_bytes == checkpoint_bytes(files_of(run.training)) == pytest.approx(real, rel=0.02)
    assert peak_bytes(plan) == pytest.approx(peak.most_bytes, rel=0.05)


@pytest.mark.long
def test_each_node_holds_what_is_planned_for_its_pod(moto: MotoServer, tmp_path: Path) -> None:
    """Two nodes with a folder each, and an object store: their parts, and a resume into empty folders."""
    prefix = f"planned-{uuid.uuid4().hex}"
    folders = tmp_path / "node-0", tmp_path / "node-1"
    model = of_config(_CONFIG, name="tiny", where="config.json")
    training = Training(
        tensors=model.tensors,
        dtype="float32",
        adapter=(),
        strategy=Strategy.FSDP,
        optimizer=OPTIMIZERS["adamw"],
        num_ranks=2,
    )
    plan = plan_storage(Run(model=model, training=training, nodes=2, keep=_KEEP))
    assert plan.other_pod is not None
    for steps in (24, 48):
        port = str(free_port())
        jobs = [
            safepoint(
                folder,
                *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port),
                *("--output-dir", str(moto.location(prefix)), "--local-dir", str(folder)),
                program=tiny(
                    folder,
                    *("--end", "end", "--hidden", str(_HIDDEN), "--strategy", "fsdp", "--samples", "1024"),
                    *("--max-steps", str(steps), "--save-strategy", "steps", "--save-steps", "4"),
                    *("--save-total-limit", str(_KEEP), "--step-ms", "60"),
                ),
                **moto.variables,
            )
            for rank, folder in enumerate(folders)
        ]
        with no_orphans(*jobs), PeakOfFolder(folders[0]) as first, PeakOfFolder(folders[1]) as other:
            for job in jobs:
                assert job.wait(120) == 0, job.text
        for folder, pod, peak in zip(folders, (plan.first_pod, plan.other_pod), (first, other), strict=True):
            newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
            real = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
            print(steps, folder.name, "real", real, peak.most_bytes, "planned", pod.checkpoint_bytes, pod.terms)
            assert pod.checkpoint_bytes == pytest.approx(real, rel=0.02)
            terms = {term.name: term.ours_bytes for term in pod.terms}
            del terms["base cache"], terms["safety buffer"]
            assert (_KEEP + 1) * real <= peak.most_bytes <= sum(terms.values()) + (64 << 10)
        for folder in folders:
            shutil.rmtree(folder)
