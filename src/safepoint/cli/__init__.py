"""What a person types. Imports nothing heavy: `safepoint --help` must not wait for torch."""
