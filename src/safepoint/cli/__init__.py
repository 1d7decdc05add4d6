"""The commands that a person types. Torch is imported only inside functions, so that `safepoint --help` is fast."""
