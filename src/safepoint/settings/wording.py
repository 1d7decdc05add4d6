"""How messages name options: as options of the command line or, in a job from the SDK, as fields of the SDK."""

import re

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


def use_wording(wording: str) -> None:
    """Set how all messages of this process name options: `wording` is one of `WORDINGS`."""
    if wording == "sdk":
        name_options(in_sdk_words)
