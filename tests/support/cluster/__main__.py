"""The command line, see the package."""

import os
import signal
import sys
import time

from tests.support.cluster import programs
from tests.support.cluster.running import EXISTING, running_cluster


def main() -> int:
    words = sys.argv[1:]
    if words == ["is-built"]:
        return 0 if programs.unavailable() is None else 3
    if words in (["build"], ["build", "older"]) and os.environ.get(EXISTING):
        return 0
    if words in (["build"], ["build", "older"]):
        reason = programs.install() or programs.build(with_older=len(words) > 1)
        if reason:
            print(f"NOT RUN: cluster ({reason})")
        return 3 if reason else 0
    if words == ["up"]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is removed
        with running_cluster() as cluster:
            print(f"KUBECONFIG={cluster.kubeconfig} {EXISTING}=test", flush=True)
            while True:
                time.sleep(3600)
    print("usage: python -m tests.support.cluster build [older]|is-built|up", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
