"""How messages name options: as options of the command line or, in a job from the SDK, as fields of the SDK.

In a job, messages also name the command that continues the job, in place of the command that has started the run.
"""

import re
from pathlib import Path

from safepoint.errors import name_options

WORDINGS = ("options", "sdk")
_OPTION = re.compile(r"--[a-z]+(?:-[a-z]+)*")
_OF_CONFIG = "{} of periodic_checkpoint_config"
_FIELDS = {
    "--output-dir": "output_dir",
    **{f"--{name.replace('_', '-')}": _OF_CONFIG.format(name) for name in ("save_strategy", "save_steps")},
    "--save-total-limit": _OF_CONFIG.format("save_total_limit"),
    "--save-every": "save_every",
    "--keep": "retention",
    "--store-keep": "retention",
    "--on-upload-failure": "on_upload_failure",
    "--freeze-as-last-resort": "freeze_as_last_resort",
    "--verify-access": "verify_cloud_storage_access",
    "--no-verify-access": "verify_cloud_storage_access=False",
    "--grace": "grace_period_seconds",
    "--resume": "resume",
    "--from-scratch": "from_scratch=True",
    "--allow-batch-change": "allow_batch_change=True",
    "--snapshot-steps": "snapshot_steps",
    "--snapshot-memory": "staging_size",
    "--local-limit": "local_limit",
    "--shared-memory": "shared_memory",
    "--memory": "resources_per_node (memory)",
    "--extra-files-limit": "extra_files_limit",
    "--metrics-port": "metrics_port",
    "--nnodes": "num_nodes",
    "--nproc-per-node": "resources_per_node",
    "--connection": "data_connection_name",
    "--image": "image",
}
"""The field of `TransformersTrainer` for each option of `run` and `submit`."""


def in_sdk_words(text: str) -> str:
    """`text` with the fields of the SDK in place of options. Options that have no field stay."""
    return _OPTION.sub(lambda option: _FIELDS.get(option[0], option[0]), text)


def in_job_words(text: str, job: str, *, wording: str) -> str:
    """`text` with the request that continues the job, in place of the advice to run the same command again.

    Args:
        text: a message.
        job: the name of the job.
        wording: one of `WORDINGS`.
    """
    again = f'call resume_job("{job}")' if wording == "sdk" else f"run `safepoint resume {job}`"
    text = text.replace("run the same command again", again)
    return text.replace("the same command on this machine", "the resumed job on this machine")


def use_wording(wording: str, *, job_dir: str | Path | None = None) -> None:
    """Set how all messages of this process name options, and what continues the run.

    Args:
        wording: one of `WORDINGS`.
        job_dir: the folder of the job, which has the job's name; None if the run is not a job of this machine.
    """
    job = None if job_dir is None else Path(job_dir).name

    def translate(text: str) -> str:
        text = in_sdk_words(text) if wording == "sdk" else text
        return in_job_words(text, job, wording=wording) if job else text

    if wording == "sdk" or job:
        name_options(translate)
