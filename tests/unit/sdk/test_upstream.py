"""The import of Kubeflow's SDK."""

import subprocess
import sys

import pytest

_IMPORT = """
import gc
visits = []
gc.callbacks.append(lambda phase, _: visits.append(1) if phase == "start" else None)
{before}
import safepoint.sdk.upstream
gc.callbacks.clear()
print(gc.isenabled(), gc.get_freeze_count() > 0, len(visits) > 100)
"""


@pytest.mark.parametrize(
    ("before", "printed"),
    [
        ("", "True False False"),
        ("gc.disable()", "False False False"),
        ("gc.freeze()", "True True False"),
    ],
)
def test_the_collector_visits_nothing_during_the_import_and_is_then_as_before(before: str, printed: str) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORT.format(before=before)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == printed
