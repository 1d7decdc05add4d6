"""A real Kubernetes on this machine for tests, with JobSet, Kubeflow Trainer and Kueue.

    python -m tests.support.cluster build     # from Go modules into the cache: half an hour the first time
    python -m tests.support.cluster build older  # also the older Trainers (10 minutes)
    python -m tests.support.cluster is-built  # exits with 0 if `build` has nothing left to do
    python -m tests.support.cluster up        # prints the kubeconfig, and serves until it is interrupted

It needs Linux, root and Go. All of it runs in namespaces of its own, so that ending one process ends everything.

The tests can also use a cluster that runs already, such as that of `up`, kind or OpenShift Local. They make a
namespace for each test, and change nothing else. Tests that need more are skipped with the reason. The variables:

    SAFEPOINT_TEST_CLUSTER         the context of your kubeconfig; its user has to be an administrator
    SAFEPOINT_TEST_IMAGE           the image of the pods, with PyTorch, Transformers, xxhash and typer; without it,
                                   that of the cluster's runtime `torch-distributed`
    SAFEPOINT_TEST_STORAGE_CLASS   the class of the claims, which are ReadWriteMany; without it, the default class
"""
