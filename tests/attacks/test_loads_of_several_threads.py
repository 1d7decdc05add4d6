"""Several threads of a rank load files of a checkpoint at the same time.

torch's list of allowed classes and its unpickler belong to the process. One thread must not load with the list or the
unpickler of another thread, and no class stays allowed.
"""

import concurrent.futures
from pathlib import Path

import torch
from torch import _weights_only_unpickler as restricted

from safepoint.checkpoint.pickles.restricted_load import restricted_load


class Kept:
    """A class that only some of the loads allow."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_each_load_has_its_own_classes(tmp_path: Path) -> None:
    """Half of the loads allow the class, and succeed. The other half do not, and fail."""
    path = tmp_path / "kept.pt"
    torch.save({"kept": Kept(5)}, path)
    before = torch.serialization.get_safe_globals(), restricted.Unpickler

    def load(number: int) -> bool:
        try:
            found = restricted_load(path, also=[Kept] if number % 2 else ())
        except Exception:  # noqa: BLE001  torch raises its own kinds
            return False
        return found["kept"].number == 5

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        loaded = list(threads.map(load, range(400)))
    assert loaded == [number % 2 == 1 for number in range(400)]
    assert (torch.serialization.get_safe_globals(), restricted.Unpickler) == before
