"""Jobs on a Kubernetes cluster with Kubeflow Trainer, with the user's own rights and without an operator.

A job is a TrainJob. What Safepoint knows beyond it lies in its annotations, so every machine sees the same job.
"""
