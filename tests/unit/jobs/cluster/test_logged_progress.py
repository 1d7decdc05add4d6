"""Tests of safepoint.jobs.cluster.records.logged_progress."""

import pytest

from safepoint.jobs.cluster.records.logged_progress import progress_in
from safepoint.progress.record import State

TIME = "2026-11-23T10:00:00.123456789Z"
BEGUN = [
    "safepoint: training on 2 ranks (pids 17, 18), 4 samples per step, run e1dfbfcc, attempt 3",
    "  0%|          | 0/64 [00:00<?, ?it/s]\r  8%|▊         | 5/64 [00:05<00:59,  1.00it/s]",
    "{'loss': '4.162', 'grad_norm': 1.102, 'learning_rate': '0.009976', 'epoch': '0.1875'}",
    "safepoint: saved step 4 (periodic): /mnt/kubeflow-checkpoints/tiny/checkpoint-4, 9 files, 114 kB in 0.04 s",
    "Writing model shards: 100%|██████████| 1/1 [00:00<00:00, 1726.76it/s]",
    "{'not': 'metrics'}",
    "{'loss': " + "[" * 1000 + "}",
]


def test_the_output_of_the_first_pod() -> None:
    found = progress_in(f"{TIME} {line}" for line in BEGUN)
    assert found is not None
    assert (found.step, found.max_steps, found.loss, found.epoch) == (5, 64, 4.162, 0.1875)
    assert (found.safe_step, found.attempt, found.state) == (4, 3, State.TRAINING)
    assert found.time == TIME
    assert set(found.train_metrics) == {"grad_norm", "learning_rate"}


def test_the_end() -> None:
    found = progress_in(f"{TIME} {line}" for line in [*BEGUN, "safepoint: training finished at step 64"])
    assert found is not None
    assert (found.step, found.max_steps, found.state) == (64, 64, State.FINISHED)


@pytest.mark.parametrize("lines", [[], ["hello"], [f"{TIME} {BEGUN[0]}"], [f"{TIME} {BEGUN[2]}"]])
def test_without_a_step_there_is_no_progress(lines: list[str]) -> None:
    assert progress_in(lines) is None
