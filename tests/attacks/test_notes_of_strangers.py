"""Someone notes the newest checkpoint in `.safepoint/passed-over.json`, so that no start uses it.

A start says why. Otherwise, a run would repeat the steps since the checkpoint before, and only say that a newer one
was moved aside.
"""

import json
from pathlib import Path

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.foundation.environment import Place
from safepoint.foundation.events.run_events import CheckpointRejected
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared


def test_a_start_reports_what_it_passes_over(tmp_path: Path) -> None:
    output = prepared(tmp_path)
    commit(output, 10)
    newest = commit(output, 20)
    note = {newest.name: digest_bytes((newest / MANIFEST_NAME).read_bytes())}
    (output.control / "passed-over.json").write_text(json.dumps(note))
    events: list[Event] = []
    peers, settings = Peers(Place(), timeout_s=1), RunSettings()
    first = FirstStart(peers, output, None, settings)
    point = CheckpointChooser(peers, output, Folders(), None, settings, first, events.append).choose()
    assert point is not None
    assert point.path.name == "checkpoint-10"
    (rejected,) = [event for event in events if isinstance(event, CheckpointRejected)]
    assert rejected.path == str(newest)
    assert "passed-over.json names it" in rejected.reason
