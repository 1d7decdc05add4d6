"""The state of a training, as far as all frameworks share it: random numbers, strategy, base model of adapters."""
