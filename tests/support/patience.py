"""How many times longer than usual tests wait, for a machine that is busy with other work."""

import os

PATIENCE = float(os.environ.get("SAFEPOINT_TEST_PATIENCE", "1"))

__all__ = ["PATIENCE"]
