"""Trainings on a CUDA device, interrupted in every way: the result equals the uninterrupted one, bit for bit."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.ranks.test_preload import was_copied
from tests.ranks.test_strategies import assert_same_state
from tests.support.deepspeed import deepspeed_variables
from tests.support.equality import finals, same
from tests.support.jobs import Job, no_orphans, read_events, safepoint, tiny
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(500)

_SAVES = ("--save-strategy", "steps", "--save-steps", "4")
_DEVICE = {"CUDA_VISIBLE_DEVICES": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_LIGHTNING = Path(__file__).parent.parent / "programs" / "lightning_loop.py"


def _settings(**settings: Any) -> tuple[str, str]:
    return "--settings", json.dumps(settings)


_KINDS = {
    "fp32": (),
    "bf16": _settings(bf16=True),
    "fp16": _settings(fp16=True),
    "recomputed": _settings(bf16=True, gradient_checkpointing=True),
    "compiled": _settings(torch_compile=True),
    "fused": _settings(optim="adamw_torch_fused", bf16=True),
    "workers": ("--workers", "2", *_settings(dataloader_pin_memory=True, bf16=True)),
    "lora": ("--lora", *_settings(bf16=True)),
    "fsdp": ("--strategy", "fsdp"),
    "fsdp-full": ("--strategy", "fsdp-full"),
    "zero1": ("--strategy", "zero1"),
    "zero2": ("--strategy", "zero2", *_settings(bf16=True)),
    "zero3": ("--strategy", "zero3", *_settings(bf16=True)),
}


def _start(output: Path, kind: str, *arguments: str, options: tuple[str, ...] = ()) -> Job:
    env = _DEVICE | (deepspeed_variables() if kind.startswith("zero") else {})
    return safepoint(output, *options, program=tiny(output, "--end", "end", *_KINDS[kind], *arguments), **env)


def _end(job: Job, code: int = 0) -> None:
    with no_orphans(job):
        assert job.wait(200) == code, job.text


@pytest.mark.parametrize("kind", _KINDS)
def test_interrupted_is_uninterrupted(kind: str, tmp_path: Path) -> None:
    """By a signal, by the death of the rank (which goes on from memory), and by the death of everything."""
    if kind.startswith("zero") and not Path(sys.prefix, "deepspeed").is_dir():
        pytest.skip("DeepSpeed is not installed: run `make venv`")
    reference = tmp_path / "reference"
    _end(_start(reference, kind))

    output = tmp_path / "signal"
    job = _start(output, kind, "--step-ms", "100")
    with no_orphans(job):
        job.wait_for_mark("train 6")
        job.signal()
        assert job.wait() == 75, job.text
    (interrupted,) = job.events("interrupted")
    assert interrupted["saved"]
    _end(job := _start(output, kind))
    assert [event["step"] for event in job.events("resumed")] == [interrupted["step"]]
    _assert_as(reference, output)

    output = tmp_path / "rank-killed"
    _end(job := _start(output, kind, *_SAVES, "--crash-step", "6", "--step-ms", "100"))
    assert len(job.events("attempt_started")) == 2
    assert (job.events("resumed") + job.events("resumed_from_memory"))[-1]["step"] >= 4
    _assert_as(reference, output)

    output = tmp_path / "everything-killed"
    job = _start(output, kind, *_SAVES, "--step-ms", "100")
    with no_orphans(job):
        job.wait_for_event("saved", step=4)
        job.signal(signal.SIGKILL)
        job.kill_everything()
    _end(job := _start(output, kind, *_SAVES))
    assert job.events("resumed")[-1]["step"] >= 4
    _assert_as(reference, output)


@pytest.mark.parametrize("kind", ["fp32", "compiled", "workers"])
def test_a_killed_rank_is_replaced_by_a_copy(kind: str, tmp_path: Path) -> None:
    """The template has opened no GPU, and its copies train on one; the result is that of new processes."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    _end(_start(reference, kind))
    _end(job := _start(output, kind, *_SAVES, "--crash-step", "6", "--step-ms", "100", options=("--preload",)))
    starts = job.events("start_timed")
    assert [event["restart"] for event in starts] == [0, 1]
    assert all(was_copied(event) for event in starts), job.text
    assert "import everything by themselves" not in job.text
    _assert_as(reference, output)


def _assert_as(reference: Path, output: Path) -> None:
    for checkpoint in list_checkpoints(output):
        verdict = verify(checkpoint)
        assert verdict.is_valid, verdict.faults
    assert not read_events(output, "save_failed")
    assert_same_state(output, reference)


def test_two_ranks_on_one_device(tmp_path: Path) -> None:
    """Two nodes of one rank each, over gloo, since NCCL refuses to share a device: one agreed save, one result."""

    def start(output: Path, *arguments: str) -> list[Job]:
        port = str(free_port())
        program = tiny(output, "--end", "end", *_settings(ddp_backend="gloo"), *arguments)
        place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
        return [
            safepoint(
                output,
                *(*place, "--node-rank", str(rank)),
                program=program,
                log=output.parent / f"{output.name}-{rank}.log",
                **_DEVICE,
            )
            for rank in (0, 1)
        ]

    def end(jobs: list[Job], code: int) -> None:
        with no_orphans(*jobs):
            assert [job.wait(200) for job in jobs] == [code, code], jobs[0].text + jobs[1].text

    reference, output = tmp_path / "reference", tmp_path / "run"
    end(start(reference), 0)
    jobs = start(output, "--step-ms", "100")
    jobs[0].wait_for_mark("train 6")
    jobs[1].signal()
    end(jobs, 75)
    (interrupted,) = jobs[0].events("interrupted")
    end(start(output), 0)
    assert {event["step"] for event in jobs[0].events("resumed")} == {interrupted["step"]}
    _assert_as(reference, output)


def test_lightning_is_interrupted(tmp_path: Path) -> None:
    """A Lightning Trainer with dropout on the device."""

    def start(output: Path, *arguments: str) -> Job:
        program = [str(_LIGHTNING), "--out", str(output), *arguments]
        return safepoint(output, program=program, **_DEVICE)

    reference, output = tmp_path / "reference", tmp_path / "run"
    _end(start(reference, "--step-ms", "0"))
    job = start(output, "--step-ms", "100")
    with no_orphans(job):
        job.wait_for_mark("train 4")
        job.signal()
        assert job.wait() == 75, job.text
    _end(start(output, "--step-ms", "0"))
    assert same(finals(output, 1), finals(reference, 1))
    assert read_events(output, "resumed")
