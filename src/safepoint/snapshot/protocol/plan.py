"""The command-line argument of the keeper's process."""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlan:
    """What a keeper needs to start.

    Args:
        name: under which ranks connect to it; see `channel.new_keeper_name`.
        owner_pid: the keeper lives at least as long as this process; None: as long as its own stdin is open.
        verbosity: of the console.
        scratch: a temporary folder of the owner, which the keeper uses too, and removes if the owner is killed.
        events: a file for the job's events, besides the one in the output folder.
    """

    name: str
    owner_pid: int | None = None
    verbosity: int = 0
    scratch: str | None = None
    events: str | None = None


def plan_text(plan: KeeperPlan) -> str:
    """`plan` as JSON."""
    return json.dumps(dataclasses.asdict(plan))
