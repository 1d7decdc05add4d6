"""`python -m safepoint.training SCRIPT [ARGS…]`, or `-m MODULE [ARGS…]`: runs an unchanged script as one rank.

Run it under `safepoint run`, under torchrun, or alone. The variables SAFEPOINT_* hold the options of `safepoint run`.
If SAFEPOINT_TEMPLATE is set, the process is a template: a process that the launcher copies to create ranks
(`safepoint.training.rank_processes`).
"""

import os
import signal
import sys
from collections.abc import Mapping

from safepoint.errors import MissingExtraError, require_torch
from safepoint.foundation.processes import end_with_parent
from safepoint.settings.run_settings import variable
from safepoint.training.outcome.launcher_folder import keep_rank_in_its_folder


def main() -> int:
    """Run this process as one rank; see `safepoint.training.rank.main`."""
    environment = dict(os.environ)
    _handle_signals_before_imports(environment)
    keep_rank_in_its_folder(os.environ.get(variable("record_folder")))
    try:
        require_torch("a training")
    except MissingExtraError as error:
        sys.stderr.write(f"safepoint: error: {error}\n")
        return error.exit_code
    from safepoint.training import rank
    from safepoint.training.rank_processes.template import is_template, run_template

    if is_template():
        from safepoint.training.integrations import install_before_ranks, prepare_before_ranks

        return run_template(rank.main, install_before_ranks, prepare_before_ranks, environment)
    return rank.main(sys.argv[1:])


def _handle_signals_before_imports(environment: Mapping[str, str]) -> None:
    """Set what signals do while this process imports torch, which takes seconds, or minutes on a slow file system.

    Nothing is to be saved before the training begins. So SIGTERM ends the process at once, also if the launcher ends.
    SIGUSR1, which requests a checkpoint, would also end the process, so it is ignored until the rank handles it.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    launcher_pid = environment.get(variable("launcher_pid"), "")
    if launcher_pid.isdecimal():
        end_with_parent(int(launcher_pid), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
