"""This rank's way to its node's keeper: found, or started, and found again after it has died."""

import os
from collections.abc import Callable
from pathlib import Path

from safepoint.foundation.environment import Place
from safepoint.settings.run_settings import RunSettings
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.host import KeeperHost
from safepoint.snapshot.memory import block
from safepoint.snapshot.protocol.channel import Message
from safepoint.snapshot.protocol.plan import KeeperPlan

_START_S = 20.0
_process_host: KeeperHost | None = None


class KeeperConnection:
    """The connection of one rank.

    Args:
        settings: `keeper` names the one that the launcher has started.
        place: this rank.
        on_leave: see `Keeper`.
    """

    def __init__(self, settings: RunSettings, place: Place, on_leave: Callable[[Message], None]) -> None:
        self._place = place
        self._on_leave = on_leave
        self._verbosity = settings.verbosity
        self._events = str(settings.job_events) if settings.job_events else None
        self._is_possible = block.are_available() and settings.snapshot_slots != 0
        self._is_ours = settings.keeper is None
        self._name = settings.keeper or _name_for(place)
        self.keeper: KeeperClient | None = None
        """The connection, while there is one that works."""

    @property
    def is_connected(self) -> bool:
        """Whether a keeper that lives has what this rank handed over."""
        return self.keeper is not None and self.keeper.is_alive

    def open(self) -> KeeperClient | None:
        """Connect, and under plain torchrun start the keeper; None where there can be none."""
        if self._is_possible and self.keeper is None:
            if self._is_ours and self._place.local_rank == 0 and not self._reach(0.0):
                self._start()
            if self.keeper is None:
                self._reach(_START_S)
        return self.keeper

    def reopen(self) -> KeeperClient | None:
        """After a keeper has died: connect to the new one, if it is there by now."""
        if self.keeper is not None and self.keeper.is_alive:
            return self.keeper
        self.keeper = None
        if self._is_possible and not self._reach(0.0) and self._is_ours and self._place.local_rank == 0:
            self._start()
        return self.keeper

    def _reach(self, wait_s: float) -> bool:
        place = self._place
        self.keeper = KeeperClient.reach(
            self._name,
            wait_s=wait_s,
            rank=place.rank,
            num_ranks=place.local_world_size,
            restart=place.restart,
            on_leave=self._on_leave,
        )
        return self.keeper is not None

    def _start(self) -> None:
        # It lives as long as whoever starts the ranks anew, where somebody does.
        global _process_host  # noqa: PLW0603  the process's, like its signals
        owner = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        _process_host = KeeperHost(
            KeeperPlan(name=self._name, owner_pid=owner, verbosity=self._verbosity, events=self._events)
        )


def _name_for(place: Place) -> str:
    """Without a launcher of ours: what all ranks of the node know, and no other job."""
    owner = os.getppid() if place.world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return f"safepoint-{os.getuid()}-of-{owner}-{_unique(owner)}"


def _unique(pid: int) -> str:
    """What tells a process from others of its number: in another pod on the same network, or in earlier times."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        started = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError):
        return "0"
    return f"{namespace}-{started}"
