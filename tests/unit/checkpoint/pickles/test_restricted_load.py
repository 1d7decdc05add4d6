"""Restricted loads beside other threads, and with classes that the script has allowed."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _weights_only_unpickler as unpickler

from safepoint.checkpoint.pickles.restricted_load import restricted_load


def _restricted(path: Path) -> Any:
    return restricted_load(path, load=torch.load, also=())


@pytest.mark.parametrize("other", [torch.load, _restricted], ids=["own", "restricted"])
def test_another_thread_loads_a_larger_file_meanwhile(other: Callable[[Path], Any], tmp_path: Path) -> None:
    """The sizes of the records belong to the file that a thread reads. torch has one unpickler for all threads."""
    small, large = tmp_path / "small", tmp_path / "large"
    torch.save([torch.ones(1)], small)
    torch.save([torch.ones(1000), torch.zeros(10)], large)
    found: list[Any] = []

    def load(file: Any, **options: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(other, large).result())
        return torch.load(file, **options)

    loaded = restricted_load(small, load=load, also=())
    assert [len(one) for one in [*loaded, *found[0]]] == [1, 1000, 10]


@pytest.mark.skipif(
    hasattr(unpickler.Unpickler, "_check_set_item_target"), reason="this release of torch refuses the items itself"
)
def test_items_of_a_dictionary_that_the_script_allows(tmp_path: Path) -> None:
    counts = defaultdict(int, first=1, second=2)
    torch.save(counts, tmp_path / "counts")
    with torch.serialization.safe_globals([defaultdict, int]):
        assert _restricted(tmp_path / "counts") == counts
