"""What a keeper's process is given to begin: one command-line argument."""

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
