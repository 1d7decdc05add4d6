"""`python -m safepoint.training SCRIPT [ARGS…]`, or `-m MODULE [ARGS…]`: runs an unchanged script as one rank.

Run it under `safepoint run`, under torchrun, or alone. The variables SAFEPOINT_* hold the options of `safepoint run`.
"""

import sys

from safepoint.errors import MissingExtraError, require_torch


def main() -> int:
    """Run this process as one rank; see `safepoint.training.rank.main`."""
    try:
        require_torch("a training")
    except MissingExtraError as error:
        sys.stderr.write(f"safepoint: error: {error}\n")
        return error.exit_code
    from safepoint.training import rank

    return rank.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
