"""A real Kubernetes on this machine for tests, with JobSet, Kubeflow Trainer and Kueue.

    python -m tests.support.cluster build     # from Go modules into the cache: half an hour the first time
    python -m tests.support.cluster build older  # also the older Trainers (10 minutes)
    python -m tests.support.cluster is-built  # exits with 0 if `build` has nothing left to do
    python -m tests.support.cluster up        # prints the kubeconfig, and serves until it is interrupted

It needs Linux, root and Go. All of it runs in namespaces of its own, so that ending one process ends everything.
"""
