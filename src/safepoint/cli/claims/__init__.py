"""`safepoint checkpoints` for claims of a cluster: the side in a pod, and the side that starts the pod."""
