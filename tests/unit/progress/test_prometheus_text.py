"""Progress as Prometheus reads it."""

import math
import re
from dataclasses import replace
from datetime import datetime

from safepoint.progress.prometheus_text import render
from safepoint.progress.record import Progress, State
from tests.unit.progress.test_record import FULL, TIME

NOW_S = datetime.fromisoformat(TIME).timestamp() + 60
_LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')


def parse(text: str) -> dict[str, float]:
    """Every sample of the text format, by name and labels; each family is declared before it, once."""
    samples: dict[str, float] = {}
    declared: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in declared
            declared[name] = kind
        elif not line.startswith("# HELP "):
            match = _LINE.fullmatch(line)
            assert match is not None, line
            assert match[1] in declared, line
            assert declared[match[1]] in {"gauge", "counter"}
            assert (declared[match[1]] == "counter") == match[1].endswith("_total")
            key = match[1] + (f"{{{match[2]}}}" if match[2] else "")
            assert key not in samples
            samples[key] = float(match[3])
    return samples


def test_every_figure_is_a_sample() -> None:
    """In base units."""
    samples = parse(render(FULL, now_s=NOW_S))
    assert samples["safepoint_step"] == 120
    assert samples["safepoint_progress_ratio"] == 0.24
    assert samples["safepoint_remaining_seconds"] == 285
    assert samples["safepoint_samples_per_second"] == 128
    assert samples["safepoint_safe_point_age_seconds"] == 60
    assert samples["safepoint_saves_total"] == 3
    assert samples["safepoint_save_needed_seconds"] == 4.5
    assert samples['safepoint_state{state="saving"}'] == 1
    assert sum(samples[f'safepoint_state{{state="{state}"}}'] for state in State) == 1
    assert samples['safepoint_train_metric{name="loss"}'] == 0.5
    assert samples['safepoint_eval_metric{name="eval_loss"}'] == 0.75
    folder = '{place="output folder",path="/out"}'
    assert samples[f"safepoint_space_free_bytes{folder}"] == 10**10
    assert samples[f"safepoint_space_saves_left{folder}"] == 0
    assert samples[f"safepoint_space_remaining_seconds{folder}"] == 60
    assert samples[f"safepoint_space_low{folder}"] == 1
    assert math.isnan(samples['safepoint_train_metric{name="reward"}'])


def test_what_is_unknown_is_left_out() -> None:
    """An unknown time left is not 0."""
    samples = parse(render(Progress(time=TIME, state=State.TRAINING, step=3), now_s=NOW_S))
    assert "safepoint_remaining_seconds" not in samples
    assert "safepoint_safe_point_age_seconds" not in samples


def test_names_and_folders_cannot_break_the_text() -> None:
    """Quotes, backslashes and new lines stay inside of their label."""
    hostile = replace(FULL, output_dir='/a"b\\c\n# TYPE x gauge', train_metrics={'x"} 1\ny': 2.0})
    samples = parse(render(hostile, now_s=NOW_S))
    assert 'safepoint_train_metric{name="x\\"} 1\\ny"}' in samples
