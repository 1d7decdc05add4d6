"""The keeper's process: `python -m safepoint.snapshot.keeper_process PLAN`. It imports no torch.

One thread listens to each rank, one writes, the main thread watches over the end: the keeper goes when its owner is
gone, no rank is connected, and nothing is left to write. It ignores the signals that end ranks.

__main__    the process: it takes connections, and lives as long as it is needed
kept        what the threads share, behind one condition: the starts of the ranks, the folder, who waits for what
folder      the output folder that is held
hearing     what a rank says, and what follows from it
writer      the thread that makes checkpoints of snapshots
rescue      what is made durable when ranks are gone or must go, together with other nodes
recall      what an earlier start has left, for the ranks that begin anew
reporting   the console and the streams of events
"""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlan:
    """What a keeper needs to begin.

    Args:
        name: under which ranks reach it.
        owner_pid: the process for which it lives on, or None for the one at the other end of its stdin.
        verbosity: of the console.
        scratch: a folder of the owner's, for this process too; removed here when the owner dies without a word.
        events: a stream of the job's for what happens, besides the one in the output folder.
    """

    name: str
    owner_pid: int | None = None
    verbosity: int = 0
    scratch: str | None = None
    events: str | None = None


def plan_text(plan: KeeperPlan) -> str:
    """`plan` as the process reads it."""
    return json.dumps(dataclasses.asdict(plan))


__all__ = ["KeeperPlan", "plan_text"]
