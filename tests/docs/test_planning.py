"""docs/planning.md: its consoles are executed, and the figures of its tables are those of the commands above them."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import blocks, pattern, squeezed
from tests.support.commands import safepoint
from tests.unit.planning.test_documents import LLAMA_8B, LLAMA_70B, QWEN_7B

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
PICTURE = PAGE.parent / "pictures" / "ettr.svg"
_GIB = 1 << 30


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configurations that the page names, in an empty folder."""
    for name, fields in (("llama-8b", LLAMA_8B), ("qwen-7b", QWEN_7B), ("llama-70b", LLAMA_70B)):
        (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    monkeypatch.chdir(tmp_path)


def _commands() -> list[str]:
    return re.findall(r"^    safepoint (plan .*)", PAGE.read_text(), re.MULTILINE)


def _rows(head: str) -> dict[str, list[str]]:
    """The cells of the table with this head, by the first cell of a row."""
    lines = PAGE.read_text().partition(f"{head}\n")[2].splitlines()[1:]
    found: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[first] = cells
    assert found, head
    return found


def test_the_consoles() -> None:
    num_steps = 0
    for block in blocks(PAGE):
        for step in block.steps():
            outcome = safepoint(*shlex.split(step.typed)[1:])
            assert outcome.code == 0, (step.typed, outcome.stderr)
            printed = "".join(f"{squeezed(line)}\n" for line in outcome.stdout.splitlines())
            assert pattern(step.printed).fullmatch(printed), f"{step.typed}\n{outcome.stdout}"
            num_steps += 1
    assert num_steps == 3


def _simulated(command: str) -> tuple[Mapping[tuple[int, str], str], Mapping[int, Any], list[str]]:
    """The ETTR by ranks and policy as the page writes it, the costs of a commit by ranks, and the printed lines."""
    words = shlex.split(command)
    document = safepoint(*words, "--json").document
    ettr = {
        (row["ranks"], row["policy"]): f"{100 * row['ettr']:.2f} ± {100 * row['ettr_half_width']:.2f}"
        for row in document["results"]
    }
    return ettr, {row["ranks"]: row for row in document["commits"]}, safepoint(*words).stdout.splitlines()


@pytest.mark.timeout(120)
def test_the_table_and_the_picture_of_the_ettr() -> None:
    (command,) = (one for one in _commands() if "--svg ettr.svg" in one)
    ettr, _, _ = _simulated(command)
    head = "| ranks | 8 | 1,024 | 16,384 | 65,536 | 131,072 |"
    rows = _rows(head)
    counts = [int(cell.replace(",", "")) for cell in head.strip("| ").split(" | ")[1:]]
    assert len(rows) == 8
    for first, cells in rows.items():
        policy = first.split("`")[1]
        assert cells == [ettr[count, policy] for count in counts]
    assert Path("ettr.svg").read_text() == PICTURE.read_text(), "draw docs/pictures/ettr.svg again with this command"


@pytest.mark.timeout(120)
def test_the_table_of_a_commit() -> None:
    (command,) = (one for one in _commands() if "--store-requests" in one)
    ettr, _, lines = _simulated(command)
    head = "| ranks | vote | manifest | all marks | requests | durable in | ETTR of `safepoint` | of `hf-best` |"
    begin = lines.index("a commit of Safepoint")
    for count, (vote, manifest, marks, requests, durable, ours, theirs) in _rows(head).items():
        (line,) = (one for one in lines[begin:] if one.startswith(f"{count} "))
        shown = re.split(r"\s{2,}", line)
        assert [shown[at] for at in (1, 3, 5, 6, 7)] == [vote, requests, manifest, marks, durable]
        number = int(count.replace(",", ""))
        assert [ettr[number, policy] for policy in ("safepoint", "hf-best")] == [ours, theirs]


def test_the_documents_models() -> None:
    """The column "computed" of the table of the documents' figures."""
    commands = [one for one in _commands() if "--save-total-limit 2 --json" in one]
    ddp, fsdp, zero = (safepoint(*shlex.split(one)).document for one in commands)
    computed = {first: cells[1] for first, cells in _rows("| figure | documents | computed | explanation |").items()}

    def term(plan: Any, name: str) -> int:
        return next(one["documented_bytes"] for one in plan["first_pod"]["terms"] if one["name"].startswith(name))

    def kept_of(plan: Any) -> float:
        return term(plan, "N x checkpoint") / 2

    gib = {
        "DDP (8B): checkpoint, download": [ddp["checkpoint"]["size_bytes"], term(ddp, "checkpoint download")],
        "DDP: local checkpoints, peak": [term(ddp, "N x checkpoint"), term(ddp, "consolidation peak")],
        "DDP: final model": [ddp["final_bytes"]],
        "DDP: base cache": [term(ddp, "base cache")],
        "FSDP (7B): checkpoint of a pod": [kept_of(fsdp)],
        "FSDP: peak": [term(fsdp, "consolidation peak")],
        "FSDP: final model, base cache": [fsdp["final_bytes"], term(fsdp, "base cache")],
        "ZeRO-3: peak, final model": [term(zero, "consolidation peak")],
        "ZeRO-3: base cache": [term(zero, "base cache")],
    }
    decimal = {
        "ZeRO-3 (70B LoRA): checkpoint of a pod": [kept_of(zero)],
        "ZeRO-3: checkpoint download": [term(zero, "checkpoint download")],
    }
    assert computed.keys() == gib.keys() | decimal.keys()
    for figures, unit, name in ((gib, _GIB, "GiB"), (decimal, 1e9, "GB")):
        for what, values in figures.items():
            stated, stated_unit = computed[what].split()
            digits = len(stated.partition(".")[2])
            assert stated_unit == name
            assert {f"{value / unit:.{digits}f}" for value in values} == {stated}, what
