"""`python -m safepoint.training SCRIPT [ARGS…]`, or `-m MODULE [ARGS…]`: one rank, the script unchanged.

Run it under `safepoint run`, under torchrun, or alone; the options of `safepoint run` are read from SAFEPOINT_*.
"""

import sys

from safepoint.training.rank import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
