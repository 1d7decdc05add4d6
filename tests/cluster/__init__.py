"""Jobs on a real Kubernetes with Kubeflow Trainer and Kueue (`make test-cluster`)."""
