"""Methods replaced on one object for the time of a call."""

import pytest

from safepoint.checkpoint.pickles.temporary_attributes import Overrides


class Trainer:
    def step(self) -> str:
        return "base"


class Special(Trainer):
    def step(self) -> str:
        return "special " + super().step()


def test_only_one_object_is_changed_and_only_for_a_while() -> None:
    """The original includes the subclass's version; other objects and the class are untouched."""
    one, other = Special(), Special()
    with Overrides() as overrides:
        overrides.override(one, "step", lambda original: f"<{original()}>")
        assert one.step() == "<special base>"
        assert other.step() == "special base"
    assert one.step() == "special base"
    assert vars(one) == {}


def test_an_attribute_of_the_object_itself_comes_back() -> None:
    """What the user's script had put on the object is there again, also after an error."""
    one = Trainer()
    mine = lambda: "mine"  # noqa: E731
    one.step = mine  # type: ignore[method-assign]
    with pytest.raises(KeyError), Overrides() as overrides:  # noqa: PT012  the error is what ends the block
        overrides.override(one, "step", lambda original: f"<{original()}>")
        assert one.step() == "<mine>"
        raise KeyError
    assert one.step is mine


@pytest.mark.parametrize("own", [True, False])
def test_replacing_twice_nests_and_the_first_original_comes_back(own: bool) -> None:
    """The second replacement wraps the first, and neither outlives the block."""
    one = Trainer()
    if own:
        one.step = lambda: "mine"  # type: ignore[method-assign]
    before = dict(vars(one))
    with Overrides() as overrides:
        overrides.override(one, "step", lambda original: f"<{original()}>")
        overrides.override(one, "step", lambda original: f"[{original()}]")
        assert one.step() == ("[<mine>]" if own else "[<base>]")
    assert vars(one) == before
