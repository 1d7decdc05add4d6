"""What a loop's state consists of, and how each part, such as the model or the optimizer, is saved and loaded."""
