"""What users and their programs rely on does not change by accident."""

import json

import pytest

from tests.support.surface import SNAPSHOT, surface


@pytest.fixture(scope="module")
def now() -> dict[str, object]:
    return json.loads(json.dumps(surface()))


@pytest.mark.parametrize("part", ["commands", "variables", "exit_codes", "python", "events", "metrics", "json"])
def test_the_public_surface_is_what_is_written_down(part: str, now: dict[str, object]) -> None:
    """If the change is meant, `make surface` writes it down; CHANGELOG.md tells users."""
    assert now[part] == json.loads(SNAPSHOT.read_text())[part]


def test_nothing_else_is_written_down(now: dict[str, object]) -> None:
    assert now.keys() == json.loads(SNAPSHOT.read_text()).keys()
