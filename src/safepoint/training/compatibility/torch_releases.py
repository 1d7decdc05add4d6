"""Differences between the releases of torch.

| releases | difference | here |
|---|---|---|
| 2.9 to 2.11 | torch elastic's agent gives ranks 30 s to end, and no option changes that | `PatientAgent` |
"""

# torch elastic wraps its methods in an untyped decorator, so pyright knows no type for overriding or calling them.
# pyright: reportIncompatibleMethodOverride=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import functools
import inspect
import signal
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

_OPTION = "shutdown_timeout"
HAS_SHUTDOWN_TIMEOUT = _OPTION in inspect.signature(LocalElasticAgent.__init__).parameters
"""Whether torch elastic has an option for the time that ranks get to end."""


class PatientAgent(LocalElasticAgent):
    """torch elastic's agent, with an option, in every release of torch, for the time that ranks get to end.

    Args:
        shutdown_timeout: seconds between the signal and SIGKILL.
        arguments: for `LocalElasticAgent`.
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
