"""The demo that the README recommends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import environment

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_shows_what_it_promises() -> None:
    """The demo checks its own results; it exits with 0 when all of them are right."""
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final weights equal, bit for bit" in done.stdout
