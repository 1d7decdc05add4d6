"""Variables that Kubernetes sets for its Services, and that look like settings."""

import os

_PROTOCOLS = ("tcp://", "udp://", "sctp://")


def forget_service_links() -> None:
    """Remove variables of Services from those that begin with SAFEPOINT_.

    A Service called `safepoint-metrics` sets SAFEPOINT_METRICS_PORT=tcp://10.0.0.7:80 in every pod of its namespace,
    which is no setting.
    """
    for name, value in list(os.environ.items()):
        if name.startswith("SAFEPOINT_") and value.startswith(_PROTOCOLS):
            del os.environ[name]
