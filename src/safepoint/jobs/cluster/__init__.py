"""Jobs on a Kubernetes cluster with Kubeflow Trainer, with the user's own rights and without an operator.

A job is a TrainJob. What Safepoint records about a job is in the annotations of its TrainJob, so every machine sees
the same job.
"""
