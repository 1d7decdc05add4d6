"""Which ranks share a folder, found out by signs that they leave."""

from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import StorageError
from safepoint.training.start import folders as module
from safepoint.training.start.folders import Folders, find_folders, owners_of
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    ("seen", "owners"),
    [
        ([(0,)], [0]),
        ([(0, 1), (0, 1)], [0, 0]),
        ([(0,), (1,)], [0, 1]),
        ([(0, 1), (0, 1), (2,)], [0, 0, 2]),
        ([(0,), (1, 2), (1, 2)], [0, 1, 1]),
        ([(0, 1), (0, 1), (1, 2)], [0, 0, 0]),  # late names: a rank that sees another's sign shares with it
        ([(0,), (0,), (2,), (2,)], [0, 0, 2, 2]),  # two ranks a node
        ([(0,), ()], [0, None]),
        ([(0, 2), (1,), (2,)], [0, 1, 0]),
    ],
)
def test_owners(seen: list[tuple[int, ...]], owners: list[int | None]) -> None:
    """The lowest rank of all that see one folder."""
    assert owners_of(seen) == owners


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEPARATE_AFTER_S", 0.3)
    monkeypatch.setattr(module, "_SHARED_WITHIN_S", 0.3)


def find(paths: list[Path], *, has_store: bool, local_ranks: list[int] | None = None) -> list[Folders | Exception]:
    return run_ranks(
        len(paths),
        lambda peers: find_folders(peers, OutputFolder(paths[peers.place.rank]), has_store=has_store),
        local_ranks=local_ranks,
    )


def test_one_folder_several_and_some_of_each(tmp_path: Path) -> None:
    """Signs are gone afterwards."""
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    assert find([a], has_store=False) == [Folders()]
    shared = {0: 0, 1: 0, 2: 0}
    assert find([a, a, a], has_store=False) == [Folders(is_owner=rank == 0, owner_of=shared) for rank in range(3)]
    own = {0: 0, 1: 1, 2: 2}
    assert find([a, b, c], has_store=True) == [Folders(owners=(0, 1, 2), index=r, owner_of=own) for r in range(3)]
    found = find([a, b, a, b], has_store=True)
    assert [(folder.owners, folder.index, folder.is_owner) for folder in found] == [
        ((0, 1), 0, True),
        ((0, 1), 1, True),
        ((0, 1), 0, False),
        ((0, 1), 1, False),
    ]
    assert not [path for folder in (a, b, c) for path in (folder / ".safepoint" / "work").iterdir()]


def test_what_cannot_be_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Several folders without a store; a rank that sees none; a folder that cannot be made."""
    a, b = tmp_path / "a", tmp_path / "b"
    for result in find([a, b], has_store=False):
        assert isinstance(result, StorageError)
        assert "of the other ranks: 1; training was not started" in str(result)
        assert "an object store" in str(result)
    for result in find([a, b], has_store=True, local_ranks=[0, 1]):
        assert isinstance(result, StorageError)
        assert "of the other ranks: 1; training was not started" in str(result)
    (tmp_path / "file").write_text("")
    for result in find([a, tmp_path / "file"], has_store=True):
        assert isinstance(result, StorageError)
        assert "is not a folder" in str(result)
