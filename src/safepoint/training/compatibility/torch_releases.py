"""Differences between the releases of torch.

| releases | difference | handled by |
|---|---|---|
| 2.9 | torch elastic always sets its own handlers of SIGTERM, SIGINT and SIGHUP | `keep_signal_handlers` |
| 2.9 to 2.11 | torch elastic's agent gives ranks 30 s to end; no option changes this time | `PatientAgent` |
"""

# torch elastic wraps its methods in an untyped decorator, so pyright cannot check their overrides and calls.
# pyright: reportIncompatibleMethodOverride=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import functools
import inspect
import os
import signal
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api

_OPTION = "shutdown_timeout"
_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
HAS_SHUTDOWN_TIMEOUT = _OPTION in inspect.signature(LocalElasticAgent.__init__).parameters
"""Whether torch elastic has an option for the time that ranks may take to end."""


class PatientAgent(LocalElasticAgent):
    """torch elastic's agent. Its option `shutdown_timeout` works with every release of torch.

    Args:
        shutdown_timeout: seconds between the signal with which the agent ends the ranks, and SIGKILL.
        arguments: further arguments of `LocalElasticAgent`.
    """

    def __init__(self, *, shutdown_timeout: int, **arguments: Any) -> None:
        if HAS_SHUTDOWN_TIMEOUT:
            arguments[_OPTION] = shutdown_timeout
        super().__init__(**arguments)
        self._patience_s = shutdown_timeout

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        processes: Any = self._pcontext
        if HAS_SHUTDOWN_TIMEOUT or processes is None:
            super()._shutdown(death_sig, *args, **kwargs)
            return
        processes.close = functools.partial(type(processes).close, processes, timeout=self._patience_s)
        try:
            super()._shutdown(death_sig)
        finally:
            del processes.close


class _Signals:
    """Replaces the module `signal` in torch elastic. The method `signal` of this class sets no handler."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    @staticmethod
    def signal(number: int, handler: Any) -> Any:
        """Return the present handler of the signal, and leave it in place."""
        return signal.getsignal(number)


def keep_signal_handlers() -> None:
    """Keep this process's handlers of SIGTERM, SIGINT and SIGHUP when torch elastic starts ranks."""
    os.environ[_SIGNALS] = "SIGQUIT"
    library: Any = api
    if _SIGNALS not in library.PContext.start.__code__.co_consts:
        library.signal = _Signals()
