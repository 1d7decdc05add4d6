"""The values of jobs: specification, state, events, outcome of an attempt. Nothing here starts a process."""
