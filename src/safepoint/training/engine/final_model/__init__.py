"""The finished model, from the ranks into the object store."""
