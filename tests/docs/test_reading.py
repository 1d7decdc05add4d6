"""Tests of the reader of guides and of its terminal: what they accept as equal, and what they refuse."""

import sys
from pathlib import Path

import pytest

from tests.docs.markdown import Step, blocks, pattern
from tests.docs.terminal import Terminal

CATCHES = """\
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("begun", flush=True)
signal.sigwait([signal.SIGINT])
print("caught")
raise SystemExit(7)
"""

GUIDE = """\
```python
# train.py
print(1)
```
```console
$ for word in a b; do
>   echo $word
> done
a
…
$ echo $?
0
```
<!-- not executed: it needs a cluster -->
```console
$ kubectl get jobs
```
```text
something
```
"""


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    path = tmp_path / "guide.md"
    path.write_text(GUIDE)
    return path


def step(typed: str, *printed: str) -> Step:
    return Step(typed=typed, printed=printed, number=1)


def test_blocks_are_files_and_consoles(guide: Path) -> None:
    """A file keeps the line that names it; a command keeps all its lines; a reason belongs to its block."""
    script, console, cluster, text = blocks(guide)
    assert (script.file, script.text) == ("train.py", "# train.py\nprint(1)\n")
    first, second = console.steps()
    assert (first.typed, first.printed, first.number) == ("for word in a b; do\n  echo $word\ndone", ("a", "…"), 6)
    assert (second.typed, second.printed) == ("echo $?", ("0",))
    assert (console.not_executed, cluster.not_executed) == (None, "it needs a cluster")
    with pytest.raises(ValueError, match="line 19: a block `text` is neither"):
        list(text.steps())


def test_a_block_without_an_end(guide: Path) -> None:
    """A block that is not closed is an error, because the rest of the document would be missing."""
    guide.write_text("```console\n$ true\n")
    with pytest.raises(ValueError, match="has no end"):
        blocks(guide)


@pytest.mark.parametrize(
    ("shown", "printed", "is_equal"),
    [
        (["saved … in … s"], "saved step 20 in 0.1 s\n", True),
        (["saved … in … s"], "saved step 20\nin 0.1 s\n", False),
        (["a", "…", "c"], "a\nb\nb\nc\n", True),
        (["a", "…", "c"], "a\nc\n", True),
        (["a", "…", "c"], "a\nb\nd\n", False),
        (["JOB   AGE"], "JOB  AGE\n", True),
        (["1.5 (x)"], "1x5 (x)\n", False),
    ],
)
def test_what_is_equal(shown: list[str], printed: str, is_equal: bool) -> None:
    """`…` matches anything in a line, and any lines if it stands alone; the width of gaps does not matter."""
    assert bool(pattern(shown).fullmatch(printed)) == is_equal


def test_a_shell(tmp_path: Path) -> None:
    """Variables stay set, exit codes are passed on, and more or less output than shown is an error."""
    with Terminal(tmp_path, "console") as terminal:
        assert terminal.do(step("word=hello; cd /")) == 0
        assert terminal.do(step("echo $word $PWD; exit_code=3; (exit $exit_code)", "hello /")) == 3
        assert terminal.do(step("echo $?", "3")) == 0
        assert terminal.do(step("printf 'an end without a newline'", "an end without a newline")) == 0
        for shown in ((), ("b",), ("a", "b")):
            with pytest.raises(AssertionError, match="it printed"):
                terminal.do(step("echo a", *shown))


def test_the_key_that_interrupts(tmp_path: Path) -> None:
    """^C is pressed after the lines above it were printed; the command receives it, and the shell continues."""
    with Terminal(tmp_path, "console") as terminal:
        # Not a shell with a trap: it forgets a key that is pressed when the command it waits for has just ended.
        (tmp_path / "catch.py").write_text(CATCHES)
        catching = f"{sys.executable} catch.py"
        assert terminal.do(step(catching, "begun", "^C", "caught")) == 7
        # One command, which has begun when it prints: between two, the shell itself would take the key.
        assert terminal.do(step("bash -c 'echo begun; exec sleep 1000'", "begun", "^C")) == 130
        with pytest.raises(AssertionError, match="ended before"):
            terminal.do(step("echo begun", "begun", "more", "^C"))


def test_an_interpreter(tmp_path: Path) -> None:
    """Values are printed, statements may have several lines, and an exception is reported."""
    (tmp_path / "words.py").write_text("hello = 'hello'\n")
    with Terminal(tmp_path, "pycon") as terminal:
        assert terminal.do(step("from words import hello")) == 0
        assert terminal.do(step("hello", "'hello'")) == 0
        assert terminal.do(step("for number in range(2):\n    print(number)", "0", "1")) == 0
        assert terminal.do(step("int('x')", "Traceback (most recent call last):", "…", "ValueError: …")) == 1
        assert terminal.do(step("1 + 1", "2")) == 0
