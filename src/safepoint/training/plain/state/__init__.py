"""The parts of a loop's state, such as the model and the optimizer, and how each part is saved and loaded."""
