"""The values of jobs: specification, state, events, outcome of an attempt. This package starts no processes."""
