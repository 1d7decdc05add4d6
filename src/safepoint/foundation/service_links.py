"""What Kubernetes puts into the environment of every pod, and nobody has meant."""

import os

_PROTOCOLS = ("tcp://", "udp://", "sctp://")


def forget_service_links() -> None:
    """Remove what Kubernetes says about its Services from the variables that are Safepoint's.

    A Service called `safepoint-metrics` sets SAFEPOINT_METRICS_PORT=tcp://10.0.0.7:80 in every pod beside it, and
    nobody has meant a setting by that.
    """
    for name, value in list(os.environ.items()):
        if name.startswith("SAFEPOINT_") and value.startswith(_PROTOCOLS):
            del os.environ[name]
