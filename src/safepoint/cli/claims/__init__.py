"""Commands about checkpoints and process images in claims of a cluster: the side in a pod, and the side outside."""
