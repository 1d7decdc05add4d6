"""Reads the fenced blocks of a Markdown file as a list of steps.

    ```console      `$ command`, `> ` more of it, and what it prints
    ```pycon        `>>> statement`, `... ` more of it, and what it prints
    ```any          whose first line is `# name`: a file of that name

A block may be kept from being executed by a comment on the line above it, `<!-- not executed: why -->`.
Anything else is an error: nothing is passed over in silence.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_FENCE = re.compile(r"(`{3,}|~{3,})\s*([\w-]*)")
_FILE = re.compile(r"# ((?:~/)?[\w./-]+\.\w+)")
_NOT_EXECUTED = re.compile(r"<!-- not executed: (.+) -->")
_PROMPTS = {"console": ("$ ", "> "), "pycon": (">>> ", "... ")}
INTERRUPT = "^C"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a document.

    Args:
        language: behind the fence; may be empty.
        lines: what is in it.
        number: of its first line in the file, from 1.
        not_executed: why it is not to be executed; None when it is.
    """

    language: str
    lines: tuple[str, ...]
    number: int
    not_executed: str | None = None

    @property
    def file(self) -> str | None:
        """The name of the file that the block shows; None for other blocks."""
        found = _FILE.fullmatch(self.lines[0]) if self.lines and self.language not in _PROMPTS else None
        return found[1] if found else None

    @property
    def text(self) -> str:
        """The whole text of the block."""
        return "".join(f"{line}\n" for line in self.lines)

    def steps(self) -> Iterator["Step"]:
        """The commands of the block, and what each has to print.

        Raises:
            ValueError: it is no console.
        """
        first, more = _PROMPTS.get(self.language, ("", ""))
        if not first or not self.lines or not self.lines[0].startswith(first):
            raise ValueError(
                f"line {self.number}: a block `{self.language}` is neither a console nor a file, whose first line is "
                "`# name`; where it is not to be executed, say why above it: <!-- not executed: … -->"
            )
        typed: list[str] = []
        printed: list[str] = []
        number = self.number
        for at, line in enumerate(self.lines, self.number):
            if line.startswith(first):
                if typed:
                    yield Step(typed="\n".join(typed), printed=tuple(printed), number=number)
                typed, printed, number = [line[len(first) :]], [], at
            elif not printed and (line.startswith(more) or line == more.rstrip()) and len(typed) == at - number:
                typed.append(line[len(more) :])
            else:
                printed.append(line)
        yield Step(typed="\n".join(typed), printed=tuple(printed), number=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command or statement, and what it prints: `…` matches anything in a line, and any lines if it stands alone.

    Args:
        typed: one command, maybe of several lines.
        printed: the lines; one that is `^C` stands for that key, which is pressed when the lines above are there.
        number: of its line in the file.
    """

    typed: str
    printed: tuple[str, ...]
    number: int

    def replaced(self, shown: str, real: str) -> "Step":
        """The same step with one word replaced."""
        printed = tuple(line.replace(shown, real) for line in self.printed)
        return replace(self, typed=self.typed.replace(shown, real), printed=printed)

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """The printed lines, divided at each ^C."""
        parts: list[list[str]] = [[]]
        for line in self.printed:
            if line == INTERRUPT:
                parts.append([])
            else:
                parts[-1].append(line)
        return [tuple(part) for part in parts]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a file.

    Raises:
        ValueError: the last one has no end.
    """
    found: list[Block] = []
    fence, language, begin, inside = "", "", 0, list[str]()
    before = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        opening = _FENCE.match(line)
        if not fence and opening:
            fence, language, begin, inside = opening[1], opening[2], number + 1, []
            reason = _NOT_EXECUTED.fullmatch(before)
        elif fence and line.strip() == fence:
            why = None if reason is None else reason[1]
            found.append(Block(language=language, lines=tuple(inside), number=begin, not_executed=why))
            fence = ""
        elif fence:
            inside.append(line)
        before = line
    if fence:
        raise ValueError(f"{path}: the block at line {begin} has no end")
    return found


def pattern(lines: Sequence[str]) -> re.Pattern[str]:
    """A regular expression for text that consists of these lines."""
    parts = [
        r"(?:.*\n)*?" if line.strip() == "…" else "[^\n]*?".join(map(re.escape, squeezed(line).split("…"))) + r"\n"
        for line in lines
    ]
    return re.compile("".join(parts))


def squeezed(line: str) -> str:
    """The line with each gap of spaces reduced to two: the width of a column depends on its content."""
    return re.sub(r"(?<=\S) {2,}", "  ", line.rstrip())


def links(path: Path) -> Iterator[str]:
    """The targets of the links in a document, without web addresses."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" not in target:
            yield target


__all__ = ["INTERRUPT", "Block", "Step", "blocks", "links", "pattern", "squeezed"]
