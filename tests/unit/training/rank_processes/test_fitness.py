"""What must not have happened in a process that is copied, and the order in which packages are imported."""

import atexit
import os

import pytest

from safepoint.training.rank_processes import fitness
from safepoint.training.rank_processes.fitness import Fitness, UnfitError, audited
from safepoint.training.rank_processes.preload_list import Wanted
from safepoint.training.rank_processes.template import _doubtful_first


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("/dev/nvidia0", "odd has opened a GPU"),
        ("socket:[1]", "odd has opened a connection"),
        ("pipe:[1]", "odd has opened a connection"),
    ],
)
def test_a_device_or_a_connection_is_noticed(target: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if it was opened by an import, and did not come from the launcher."""
    monkeypatch.setattr(fitness, "_descriptors", lambda: {0: "/dev/null"})
    # The process of the tests may have all of these.
    monkeypatch.setattr(fitness, "_thread_names", list)
    monkeypatch.setattr(fitness, "children_of", lambda _: [])
    monkeypatch.setattr(fitness, "_start_method", lambda: None)
    one = Fitness(3)
    monkeypatch.setattr(fitness, "_descriptors", lambda: {0: "/dev/null", 3: "socket:[9]", 9: target})
    one.check("odd", received=[9])
    with pytest.raises(UnfitError, match=reason):
        one.check("odd")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_a_variable_of_one_rank_is_noticed(name: str) -> None:
    """Whether it is set or not; other variables may be read."""
    with audited() as check:
        os.environ.get("HOME")
        check()
        os.environ.get(name)
        with pytest.raises(UnfitError, match=f"reads {name} while it is imported"):
            check()
    os.environ.get(name)


_HANDLERS = {
    "odd": ("odd", "def end(): pass\natexit.register(end)"),
    "PIL": (None, "def end(): pass\natexit.register(end)"),
    "shutil": ("other", "atexit.register(shutil.rmtree, '/tmp/nothing')"),
    "functools": ("other", "atexit.register(functools.partial(print))"),
    "logging": (None, "atexit.register(logging.shutdown)"),
}


@pytest.mark.parametrize("kind", _HANDLERS)
def test_an_exit_handler_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is a function of Python's own that an unknown package registers, such as one that deletes a folder.

    Handlers of packages that are known to be fit, and those of Python itself, are harmless.
    """
    monkeypatch.setattr(atexit, "register", lambda function, *_, **__: function)
    named, source = _HANDLERS[kind]
    module = {"shutil": "other.part", "functools": "other.part"}.get(kind, kind)
    with audited() as check:
        exec(f"import atexit, functools, logging, shutil\n{source}", {"__name__": module})
        if named is None:
            check()
        else:
            with pytest.raises(UnfitError, match=f"{named} registers an exit handler"):
                check()


def test_packages_that_may_be_unfit_come_before_those_that_are_not() -> None:
    """After torch; otherwise the order of the source stays."""
    names = ["transformers", "odd", "torch", "torch.nn", "other.part", "trl", "numpy"]
    ordered = [one.module for one in _doubtful_first(Wanted(module=name) for name in names)]
    assert ordered == ["torch", "torch.nn", "odd", "other.part", "transformers", "trl", "numpy"]
