"""The table of extras in the README has exactly the extras of the package, with what each of them adds."""

import re
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"\| (?P<names>`\w+`(?:, `\w+`)*) \| (?P<adds>[^|]+) \| [^|]+ \|")
_NAMES = {"pytorch": "torch", "thekubeflowsdk": "kubeflow", "jinja": "jinja2"}
"""The requirement for a name in the table that is spelt in another way."""


def _declared() -> dict[str, set[str]]:
    """For each extra: the packages and the other extras that it adds."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, set[str]] = {}
    for extra, requirements in project["optional-dependencies"].items():
        matches = [re.match(r"(safepoint\[(\w+)\]|[\w-]+)", text) for text in requirements]
        found[extra] = {match[2] or match[1] for match in matches if match is not None}
    return found


def _listed() -> dict[str, set[str]]:
    text = (_ROOT / "README.md").read_text()
    table = text.partition("| extra | adds |")[2].partition("\n\n")[0]
    found: dict[str, set[str]] = {}
    for row in filter(None, map(_ROW.fullmatch, table.splitlines())):
        words = [re.sub(r"[^a-z0-9]", "", word.lower()) for word in re.split(r", | and ", row["adds"])]
        for name in re.findall(r"\w+", row["names"]):
            found[name] = {_NAMES.get(word, word) for word in words}
    return found


def test_the_readme_lists_every_extra_with_what_it_adds() -> None:
    assert _listed() == _declared()
