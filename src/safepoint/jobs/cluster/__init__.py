"""Jobs on a Kubernetes cluster with Kubeflow Trainer, with the user's own rights and without an operator.

A job is a TrainJob. Safepoint keeps its records about a job in the annotations of the TrainJob, so that commands on
all machines show the same job.
"""
