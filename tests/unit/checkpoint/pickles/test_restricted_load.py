"""Restricted loads beside other threads, and with classes that the script has allowed."""

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _weights_only_unpickler as unpickler

from safepoint.checkpoint.pickles.restricted_load import restricted_load
from tests.support.patience import PATIENCE


def _restricted(path: Path) -> Any:
    return restricted_load(path, load=torch.load, also=())


@pytest.mark.parametrize("other", [torch.load, _restricted], ids=["own", "restricted"])
def test_another_thread_loads_a_larger_file_meanwhile(other: Callable[[Path], Any], tmp_path: Path) -> None:
    """The sizes of the records belong to the file that a thread reads. torch has one unpickler for all threads.

    A restricted load waits for the one that another thread has begun; a load of the script does not.
    """
    small, large = tmp_path / "small", tmp_path / "large"
    torch.save([torch.ones(1)], small)
    torch.save([torch.ones(1000), torch.zeros(10)], large)
    begun = threading.Event()
    found: list[Future[Any]] = []

    def begin() -> Any:
        begun.set()
        return other(large)

    def load(file: Any, **options: Any) -> Any:
        found.append(pool.submit(begin))
        begun.wait()
        if other is torch.load:
            found[0].result()
        return torch.load(file, **options)

    with ThreadPoolExecutor(1) as pool:
        loaded = restricted_load(small, load=load, also=())
        assert [len(one) for one in [*loaded, *found[0].result()]] == [1, 1000, 10]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_another_thread_starts_meanwhile(tmp_path: Path) -> None:
    """A fork has the locks of threads that it does not have."""
    torch.save([torch.ones(1)], tmp_path / "file")
    found: list[int] = []

    def fork() -> int:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(20 * PATIENCE))
            os._exit(0 if len(_restricted(tmp_path / "file")) == 1 else 1)
        return os.waitpid(child, 0)[1]

    def load(file: Any, **options: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(fork).result())
        return torch.load(file, **options)

    restricted_load(tmp_path / "file", load=load)
    assert found == [0]


@pytest.mark.skipif(
    hasattr(unpickler.Unpickler, "_check_set_item_target"), reason="this release of torch refuses the items itself"
)
def test_items_of_a_dictionary_that_the_script_allows(tmp_path: Path) -> None:
    counts = defaultdict(int, first=1, second=2)
    torch.save(counts, tmp_path / "counts")
    with torch.serialization.safe_globals([defaultdict, int]):
        assert _restricted(tmp_path / "counts") == counts
