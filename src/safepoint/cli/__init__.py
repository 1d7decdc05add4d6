"""The commands that a person types. Nothing heavy is imported here: `safepoint --help` must not wait for torch."""
