"""State of a training that every framework shares: random numbers, strategy, the model below adapters."""
