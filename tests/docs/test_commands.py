"""Every command and option that a document shows exists, every link leads to a file or heading, tables are whole."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from safepoint.cli.lazy import Command
from safepoint.cli.main import root
from tests.docs.markdown import blocks, links

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
GUIDES = ROOT / "docs" / "guides"
_SHELL = {"", "bash", "console", "sh", "shell"}
_TYPED = re.compile(r"(?:\$ )?((?:[A-Z_]+=\S+ )*safepoint(?: .*)?)")
_ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>&1"}


def _commands(path: Path) -> Iterator[tuple[int, list[str], bool]]:
    """The commands in a document's blocks, complete, and those in its sentences, which may be abbreviated."""
    text = path.read_text()
    lines = text.splitlines()
    inside: set[int] = set()
    for block in blocks(path):
        inside.update(range(block.number - 1, block.number + len(block.lines) + 1))
        if block.language in _SHELL and path.parent != GUIDES:  # those are executed, the wrong ones too
            for number, line in _joined(block.lines, block.number):
                if found := _TYPED.fullmatch(line):
                    yield number, _words(found[1]), True
    for number, line in enumerate(lines, 1):
        if number not in inside and (found := re.fullmatch(r"    (?:\$ )?(safepoint .*)", line)):
            yield number, _words(found[1]), True
    prose = "\n".join("" if number in inside else line for number, line in enumerate(lines, 1))
    for found in re.finditer(r"(?<!`)`(safepoint\s[^`]+)`(?!`)", prose):
        yield prose.count("\n", 0, found.start()) + 1, _words(" ".join(found[1].split())), False


def _joined(lines: tuple[str, ...], first: int) -> Iterator[tuple[int, str]]:
    """Lines of a shell, each joined with the lines that a backslash adds to it."""
    whole, begin = "", first
    for number, line in enumerate(lines, first):
        begin = begin if whole else number
        whole += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield begin, whole
            whole = ""


def _words(line: str) -> list[str]:
    """The words of the command: without the variables before it, and without what follows in the shell."""
    words = shlex.split(line, comments=True)
    words = words[words.index("safepoint") + 1 :]
    return words[: next((at for at, word in enumerate(words) if word in _ENDS), len(words))]


def _check(words: list[str], *, is_whole: bool) -> None:
    """Parse the command without running it.

    Raises:
        AssertionError: there is no such command or option.
        TyperException: the arguments are invalid.
    """
    group = root()
    command: Command = group
    path: list[str] = []
    while words and not words[0].startswith("-") and (is_whole or not words[0].isupper()):  # COMMAND stands for any
        assert isinstance(command, TyperGroup)
        path, words = [*path, words[0]], words[1:]
        assert path[-1] in command.commands, f"there is no `safepoint {' '.join(path)}`"
        command = group.load(*path)
        if isinstance(command, TyperCommand):
            if is_whole and "--help" not in words:
                command.make_context(" ".join(path), list(words), resilient_parsing=False)
            else:
                _check_options(command, words)
            return
    _check_options(command, words)


def _check_options(command: Command, words: list[str]) -> None:
    known = {"--install-completion", "--show-completion"}
    context = typer.Context(command)
    try:
        command.make_parser(context).parse_args([word for word in words if word not in known])
    except typer.TyperException as error:
        if type(error).__name__ != "BadOptionUsage":  # a sentence may leave out the value
            raise


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_exist(document: Path) -> None:
    """Commands in blocks are parsed as if typed; commands in sentences need existing names and options."""
    wrong: list[str] = []
    for number, words, is_whole in _commands(document):
        try:
            _check(words, is_whole=is_whole)
        except (AssertionError, typer.TyperException) as error:
            text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
            wrong.append(f"{document.name}, line {number}: safepoint {' '.join(words)}: {text}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("safepoint rnu train.py", "there is no `safepoint rnu`"),
        ("safepoint checkpoints lst out", "there is no `safepoint checkpoints lst`"),
        ("safepoint run --save-stps 10 train.py", "No such option"),
        ("safepoint run --save-steps ten train.py", "valid integer"),
        ("safepoint scale tiny", "Missing option"),
        ("AWS_REGION=x safepoint suspend --now tiny | cat", "No such option"),
    ],
)
def test_what_is_wrong_is_found(line: str, said: str) -> None:
    """The checks of this module detect wrong commands."""
    with pytest.raises((AssertionError, typer.TyperException)) as caught:
        _check(_words(line), is_whole=True)
    error = caught.value
    assert said in (error.format_message() if isinstance(error, typer.TyperException) else str(error))


def test_many_commands_are_looked_at() -> None:
    """The documents contain enough commands in the form that this module finds."""
    found = [command for document in DOCUMENTS for command in _commands(document)]
    assert sum(is_whole for _, _, is_whole in found) > 15
    assert sum(not is_whole for _, _, is_whole in found) > 40


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """Every link leads to a file that exists, and to a heading in it if the link names one."""
    broken: list[str] = []
    for link in links(document):
        name, _, heading = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (heading and heading not in _headings(target)):
            broken.append(link)
    assert not broken


def _broken_rows(lines: list[str]) -> list[str]:
    """The lines that begin a row of a table and do not end it: Markdown has no rows of several lines."""
    return [line for line in lines if line.lstrip().startswith("|") and not line.rstrip().endswith("|")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_row_of_a_table_is_one_line(document: Path) -> None:
    """A row that is wrapped would end the table, and show its bars as text."""
    assert not _broken_rows(document.read_text().splitlines())


def test_a_wrapped_row_is_found() -> None:
    """Also in a table that is indented, as in a list."""
    assert _broken_rows(["| a | b |", "|---|---|", "   | 1 | two", "   words |"]) == ["   | 1 | two"]


def _headings(path: Path) -> set[str]:
    """The anchors of a document's headings."""
    lines = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_the_help_of_run_has_the_exit_codes_of_the_document() -> None:
    """Both list the codes with which Safepoint itself ends a training."""
    table = (ROOT / "docs" / "exit-codes.md").read_text().split("## Other commands")[0]
    documented = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    codes = (root().load("run").help or "").split("Exit codes: ")[1].replace("128 + n", "").split("any other code")[0]
    assert len(documented) > 5
    assert sorted(re.findall(r"\d+", codes)) == sorted(documented)
