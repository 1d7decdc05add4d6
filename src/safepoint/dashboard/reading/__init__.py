"""What the pages show, as frozen values."""
