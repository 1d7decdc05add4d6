"""The state of a training, as far as all frameworks share it: random numbers, strategy, the model below adapters."""
