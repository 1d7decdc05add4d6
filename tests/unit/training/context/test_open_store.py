"""A rank warns once when the rendezvous store of its job answers everyone."""

import subprocess
import sys

import pytest

from tests.support.jobs import environment

_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "is_warned"),
    [
        ({**_TORCHRUN, "RANK": "0", "WORLD_SIZE": "2"}, True),
        ({**_TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({**_TORCHRUN, "RANK": "1", "WORLD_SIZE": "2"}, False),
        ({**_TORCHRUN, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({**_TORCHRUN, "RANK": "0", "WORLD_SIZE": "2", "SAFEPOINT_LAUNCHER_PID": "1"}, False),
        ({}, False),
    ],
)
def test_the_first_rank_warns_of_torchs_own_store(variables: dict[str, str], is_warned: bool) -> None:
    """Not the other ranks, not after a restart, not under `safepoint run`, and not where there is one process."""
    code = "from safepoint.training.context.rank_context import current_context; current_context()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment(**variables)
    )
    assert ("safepoint run" in done.stderr and "NetworkPolicy" in done.stderr) == is_warned, done.stderr
