"""Ranks that hold the same model copy one snapshot together (docs/adr/0014)."""
