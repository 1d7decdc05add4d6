"""`python -m holdfast.training SCRIPT [ARGS…]`, or `-m MODULE [ARGS…]`: one rank, the script unchanged.

Run it under `holdfast run`, under torchrun, or alone; the options of `holdfast run` are read from HOLDFAST_*.
"""

import sys

from holdfast.training.rank import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
