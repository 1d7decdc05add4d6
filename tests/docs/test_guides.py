"""The guides are executed: each command prints what the guide shows."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.docs.markdown import blocks
from tests.docs.terminal import Terminal
from tests.support.jobs_local import jobs_in

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
QUICK = {"first-run", "planning"}
"""Run by `make test`; the others take longer."""
ELSEWHERE = {"cluster", "freeze-and-thaw"}
"""Run by `make test-cluster` and `make test-images`: tests/cluster/test_guide.py and tests/images/test_guide.py."""
NOT_EXECUTED: dict[str, int] = {"python": 1}
"""How many blocks of a guide are marked as such; each has its reason there."""
SERVER = "http://127.0.0.1:9000"
"""Where the guides' object store is; that of the tests has another port."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with new_user(tmp_path) as folder:
        yield folder


@contextmanager
def new_user(root: Path) -> Iterator[Path]:
    """An empty folder in the home of a new user; processes that run there end with the block."""
    home = root / "home"
    folder = home / "work"
    folder.mkdir(parents=True)
    with jobs_in(root):
        os.environ |= {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        yield folder


def _guides() -> list[object]:
    return [
        pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.long)
        for path in sorted(GUIDES.glob("*.md"))
        if path.stem not in ELSEWHERE
    ]


@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("guide", _guides())
def test_everything_in_a_guide_is_so(guide: Path, place: Path, request: pytest.FixtureRequest) -> None:
    """Write the files and type the commands; the next command shows an exit code other than 0."""
    server = request.getfixturevalue("moto").endpoint if SERVER in guide.read_text() else SERVER
    follow(guide, place, server)


def follow(guide: Path, place: Path, server: str = SERVER) -> None:
    """Write the files of a guide and type its commands in a folder; `server` takes the place of its object store."""
    num_steps = 0
    with ExitStack() as stack:
        terminals: dict[str, Terminal] = {}
        code = 0
        for block in blocks(guide):
            if block.not_executed is not None:
                continue
            if block.file is not None:
                path = Path(place, block.file).expanduser() if block.file[0] != "~" else Path(block.file).expanduser()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text.replace(SERVER, server))
                continue
            steps = list(block.steps())
            if block.language not in terminals:
                terminals[block.language] = stack.enter_context(Terminal(place, block.language))
            for step in steps:
                where = f"{guide.relative_to(ROOT)}, line {step.number}"
                assert code == 0 or step.typed == "echo $?", f"before {where}: exit code {code}, which is not shown"
                try:
                    code = terminals[block.language].do(step.replaced(SERVER, server))
                    if block.language == "pycon" and step.printed[-1:] not in {(), ("…",)}:
                        code = 0  # the exception is shown
                except AssertionError as error:
                    raise AssertionError(f"{where}: {error}") from None
                num_steps += 1
        assert code == 0, f"{guide.name} ends with exit code {code}, which is not shown"
    assert num_steps, f"{guide.name} has nothing to do"


def test_no_block_is_passed_over() -> None:
    """Every block is a file, a console, or marked with the reason why it is not executed."""
    marked: dict[str, int] = {}
    for path in GUIDES.glob("*.md"):
        for block in blocks(path):
            if block.not_executed is not None:
                marked[path.stem] = marked.get(path.stem, 0) + 1
            elif block.file is None:
                assert list(block.steps())
        assert "\n    " not in "".join(_outside_blocks(path)), f"{path.name}: an indented block would be passed over"
    assert marked == NOT_EXECUTED


def _outside_blocks(path: Path) -> Iterator[str]:
    inside = {number for block in blocks(path) for number in range(block.number, block.number + len(block.lines))}
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if number not in inside:
            yield line
