"""What is checked before a job is created: what it needs of the cluster, and the values of its options."""
