"""A run's progress as Prometheus reads it: the text format 0.0.4."""

import math
from collections.abc import Iterator, Mapping, Sequence

from safepoint.foundation import clock
from safepoint.progress.record import Progress, SpaceRecord, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Value = float | int | None


def render(progress: Progress, *, now_s: float) -> str:
    """The metrics; unknown values are left out.

    Args:
        progress: the record of the first rank.
        now_s: the current time, in seconds since 1970; ages are relative to it.
    """
    saves = progress.saves
    safe_s, written_s = _seconds(progress.safe_time), _seconds(progress.time)
    samples: list[tuple[str, str, str, _Value]] = [
        ("step", "gauge", "Optimizer steps done, over all attempts.", progress.step),
        ("steps", "gauge", "Optimizer steps in all.", progress.max_steps or None),
        ("epoch", "gauge", "Epochs done, including the fraction of the current epoch.", progress.epoch),
        ("epochs", "gauge", "Epochs in all.", progress.num_epochs or None),
        (
            "progress_ratio",
            "gauge",
            "Part of the training that is done, from 0 to 1; 1 only when finished.",
            _ratio(progress.percent),
        ),
        ("remaining_seconds", "gauge", "Time left, at the pace of this attempt.", progress.remaining_s),
        ("step_seconds", "gauge", "Duration of a step, without evaluations and saves.", progress.step_s),
        ("samples_per_second", "gauge", "Samples per second, of all ranks together.", progress.samples_per_s),
        ("world_size", "gauge", "Number of ranks.", progress.world_size),
        ("attempt", "gauge", "Which start of the run this is, from 1.", progress.attempt or None),
        ("restarts", "gauge", "How often the ranks of this attempt were restarted.", progress.restart),
        ("safe_point_step", "gauge", "Step of the newest durable checkpoint.", progress.safe_step),
        (
            "safe_point_timestamp_seconds",
            "gauge",
            "When training reached the step of the newest durable checkpoint.",
            safe_s,
        ),
        (
            "safe_point_age_seconds",
            "gauge",
            "Age of the state in the newest durable checkpoint.",
            None if safe_s is None else max(0.0, now_s - safe_s),
        ),
        ("snapshot_step", "gauge", "Step of the newest snapshot in memory.", progress.snapshot_step),
        ("saves_total", "counter", "Checkpoints that became durable since the ranks started.", saves.count),
        ("saves_unsaved_total", "counter", "Failed and superseded saves since the ranks started.", saves.unsaved),
        ("save_stall_seconds", "gauge", "How long training waited for the last save.", saves.last_stall_s),
        (
            "save_durable_seconds",
            "gauge",
            "Time from the end of the step until the last save was durable.",
            saves.last_durable_s,
        ),
        ("save_bytes", "gauge", "Size of the last checkpoint.", saves.last_bytes),
        ("save_needed_seconds", "gauge", "About how long a save on demand takes.", progress.save_needed_s),
        ("grace_seconds", "gauge", "Time that the platform grants between SIGTERM and SIGKILL.", progress.grace_s),
        ("updated_timestamp_seconds", "gauge", "When this record was written.", written_s),
    ]
    lines: list[str] = []
    for name, kind, text, value in samples:
        if value is not None:
            lines += [*_head(name, kind, text), f"safepoint_{name} {_number(value)}"]
    lines += _head("state", "gauge", "1 for the current state of the training, 0 for the other states.")
    lines += [f'safepoint_state{{state="{state}"}} {int(state is progress.state)}' for state in State]
    lines += _metrics("train_metric", "Metrics of the training.", {"loss": progress.loss, **progress.train_metrics})
    lines += _metrics("eval_metric", "Metrics of evaluations.", progress.eval_metrics)
    lines += _space(progress.space)
    labels = f'run_id="{_label(progress.run_id)}",output_dir="{_label(progress.output_dir)}"'
    lines += [*_head("run_info", "gauge", "The run: id and output folder."), f"safepoint_run_info{{{labels}}} 1"]
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP safepoint_{name} {text}", f"# TYPE safepoint_{name} {kind}"]


def _metrics(family: str, text: str, metrics: Mapping[str, float | None]) -> Iterator[str]:
    if metrics:
        yield from _head(family, "gauge", text)
    for name, value in metrics.items():
        yield f'safepoint_{family}{{name="{_label(name)}"}} {_number(math.nan if value is None else value)}'


def _space(places: Sequence[SpaceRecord]) -> Iterator[str]:
    families: list[tuple[str, str, list[_Value]]] = [
        ("space_free_bytes", "Bytes that may still be written to a folder.", [one.free_bytes for one in places]),
        ("space_size_bytes", "Bytes that a folder can hold.", [one.size_bytes for one in places]),
        ("space_needed_bytes", "Bytes that have to be free for the next save.", [one.needed_bytes for one in places]),
        ("space_free_inodes", "Files that may still be created in a folder.", [one.free_inodes for one in places]),
        ("space_saves_left", "Saves that still fit into a folder.", [one.saves_left for one in places]),
        ("space_remaining_seconds", "Time until a save does not fit.", [one.remaining_s for one in places]),
        (
            "space_low",
            "1 if the launcher has warned that a folder is nearly full.",
            [int(one.is_low) for one in places],
        ),
    ]
    for family, text, values in families:
        samples = [(one, value) for one, value in zip(places, values, strict=True) if value is not None]
        if samples:
            yield from _head(family, "gauge", text)
        for one, value in samples:
            labels = f'place="{_label(one.place)}",path="{_label(one.path)}"'
            yield f"safepoint_{family}{{{labels}}} {_number(value)}"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(value)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else round(percent / 100, 3)


def _seconds(time: str | None) -> float | None:
    try:
        return clock.parse_utc(time) if time else None
    except ValueError:
        return None
