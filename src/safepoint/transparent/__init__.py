"""Process images: freezes programs that cannot save a checkpoint themselves, and restores them (docs/adr/0031)."""
