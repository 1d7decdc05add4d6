"""The pod's termination message: the progress of the job when its first container ended.

OpenShift AI's controller reads it from the pod's status when the job is complete or failed.
"""

import contextlib
from pathlib import Path

from safepoint.progress.trainer_status import TrainerStatus

DEFAULT_PATH = Path("/dev/termination-log")


def write_termination_message(path: Path, status: TrainerStatus) -> bool:
    """Write `status` where the platform reads it.

    Args:
        path: a file that the platform has created; it is written in place, because it is mounted.
        status: the last status.

    Returns:
        Whether the file exists and was written.
    """
    with contextlib.suppress(OSError):
        if path.is_file():
            path.write_bytes(status.to_termination_message())
            return True
    return False
