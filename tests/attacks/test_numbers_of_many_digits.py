"""Numbers of thousands of digits in options, variables, labels of a cluster and arguments of a program.

`int` raises a ValueError for more than 4,300 digits. A command would end with a traceback.
"""

from collections.abc import Callable

import pytest

from safepoint.cli.commands.plan.storage import _slow
from safepoint.cli.commands.submit import _ranks
from safepoint.errors import UsageError
from safepoint.jobs.cluster.pods.pod_fields import node_of
from safepoint.jobs.local.slots import count_slots
from safepoint.planning.inputs import read_job_arguments
from safepoint.sdk.trainers import _are_steps
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launch_plan import LaunchPlan

_LONG = "9" * 5000


@pytest.mark.parametrize(
    "use",
    [
        lambda: LaunchPlan(program=(__file__,), nproc_per_node=_LONG),
        lambda: RunSettings(snapshot_steps=_LONG),
        lambda: count_slots({"SAFEPOINT_CPU_SLOTS": _LONG}),
        lambda: _ranks(_LONG),
    ],
)
def test_options_of_thousands_of_digits(use: Callable[[], object]) -> None:
    """They are refused with a message."""
    with pytest.raises(UsageError, match="must be a"):
        use()


def test_values_of_thousands_of_digits() -> None:
    """In labels of pods, in speeds of a plan, and in arguments of the SDK."""
    assert node_of({"metadata": {"labels": {"batch.kubernetes.io/job-completion-index": _LONG}}}) == 0
    assert _slow({"--upload-speed": _LONG, "--disk-speed": "68"}) == [
        "--disk-speed 68 is 68 bytes in a second: did you mean 68M?"
    ]
    assert [_are_steps(one) for one in (_LONG, "auto", "3", 3, 0, "0", None, True)] == [
        *(False, True, True, True, False, False, False, False),
    ]


@pytest.mark.parametrize("option", ["save_total_limit", "lora_r"])
def test_arguments_of_a_program(option: str) -> None:
    assert read_job_arguments(["--use_peft", f"--{option}", _LONG]).keep is None
