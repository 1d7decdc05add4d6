"""`python -m safepoint.training SCRIPT [ARGS…]`, or `-m MODULE [ARGS…]`: runs an unchanged script as one rank.

Run it under `safepoint run`, under torchrun, or alone. The variables SAFEPOINT_* hold the options of `safepoint run`.
"""

import sys

from safepoint.training.rank import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
