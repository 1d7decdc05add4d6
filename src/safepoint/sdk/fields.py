"""The types and ranges of the fields of the SDK's trainers and configurations."""

from typing import Any

from safepoint.foundation.field_types import FLAG, NAMED, PATH, SECONDS, TEXT, Kind, texts, whole


def _is_size(value: Any) -> bool:
    return isinstance(value, str) or whole().fits(value)


def _are_steps(value: Any) -> bool:
    text = str(value) if whole().fits(value) else value
    return isinstance(text, str) and (text == "auto" or (text.isdecimal() and int(text) > 0))


CUSTOM_TRAINER = {
    "func_args": NAMED.optional,
    "image": TEXT.optional,
    "packages_to_install": texts("a list of requirements").optional,
    "pip_index_urls": texts("a list of addresses"),
    "num_nodes": whole(1).optional,
    "resources_per_node": NAMED.optional,
    "env": NAMED.optional,
}
"""Kubeflow's own trainer, which does not check its fields."""

TRANSFORMERS_TRAINER = CUSTOM_TRAINER | {
    "enable_progression_tracking": FLAG,
    "metrics_port": whole(1024, 65535),
    "metrics_poll_interval_seconds": whole(5, 300),
    "enable_jit_checkpoint": FLAG,
    "output_dir": TEXT.optional,
    "data_connection_name": TEXT.optional,
    "verify_cloud_storage_access": FLAG,
    "verify_cloud_storage_ssl": FLAG,
    "grace_period_seconds": SECONDS.optional,
    "retention": Kind(words="a text or a mapping", fits=lambda value: TEXT.fits(value) or NAMED.fits(value)).optional,
    "staging_size": Kind(words="a size in bytes, or a text such as 8Gi", fits=_is_size).optional,
    "ca_bundle": PATH.optional,
    "save_every": Kind(words="a text such as 10m, or auto", fits=TEXT.fits).optional,
    "snapshot_steps": Kind(words="a positive number of steps, or auto", fits=_are_steps).optional,
}

PERIODIC_CHECKPOINT_CONFIG = {"save_steps": whole(1).optional, "save_total_limit": whole(1).optional}
