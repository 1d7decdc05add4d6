"""What a person types. Imports nothing heavy: `holdfast --help` must not wait for torch."""
