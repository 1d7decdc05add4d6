"""What each file of a checkpoint will hold, byte for byte, before its tensors are copied."""
