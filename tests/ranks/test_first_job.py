"""The notebook of the examples, in a real kernel and with a real training; and a watch that is interrupted."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.jobs.model.states import JobState
from tests.support.jobs_local import Place, jobs_in
from tests.support.notebook import executed, kernel, outputs

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_job.ipynb"
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with jobs_in(tmp_path) as place:
        yield place


def html_of(output: Any) -> str:
    return str(output["data"]["text/html"])


def results(document: Any, cell_id: str) -> list[Any]:
    """What a cell shows besides lines: with an unverified certificate, a cluster's client prints warnings."""
    return [output for output in outputs(document, cell_id) if output["output_type"] != "stream"]


def check_first_job(document: Any) -> int:
    """Check what each cell of the executed notebook shows, on this machine and on a cluster.

    Returns the step that was saved when the job was suspended.
    """
    [running] = results(document, "train")
    assert re.search(r'<span class="pill" data-tone="good">Running</span>', html_of(running))
    assert re.match(r"job-|train-", running["data"]["text/plain"])
    [suspended] = results(document, "suspend")
    receipt = re.search(r"<dt>Safe step</dt><dd>(\d+)</dd>", html_of(suspended))
    assert receipt is not None
    assert re.search(r"<dt>Digest of its manifest</dt><dd>xxh3-128:\w{32}</dd>", html_of(suspended))
    assert f"Safe step: {receipt[1]}" in suspended["data"]["text/plain"]
    [checkpoints] = results(document, "checkpoints")
    assert f">checkpoint-{receipt[1]}</td>" in html_of(checkpoints)
    [watched] = results(document, "resume")  # one picture, which has changed
    assert watched["output_type"] == "display_data"
    assert ">Complete</span>" in html_of(watched)
    assert "Finished at step 120" in watched["data"]["text/plain"]
    [jobs] = results(document, "jobs")
    assert ">Complete</span>" in html_of(jobs)
    assert results(document, "delete") == []
    return int(receipt[1])


def test_the_first_job(place: Place) -> None:
    """Executed from its first cell to the last: no step is trained twice, and the pictures are in the file."""
    document = executed(NOTEBOOK, place.root, dict(os.environ))
    step = check_first_job(document)
    watched = html_of(results(document, "resume")[0])
    assert all(
        outputs(document, cell.id) == results(document, cell.id) for cell in document.cells if "outputs" in cell
    )
    assert re.search(r"loss from step \d+ to step 120", watched)
    assert f"<title>resume at step {step}, " in watched
    assert "checkpoint-120" in watched
    assert place.jobs.jobs() == []
    assert sorted(path.name for path in (place.root / "out").glob("checkpoint-*")) == [
        "checkpoint-100",
        "checkpoint-120",
    ]


def test_an_interrupted_cell(place: Place) -> None:
    """The picture stays, with a note; the exception is a line, and the job completes."""
    place.jobs.submit(place.training("tiny", "--save-steps", "2", "--epochs", "2", "--step-ms", "200"))
    with kernel(place.root, dict(os.environ)) as running:
        running.run("from safepoint import LocalConfig, TrainerClient\nclient = TrainerClient(LocalConfig())")
        messages, answer = running.interrupted("client.watch_job('tiny')")
        assert (answer["status"], answer["ename"]) == ("error", "StoppedWatchingError")
        assert answer["traceback"] == ["stopped watching tiny; the job continues"]
        pictures = [one["content"] for one in messages if one["msg_type"] in {"display_data", "update_display_data"}]
        assert len({one["transient"]["display_id"] for one in pictures}) == 1
        assert "You stopped watching. The job continues" in html_of(pictures[-1])
        assert running.run("print('the next cell')") == "the next cell\n"
    assert place.complete("tiny").state is JobState.COMPLETE
