"""The parts of a training's state that all frameworks share: random numbers, strategy, base model of adapters."""
