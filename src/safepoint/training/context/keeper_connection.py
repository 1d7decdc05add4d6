"""This rank's connection to its node's keeper, the process that writes snapshots to disk.

If the keeper dies, the rank connects to the keeper that replaces it.
"""

import hashlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from safepoint.foundation.environment import Place, is_launched
from safepoint.foundation.processes import stat_fields
from safepoint.settings.run_settings import RunSettings
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.memory import block
from safepoint.snapshot.protocol.messages import KeeperPlan, Leave

_log = logging.getLogger("safepoint")
_START_S = 20.0
_keeper_process: KeeperProcess | None = None
"""The keeper that this process started. The module keeps this object, because its deletion would end the keeper."""


class KeeperConnection:
    """The connection of one rank.

    Args:
        settings: the options of the run. `settings.keeper` is the key with which ranks connect to the launcher's
            keeper; None if there is no launcher.
        place: the position of this rank among the ranks.
        on_leave: called when the keeper requests that this rank ends. The function has to end the process.
    """

    def __init__(self, settings: RunSettings, place: Place, on_leave: Callable[[Leave], None]) -> None:
        self._place = place
        self._on_leave = on_leave
        self._settings = settings
        self._is_possible = block.are_available() and settings.snapshot_slots != 0
        self._may_start = settings.keeper is None
        self._key = settings.keeper
        self.client: KeeperClient | None = None
        """The client of the last connection, which may be lost (see `is_connected`). None before `open`, after
        `disable`, and if no keeper answered."""

    @property
    def is_connected(self) -> bool:
        """Whether the connection to the keeper works."""
        return self.client is not None and self.client.is_alive

    def disable(self) -> None:
        """Use no keeper until the next call of `open` or `reopen`; called if the keeper cannot use the folder."""
        self.client = None

    def open(self, job_secret: bytes | None = None) -> KeeperClient | None:
        """Connect to the keeper. If no launcher has started a keeper, the first rank of the node starts one.

        Args:
            job_secret: bytes that only the ranks of this job know; None for a single rank.

        Returns:
            The client; None if snapshots are not possible here, or if no keeper answers in time.
        """
        if self._key is None:
            self._key = _key_for(self._place, job_secret)
        return self._reach_or_start(_START_S) if self.client is None else self.client

    def reopen(self) -> KeeperClient | None:
        """If the connection is lost, connect again without waiting. Return None if no new keeper answers yet."""
        return self.client if self.is_connected else self._reach_or_start(0.0)

    def _reach_or_start(self, wait_s: float) -> KeeperClient | None:
        """Connect to the running keeper. Return None if there is no keeper to connect to.

        If no keeper runs, and no launcher starts one, the node's first rank starts the keeper.

        Args:
            wait_s: how long to wait for a keeper that is starting.
        """
        if self._is_possible and not self._reach(0.0):
            if self._may_start and self._place.local_rank == 0:
                self._start()
            if wait_s > 0:
                self._reach(wait_s)
        return self.client

    def _reach(self, wait_s: float) -> bool:
        place = self._place
        assert self._key is not None, "`open` was not called"
        self.client = KeeperClient.connect(
            self._key,
            wait_s=wait_s,
            rank=place.rank,
            num_ranks=place.local_world_size,
            restart=place.restart,
            on_leave=self._on_leave,
        )
        return self.client is not None

    def _start(self) -> None:
        # Torchrun's agent restarts the ranks, so the keeper has to live as long as the agent. Without torchrun, the
        # keeper lives as long as this rank.
        global _keeper_process  # noqa: PLW0603  the keeper outlives this connection
        owner = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        events = str(self._settings.job_events) if self._settings.job_events else None
        assert self._key is not None
        plan = KeeperPlan(key=self._key, owner_pid=owner, verbosity=self._settings.verbosity, events=events)
        try:
            _keeper_process = KeeperProcess(plan)
        except OSError as error:
            _log.warning(
                "the keeper (the process that writes snapshots to disk) cannot be started: %s; training waits for "
                "each save",
                error.strerror,
            )


def _key_for(place: Place, job_secret: bytes | None) -> str:
    """Return the keeper's key for ranks that Safepoint's launcher has not started.

    All ranks of the node derive the same key. Other users cannot derive it.

    The key is made from data of one process: the process that restarts the ranks, or the rank itself if it is the
    only rank. The secret part is the content of `/proc/<pid>/auxv` of this process. This file holds random addresses,
    and only the user of the process can read it. If the process belongs to another user, as under Slurm, `job_secret`
    is used instead.
    """
    owner = os.getppid() if is_launched(place) else os.getpid()
    try:
        secret = Path(f"/proc/{owner}/auxv").read_bytes()
    except OSError:
        secret = b""
    secret = secret or job_secret or secrets.token_bytes(16)
    digest = hashlib.sha256(_unique_id(owner).encode() + secret).hexdigest()
    return f"safepoint-{os.getuid()}-of-{owner}-{digest}"


def _unique_id(pid: int) -> str:
    """Return a text that tells a process from processes with the same pid in other pods or at other times.

    The text is `0` if the process cannot be examined.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return f"{namespace}-{stat_fields(Path(f'/proc/{pid}'))[19].decode()}"  # the field with the time of its start
    except (OSError, IndexError):
        return "0"
