"""The keeper's process: accepts connections, and runs as long as it is needed.

If its owner (the process that started it) was killed, the keeper removes the owner's temporary folder.
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.channels.channel import Channel, ChannelError, close_all
from safepoint.foundation.channels.codec import ProtocolError, encode
from safepoint.foundation.processes import wait_for_end
from safepoint.snapshot.keeper.earlier_snapshot import EarlierSnapshotLinks
from safepoint.snapshot.keeper.held_folder import Reporter
from safepoint.snapshot.keeper.keeper_state import KeeperState, Rank, RankGroup
from safepoint.snapshot.keeper.message_handler import MessageHandler
from safepoint.snapshot.keeper.writer import write_snapshots
from safepoint.snapshot.protocol.channel import check_same_user
from safepoint.snapshot.protocol.messages import Hello, KeeperPlan, Refused, Welcome, decode_rank_message

_LOOK_EVERY_S = 0.5
_PAUSE_S = 0.1


class _Keeper:
    def __init__(self, plan: KeeperPlan) -> None:
        self._plan = plan
        self._state = KeeperState(Reporter(plan.verbosity, plan.events))
        self._earlier = EarlierSnapshotLinks(self._state, plan.scratch)
        self._handler = MessageHandler(self._state, self._earlier)
        self._server = socket.socket(fileno=plan.listening)
        self._owner_was_killed = False

    def run(self) -> None:
        threading.Thread(target=self._accept, name="safepoint-accept", daemon=True).start()
        threading.Thread(target=write_snapshots, args=[self._state], name="safepoint-write", daemon=True).start()
        self._wait_for_owner()
        with self._state.changed:
            self._state.changed.wait_for(self._state.may_end)
        self._earlier.remove()
        if self._plan.scratch is not None and self._owner_was_killed:
            shutil.rmtree(self._plan.scratch, ignore_errors=True)

    def _wait_for_owner(self) -> None:
        if self._plan.owner_pid is None:
            self._owner_was_killed = True
            while os.read(0, 4096):
                # Only an owner that ends normally writes to the pipe before it closes the pipe.
                self._owner_was_killed = False
            return
        try:
            descriptor = os.pidfd_open(self._plan.owner_pid)
        except OSError:  # some sandboxes do not support this call
            while Path(f"/proc/{self._plan.owner_pid}").exists():
                clock.sleep(_LOOK_EVERY_S)
            return
        wait_for_end(descriptor)

    def _accept(self) -> None:
        """Accept connections, for as long as the process runs.

        `accept` fails while the machine has no free file descriptor, and a thread cannot start without memory.
        Programs of other users can cause both. A rank whose connection is closed connects again.
        """
        while True:
            try:
                connected, _ = self._server.accept()
            except OSError:
                clock.sleep(_PAUSE_S)  # `accept` would fail again at once
                continue
            try:
                check_same_user(connected)
                threading.Thread(target=self._serve, args=[Channel(connected)], daemon=True).start()
            except (OSError, RuntimeError):
                connected.close()

    def _serve(self, channel: Channel) -> None:
        try:
            group, rank = self._admit(channel)
        except (OSError, ProtocolError):  # the process at the other end is not a rank of this release
            channel.close()
            return
        try:
            while True:
                self._handler.handle(group, rank, *channel.receive())
        except ChannelError:
            pass  # the rank has ended
        except Exception as error:  # noqa: BLE001  even after an invalid message the disconnection must be handled
            self._state.reporter.log.warning(
                "rank %s sent an invalid message, and its connection is closed: %s: %.300s",
                rank.number,
                type(error).__name__,
                error,
            )
        self._handler.disconnected(group, rank)
        channel.close()

    def _admit(self, channel: Channel) -> tuple[RankGroup, Rank]:
        body, descriptors = channel.receive()
        close_all(descriptors)
        try:
            hello = decode_rank_message(body)
            if not isinstance(hello, Hello):
                raise ProtocolError(f"the first message must be Hello, not {type(hello).__name__}")  # noqa: TRY301
        except ProtocolError as error:
            self._state.reporter.log.warning("the keeper refused a connection: %.300s", error)
            channel.send(encode(Refused(reason=str(error))))
            raise
        group, rank = self._state.admit(channel, hello)
        rank.send(Welcome(pid=os.getpid(), identity=self._state.folder.identity))
        return group, rank


def _main(arguments: list[str]) -> None:
    # Ignore these signals. Platforms send them to every process of a job, and the keeper must not end before the
    # ranks whose snapshots it writes.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    _Keeper(KeeperPlan(**json.loads(arguments[0]))).run()


if __name__ == "__main__":
    _main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
