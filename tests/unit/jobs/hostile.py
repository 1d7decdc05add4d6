"""Functions that are not easy to ship; nothing here imports what they need."""

from __future__ import annotations

import functools
import json as js
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEARNING_RATE = 0.1


class Numbers(int):
    pass


def letters(out: Path, quote: str = "\"'`$HOME`") -> None:
    """What a shell would do something with: $HOME, `date`, $(id), \\, "quotes", 'quotes', EOM, 💾.
    EOM
    """
    from pathlib import Path

    text = f"""$(touch /tmp/never) `id` {quote} \\ \
äöü 💾 \N{SNOWMAN} \x00 %s {{}} !!
EOM
"""
    Path(out).write_text(text, encoding="utf-8")


def inner() -> Callable[..., Any]:
    def nested(out, *, twice=2):
        text = """
    kept where it is
  and this
as it stands
"""
        # a comment
        # that stands further out
        with open(out, "w") as file:
            file.write(text * twice)

    return nested


def closure() -> Callable[..., Any]:
    secret, other = 1, 2

    def needs() -> int:
        return secret + other

    return needs


def uses_globals(rate: float = 0.5) -> None:
    print(LEARNING_RATE, js.dumps({}), os.getcwd(), letters, rate, undefined_anywhere)  # noqa: F821


def uses_in_a_nested_class() -> list[object]:
    class Inside:
        first = 1
        second = first
        third = LEARNING_RATE

        def method(self) -> object:
            return Numbers(3)

    return [Inside() for _ in range(3) if js]


def defines_everything(values: list[int]) -> int:
    import json as js

    global COUNT  # noqa: PLW0603
    COUNT = len(values)

    def again(depth: int) -> int:
        return 0 if depth == 0 else again(depth - 1)

    class Own(dict):
        kind = __name__

    weight: LaterDefined = js.loads("[1]")  # noqa: F821
    return COUNT + again(2) + len(Own()) + len(weight) + sum(one for one in values if one) + len(__file__[:0])


def annotated(model: LaterDefined) -> None:  # noqa: F821
    return None


def register(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@register
def registered() -> None:
    pass


@functools.cache
def cached() -> None:
    pass


@functools.wraps(registered)
def wrapping() -> None:
    pass


class Owner:
    def method(self) -> None:
        pass

    @staticmethod
    def static() -> None:
        pass

    def __call__(self) -> None:
        pass


async def coroutine() -> None:
    pass


def generator() -> Any:
    yield 1


nameless = lambda: None  # noqa: E731
made_by_exec: dict[str, Any] = {}
exec("def sourceless():\n    pass", made_by_exec)
