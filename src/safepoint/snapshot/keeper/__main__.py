"""The process itself: it listens, it lives as long as it is needed, and it cleans up behind the dead."""

import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

from safepoint.foundation import clock
from safepoint.snapshot.keeper.message_handler import MessageHandler
from safepoint.snapshot.keeper.recall import Recall
from safepoint.snapshot.keeper.reporting import Reporting
from safepoint.snapshot.keeper.shared_state import SharedState
from safepoint.snapshot.keeper.writer import Writer
from safepoint.snapshot.protocol.channel import Channel, check_same_user, listen
from safepoint.snapshot.protocol.plan import KeeperPlan

_LOOK_EVERY_S = 0.5


class _Keeper:
    def __init__(self, plan: KeeperPlan) -> None:
        self._plan = plan
        self._kept = SharedState(Reporting(plan.verbosity, plan.events))
        self._recall = Recall(self._kept, plan.scratch)
        self._hearing = MessageHandler(self._kept, self._recall)
        self._server = listen(plan.name)
        self._owner_is_dead = False

    def run(self) -> None:
        for body, name in ((self._accept, "accept"), (Writer(self._kept).run, "write")):
            threading.Thread(target=body, name=f"safepoint-{name}", daemon=True).start()
        self._watch_owner()
        with self._kept.changed:
            self._kept.changed.wait_for(self._kept.may_end)
        self._recall.remove()
        if self._plan.scratch is not None and self._owner_is_dead:
            shutil.rmtree(self._plan.scratch, ignore_errors=True)

    def _watch_owner(self) -> None:
        if self._plan.owner_pid is None:
            self._owner_is_dead = True
            while os.read(0, 4096):
                self._owner_is_dead = False  # it says goodbye
            return
        try:
            descriptor = os.pidfd_open(self._plan.owner_pid)
        except OSError:  # not every sandbox has it
            while Path(f"/proc/{self._plan.owner_pid}").exists():
                clock.sleep(_LOOK_EVERY_S)
            return
        select.select([descriptor], [], [])

    def _accept(self) -> None:
        while True:
            connected, _ = self._server.accept()
            try:
                check_same_user(connected)
            except OSError:
                connected.close()
                continue
            threading.Thread(target=self._serve, args=[connected], daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        channel = Channel(connected)
        received = channel.receive()
        try:
            hello = received[0] if received is not None else {}
            start, rank = self._kept.admit(channel, hello["rank"], hello["num_ranks"], hello["restart"])
        except KeyError:  # whoever it is does not speak to keepers
            channel.close()
            return
        try:
            channel.send({"type": "welcome", "pid": os.getpid()})
            while (received := channel.receive()) is not None:
                self._hearing.hear(start, rank, *received)
        except Exception as error:  # noqa: BLE001  the rank must be known to be gone, whatever it has said
            self._kept.reporting.log.warning(
                "the keeper does not understand rank %s: %s: %s", rank.rank, type(error).__name__, error
            )
        self._hearing.gone(start, rank)
        channel.close()


def _main(arguments: list[str]) -> None:
    # Platforms signal every process of a job; this one ends after those whose snapshots it keeps.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    _Keeper(KeeperPlan(**json.loads(arguments[0]))).run()


if __name__ == "__main__":
    _main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
