"""What a setting accepts: every bad value is named, and every good one arrives as it was meant."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from safepoint.errors import ExitCode, UsageError
from safepoint.settings.run_settings import RunSettings, variable

NUMBERS = {
    "save_steps": ["0", "-1", "1.5", "ten", "1e3", "0x10"],
    "save_total_limit": ["0", "-2", "all"],
    "grace_s": ["0", "-1", "inf", "nan", "1m"],
    "peer_timeout_s": ["0", "inf", "-inf", "soon"],
    "verbosity": ["loud", "1.0"],
    "launcher_pid": ["me"],
    "from_scratch": ["2", "maybe"],
    "allow_batch_change": ["-1", "truth"],
    "save_strategy": ["sometimes", "STEPS"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NUMBERS.items() for text in texts])
def test_a_bad_value_is_a_usage_error_that_names_it(name: str, text: str) -> None:
    """Exit code 2, and the message holds the setting and what was given."""
    with pytest.raises(UsageError) as error:
        RunSettings.from_environment({variable(name): text})
    message = str(error.value).upper().replace("-", "_")
    assert name.removesuffix("_s").upper() in message
    assert text.upper().replace("-", "_").removesuffix(".0") in message
    assert error.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_yes_has_many_spellings(text: str) -> None:
    """Spaces and capitals do not matter for a switch."""
    assert RunSettings.from_environment({"SAFEPOINT_FROM_SCRATCH": text}).from_scratch


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF", "", "  "])
def test_no_has_many_spellings(text: str) -> None:
    """An empty variable is as good as none."""
    assert not RunSettings.from_environment({"SAFEPOINT_FROM_SCRATCH": text}).from_scratch


def is_path(text: str) -> bool:
    """Neither empty nor with a scheme, which not every name can be."""
    return bool(text.strip()) and ":/" not in text


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(is_path))
@example(" a: b//ä ")
def test_a_path_arrives_character_by_character(path: str) -> None:
    """The launcher and its ranks mean the same folder, spaces at its ends included; no control characters."""
    settings = RunSettings(output_dir=path, record_folder=path)
    assert RunSettings.from_environment(settings.to_environment()) == settings


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_seconds_arrive_exactly(seconds: float) -> None:
    """No digit is lost on the way, and the margin is a fifth of the grace but never above 3 s."""
    settings = RunSettings.from_environment(RunSettings(grace_s=seconds).to_environment())
    assert settings.grace_s == seconds
    assert settings.margin_s == min(3.0, 0.2 * seconds)


def test_an_empty_text_is_no_folder_and_no_checkpoint() -> None:
    """Set by hand, empty options are refused and not guessed."""
    for options in ({"output_dir": ""}, {"output_dir": "  "}, {"resume": ""}):
        with pytest.raises(UsageError, match="is empty"):
            RunSettings(**options)
