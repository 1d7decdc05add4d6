"""Settings: the options of a run, carried through the environment."""

import dataclasses

import pytest

from safepoint.errors import UsageError
from safepoint.settings.run_settings import RunSettings, variable

CHANGED = RunSettings(
    output_dir="out",
    save_strategy="steps",
    save_steps=5,
    save_total_limit=2,
    local_dir="near",
    keep="newest=2",
    store_keep="newest=4,every=1000",
    extra_files_limit="1Gi",
    on_upload_failure="stop",
    verify_access=False,
    freeze_as_last_resort=True,
    grace_s=12.5,
    resume="never",
    from_scratch=True,
    allow_batch_change=True,
    peer_timeout_s=7.0,
    snapshot_steps="auto",
    snapshot_slots=2,
    snapshot_memory="8Gi",
    metrics_port=28080,
    metrics_host="0.0.0.0",
    termination_log="/t",
    preload=False,
    verbosity=1,
    wording="sdk",
    record_folder="/x",
    launcher_pid=12,
    keeper="safepoint-1",
    has_begun=True,
    first_start="0123abcd",
    job_dir="/j",
)

BY_TIME = RunSettings(save_every="1h30m")


@pytest.mark.parametrize("settings", [RunSettings(), CHANGED, BY_TIME])
def test_the_environment_carries_every_setting(settings: RunSettings) -> None:
    """Written to SAFEPOINT_* and read back, the settings are equal."""
    assert RunSettings.from_environment(settings.to_environment()) == settings


def test_every_setting_was_changed_above() -> None:
    """A new setting must be added to the round trip."""
    for field in dataclasses.fields(RunSettings):
        changed = BY_TIME if field.name == "save_every" else CHANGED
        assert getattr(changed, field.name) != getattr(RunSettings(), field.name), field.name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("save_steps", "0"),
        ("save_steps", "many"),
        ("save_strategy", "sometimes"),
        ("save_total_limit", "0"),
        ("grace_s", "0"),
        ("grace_s", "soon"),
        ("grace_s", "nan"),
        ("from_scratch", "maybe"),
        ("keep", "newest=0"),
        ("store_keep", "sometimes"),
        ("snapshot_steps", "0"),
        ("snapshot_steps", "often"),
        ("snapshot_slots", "-1"),
        ("snapshot_slots", "many"),
        ("metrics_port", "-1"),
        ("metrics_port", "65536"),
        ("metrics_port", "http"),
        ("snapshot_memory", "8 boxes"),
        ("snapshot_memory", "-1"),
        ("save_every", "10"),
        ("save_every", "0s"),
        ("save_every", "often"),
    ],
)
def test_what_cannot_be_meant_is_named(name: str, text: str) -> None:
    """The message names the setting and the value."""
    with pytest.raises(UsageError) as error:
        RunSettings.from_environment({variable(name): text})
    assert text in str(error.value)
    assert name.removesuffix("_s").replace("_", "-").upper() in str(error.value).replace("_", "-").upper()


@pytest.mark.parametrize(
    "options",
    [
        {"save_strategy": "epoch", "save_steps": 5},
        {"from_scratch": True, "resume": "checkpoint-4"},
        {"save_every": "10m", "save_steps": 5},
        {"save_every": "auto", "save_strategy": "epoch"},
    ],
)
def test_contradictions_are_refused(options: dict[str, object]) -> None:
    """Of two options that exclude each other none is silently ignored."""
    with pytest.raises(UsageError, match="contradicts"):
        RunSettings(**options)  # pyright: ignore
