"""What differs between the releases of torch."""

import os
import signal
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing import api

from safepoint.training.compatibility.torch_releases import keep_signal_handlers


@pytest.mark.parametrize("reads_the_variable", [True, False])
def test_handlers_of_the_launcher_stay(reads_the_variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 always sets its own, and reads no variable that would prevent that."""

    def newer() -> str:
        return "TORCHELASTIC_SIGNALS_TO_HANDLE"

    def older() -> None:
        api.signal.signal(api.signal.SIGTERM, lambda *_: None)

    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    monkeypatch.setattr(api, "signal", signal)
    monkeypatch.setattr(api, "PContext", SimpleNamespace(start=newer if reads_the_variable else older))
    handler = signal.getsignal(signal.SIGTERM)
    keep_signal_handlers()
    assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGQUIT"
    assert (api.signal is signal) == reads_the_variable
    api.PContext.start()
    assert signal.getsignal(signal.SIGTERM) is handler
