"""`python -m safepoint.training SCRIPT [ARGS…]`, or `-m MODULE [ARGS…]`: runs an unchanged script as one rank.

Run it under `safepoint run`, under torchrun, or alone. The variables SAFEPOINT_* hold the options of `safepoint run`.
If SAFEPOINT_TEMPLATE is set, the process is a template: a process that the launcher copies to create ranks
(`safepoint.training.rank_processes`).
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
    from safepoint.training.rank_processes.template import is_template, run_template

    if is_template():
        from safepoint.training.integrations import install_before_ranks, prepare_before_ranks

        return run_template(rank.main, install_before_ranks, prepare_before_ranks)
    return rank.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
