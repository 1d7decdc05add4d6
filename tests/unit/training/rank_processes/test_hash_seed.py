"""One seed for the hashes of strings: which one, and when a node takes it from node 0."""

import os

import pytest

from safepoint.training.rank_processes.hash_seed import HashSeed


class Store(dict[str, bytes]):
    """What is used of torch's."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Fails where that of torch would wait for ever."""
        return self[key]


SEED = HashSeed(program=("/home/a/train.py", "--node", "0"), is_module=False)


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "")  # Python treats it as none, and so does Safepoint


def seed(monkeypatch: pytest.MonkeyPatch, given: str | None) -> str:
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    SEED.choose()
    return os.environ["PYTHONHASHSEED"]


def test_the_name_of_the_program_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its folder and its arguments, which differ between nodes and attempts; Python accepts the value."""
    assert HashSeed(program=("/home/b/train.py",), is_module=False).value == SEED.value
    assert HashSeed(program=("/home/b/other.py",), is_module=False).value != SEED.value
    assert 0 <= int(SEED.value) <= 4294967295
    assert seed(monkeypatch, None) == SEED.value


def test_a_seed_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every node where it was set."""
    assert seed(monkeypatch, "7") == "7"
    store = Store()
    store.set("safepoint/hash-seed", SEED.value)
    assert SEED.agree(store, node=1, is_wanted=True) is False
    assert seed(monkeypatch, None) == "7"


@pytest.mark.parametrize(
    ("first", "is_wanted", "expected"),
    [
        ("7", True, "7"),
        ("", True, SEED.value),
        (SEED.value, True, SEED.value),
        ("7", False, SEED.value),
    ],
)
def test_other_nodes_follow_node_0(
    first: str, is_wanted: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it has a seed, and this node needs one, and the user has set none here."""
    store = Store()
    monkeypatch.setenv("PYTHONHASHSEED", first)
    assert SEED.agree(store, node=0, is_wanted=False) is False
    monkeypatch.setenv("PYTHONHASHSEED", "")
    own = seed(monkeypatch, None)
    assert SEED.agree(store, node=1, is_wanted=is_wanted) is (expected != own)
    assert seed(monkeypatch, None) == expected
