"""A TrainJob of Safepoint with the config map that says where it saves."""

import base64
import json
from collections.abc import Mapping
from typing import Any, cast

from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.manifests import SHIPPED_TO, config_map_name
from safepoint.jobs.cluster.objects import Object, name_of
from safepoint.jobs.cluster.pod_archive import NAME, command_of, digest_of_files
from safepoint.jobs.cluster.records.storage_record import FILE


class SavingJob:
    """A finished job.

    Args:
        name: its name.
        output: its output location.
        connection: the name of a Secret.
        env: the variables for its store, as a person could write them who submits it without Safepoint.
    """

    def __init__(
        self,
        name: str = "a",
        *,
        output: str = "s3://bucket/run",
        connection: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        record = {"job": name, "output": output, "connection": connection, "env": dict(env or {})}
        files = {NAME: b"", FILE: json.dumps(record).encode()}
        settings = {"SAFEPOINT_OUTPUT_DIR": output}
        metadata = {"name": name, "namespace": "ns", "uid": name, "creationTimestamp": "2026-11-23T10:00:00Z"}
        notes = {"name": name, "program": ["train.py"], "settings": settings, "connection": connection}
        self.trainjob: Any = {
            "metadata": {**metadata, "annotations": {"safepoint.dev/job": json.dumps(notes)}},
            "spec": {
                "trainer": {
                    "numNodes": 1,
                    "command": [*command_of(SHIPPED_TO, files), "run"],
                    "env": [{"name": key, "value": text} for key, text in settings.items()],
                }
            },
            "status": {"conditions": [{"type": "Complete", "status": "True"}]},
        }
        self.config_map: Any = {
            "metadata": {"name": config_map_name(name, digest_of_files(files)), "uid": f"map-of-{name}"},
            "immutable": True,
            "binaryData": {key: base64.b64encode(data).decode() for key, data in files.items()},
        }

    @property
    def api(self) -> ClusterApi:
        """A namespace with the config map only."""
        return cast("ClusterApi", _OneConfigMap(self.config_map))


class _OneConfigMap:
    def __init__(self, config_map: Object) -> None:
        self._config_map = config_map

    def find(self, kind: str, name: str) -> Object | None:
        return self._config_map if kind == "configmaps" and name == name_of(self._config_map) else None
