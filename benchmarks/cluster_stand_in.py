"""An API server that answers with the jobs of a namespace, for benchmarks of what reads a cluster."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safepoint.jobs.cluster.spec import RECORD, ClusterSpec
from safepoint.settings.run_settings import RunSettings

_SINCE, _NAMESPACE = "2026-11-20T10:00:00Z", "team"


def trainjob(number: int, *, is_running: bool) -> dict[str, Any]:
    """A TrainJob as Trainer stores it, with the progress that its pods have posted."""
    name = f"job-{number:04d}"
    spec = ClusterSpec(
        name=name,
        program=("train.py", "--lr", "1e-4", "--seed", str(number)),
        settings=RunSettings(output_dir=f"pvc://claim/{name}", save_steps=100),
    )
    posted = {"currentStep": 1000, "totalSteps": 20_000, "loss": 0.7, "learning_rate": 1e-4, "safeStep": 990}
    status: dict[str, Any] = {
        "trainerStatus": {
            "metrics": [{"name": key, "value": str(value)} for key, value in posted.items()],
            "estimatedRemainingSeconds": 9500,
            "lastUpdatedTime": "2026-11-26T10:00:00Z",
        },
        "conditions": [] if is_running else [{"type": "Complete", "status": "True", "lastTransitionTime": _SINCE}],
    }
    return {
        "metadata": {
            "name": name,
            "namespace": _NAMESPACE,
            "uid": name,
            "creationTimestamp": _SINCE,
            "annotations": {RECORD: spec.to_record()},
        },
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "numNodes": 1,
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": "1"}},
                "env": [{"name": "SAFEPOINT_OUTPUT_DIR", "value": f"pvc://claim/{name}"}],
            },
        },
        "status": status,
    }


def pod(number: int) -> dict[str, Any]:
    """The running pod of a job."""
    name = f"job-{number:04d}"
    labels = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/replicatedjob-name": "node",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    state = {"name": "node", "state": {"running": {"startedAt": _SINCE}}, "restartCount": 0}
    return {
        "metadata": {"name": f"{name}-node-0-0-abcde", "uid": f"pod-{number}", "labels": labels},
        "spec": {"nodeName": "worker-1", "containers": [{"name": "node", "env": []}]},
        "status": {"phase": "Running", "startTime": _SINCE, "containerStatuses": [state]},
    }


@contextlib.contextmanager
def stand_in(folder: Path, *, num_jobs: int, num_running: int) -> Iterator[Path]:
    """Serve a namespace; yields a kubeconfig whose current context is in it.

    Args:
        folder: where the kubeconfig is written.
        num_jobs: how many jobs there are.
        num_running: how many of them have a running pod.
    """
    lists = {
        "trainjobs": [trainjob(number, is_running=number < num_running) for number in range(num_jobs)],
        "pods": [pod(number) for number in range(num_running)],
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            kind = urlsplit(self.path).path.rpartition("/")[2]
            data = json.dumps({"metadata": {}, "items": lists.get(kind, [])}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name is the base class's
            """Write no log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "current-context": "c",
                "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": _NAMESPACE}}],
            }
        )
    )
    try:
        yield kubeconfig
    finally:
        server.shutdown()
        server.server_close()
