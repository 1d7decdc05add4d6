"""What a loop's state consists of, and how each part is saved and loaded."""
