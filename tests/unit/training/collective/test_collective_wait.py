"""Errors that one rank reports to all ranks: every subclass of SafepointError arrives as it is."""

import ast
import copy
import importlib
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

import safepoint
from safepoint.errors import ExitCode, SafepointError, StorageError
from safepoint.training.collective.collective_wait import on_all_ranks
from safepoint.training.collective.peers import Peers
from safepoint.training.integrations.transformers.sharding.repartition import _with
from safepoint.training.launcher.rendezvous import NoPortError
from tests.support.ranks import run_ranks

_SOURCE = Path(safepoint.__file__).parent


def _modules_with_errors() -> Iterator[str]:
    """The modules that define a class whose base class has a name such as `StorageError`."""
    for path in sorted(_SOURCE.rglob("*.py")):
        text = path.read_text()
        if "Error):" not in text and "Error, " not in text:
            continue
        classes = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.ClassDef)]
        if any(isinstance(base, ast.Name) and base.id.endswith("Error") for one in classes for base in one.bases):
            yield ".".join(("safepoint", *path.relative_to(_SOURCE).with_suffix("").parts))


def _all_kinds() -> list[type[SafepointError]]:
    for module in _modules_with_errors():
        try:
            importlib.import_module(module)
        except ImportError:  # a package of an extra is not installed
            continue
    found, waiting = [], [SafepointError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return sorted(set(found), key=lambda kind: (kind.__module__, kind.__qualname__))


KINDS = [kind for kind in _all_kinds() if kind.__module__.startswith("safepoint.")]


def made(kind: type[SafepointError]) -> SafepointError:
    """An error as the code raises it."""
    needed = [one for one in inspect.signature(kind).parameters.values() if one.default is one.empty]
    named = {one.name: "it broke" for one in needed if one.kind is one.KEYWORD_ONLY}
    return kind(*["it broke"] * (len(needed) - len(named)), **named)


def test_the_kinds_include_one_with_a_constructor_of_its_own() -> None:
    assert NoPortError in KINDS
    assert len(KINDS) > 35


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_can_be_sent_and_changed(kind: type[SafepointError]) -> None:
    error = made(kind)
    error.exit_code = ExitCode.STORAGE
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert (other.message, other.hint, other.exit_code) == (error.message, error.hint, ExitCode.STORAGE)
        assert (str(other), other.args) == (str(error), error.args)
    changed = error.with_message("another", hint="do this")
    assert type(changed) is kind
    assert (changed.message, changed.hint, changed.exit_code) == ("another", "do this", ExitCode.STORAGE)
    assert (str(changed), changed.args) == ("another — do this", ("another",))
    assert error.message != "another"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_error_of_the_second_rank_is_raised_on_all(kind: type[SafepointError]) -> None:
    """With its type, its hint, and the number of the rank."""
    error = made(kind)

    def work(rank: int) -> None:
        if rank == 1:
            raise error

    caught = run_ranks(2, lambda peers: on_all_ranks(cast("Peers", peers), lambda: work(peers.place.rank)))
    assert [(type(one), one.message, one.hint) for one in caught] == [
        (kind, f"{error.message} (on rank 1)", error.hint)
    ] * 2


def test_a_consequence_is_added_to_any_error() -> None:
    def fail() -> None:
        raise NoPortError

    with pytest.raises(NoPortError, match="no rank was started; nothing is resumed") as raised:
        _with("nothing is resumed", fail)()
    assert raised.value.exit_code == NoPortError.exit_code


def test_an_error_of_the_operating_system_names_its_rank() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    (found,) = run_ranks(1, lambda peers: on_all_ranks(cast("Peers", peers), fail))
    assert isinstance(found, StorageError)
    assert found.message.startswith("rank 0 cannot use its output folder: [Errno 28] No space left on device")
