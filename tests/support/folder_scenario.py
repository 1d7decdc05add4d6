"""What a run does in its output folder, without training: `python -m tests.support.folder_scenario FOLDER`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies, prune
from safepoint.foundation.events.run_events import Pruned, PruneFailed
from safepoint.foundation.events.stream import Event
from safepoint.foundation.shared_folders.leases import reading
from tests.support.checkpoints import commit
from tests.support.commands import safepoint

FILES = {0: {"model.safetensors": b"weights" * 700, "sub/optimizer.pt": b"state" * 60}}


def attempt(root: Path, steps: Sequence[int] = (3,)) -> list[Event]:
    """Claim the folder, commit checkpoints, and keep the newest two; returns what pruning has reported."""
    output = OutputFolder(root)
    reported: list[Event] = []
    output.prepare()
    try:
        if output.claim(wait_s=0, waiting=lambda who: None):
            output.clean()
        output.next_attempt("run", after=0)
        for step in steps:
            commit(output, step, FILES)
            prune(output, parse_policies("newest=2"), reported.append)
    finally:
        output.release("attempt")
    return reported


def whole(root: Path) -> None:
    """Everything that Safepoint does with folders, each with its result."""
    reported = attempt(root, [1, 2, 3, 3])
    assert not [event for event in reported if isinstance(event, PruneFailed)], reported
    assert [event.step for event in reported if isinstance(event, Pruned)] == [1]
    assert OutputFolder(root).steps() == [3, 2]
    for step in (2, 3):
        assert verify(root / f"checkpoint-{step}").is_valid
    with reading(root / "checkpoint-3/safepoint-manifest.json"):
        assert safepoint("checkpoints", "verify", root / "checkpoint-3").code == 0
    for command in (
        ("copy", root / "checkpoint-3", root.parent / "copy"),
        ("export", root / "checkpoint-3", root.parent / "model"),
        ("prune", root, "--keep", "newest=1"),
        ("repair", root),
        ("list", root),
    ):
        done = safepoint("checkpoints", *command)
        assert done.code == 0, (command, done.stderr)
    assert OutputFolder(root).steps() == [3]
    assert verify(root.parent / "copy/checkpoint-3").is_valid
    assert (root.parent / "model/model.safetensors").read_bytes() == FILES[0]["model.safetensors"]


if __name__ == "__main__":
    whole(Path(sys.argv[1]))
    print("done")
