"""How ranks of a node come to copy snapshots together: the first rank listens, the others on its node connect."""

import contextlib
import socket

from safepoint.snapshot.protocol.channel import (
    Channel,
    check_same_user,
    connect,
    keep_from_children,
    listen,
    new_name,
)
from safepoint.snapshot.replicas.team import Team
from safepoint.snapshot.replicas.team_helper import Helper
from safepoint.snapshot.replicas.team_lead import Lead
from safepoint.training.collective.peers import Peers
from safepoint.training.context.session import Session
from safepoint.training.engine.loop import TrainingLoop

_LEAST_BYTES = 64 << 20
"""Less than this is copied before ranks have told each other about it."""


def form_team(session: Session, peers: Peers, framework: TrainingLoop) -> Team | None:
    """Let the ranks of the first one's node find each other, where all ranks hold the same; all ranks call this.

    Returns:
        None on ranks that copy what they write themselves.

    Raises:
        PeerError: a rank is gone.
    """
    place = session.place
    if place.world_size == 1:
        return None
    server: socket.socket | None = None
    name = ""
    if place.is_first and _wants_team(session, framework):
        name = new_name()
        with contextlib.suppress(OSError):
            server = listen(name)
            keep_from_children(server)
    name, node = peers.from_first((name if server is not None else "", place.node))
    if not name:
        return None
    channel = _reach(name, place.rank) if place.node == node and not place.is_first else None
    is_there = place.is_first or place.node != node or channel is not None
    are_there = all(peers.gather(is_there))
    if server is not None:
        with server:
            return _lead(server, session, place.local_world_size - 1) if are_there else None
    if channel is None or are_there:
        return None if channel is None else Helper(channel, timeout_s=session.settings.peer_timeout_s)
    channel.close()
    return None


def _wants_team(session: Session, framework: TrainingLoop) -> bool:
    if framework.strategy != "ddp" or session.place.local_world_size == 1 or session.keeping.keeper is None:
        return False
    # On CPUs the ranks share what copies are made of: processors, and the way to the memory (docs/benchmarks.md).
    wish = session.settings.snapshot_sharing
    on_device = any(one.device.type == "cuda" for one in framework.parameters() if one.requires_grad)
    return wish == "on" or (wish == "auto" and on_device)


def _reach(name: str, rank: int) -> Channel | None:
    try:
        channel = connect(name)
        channel.send({"type": "hello", "rank": rank})
    except OSError:
        return None
    return channel


def _lead(server: socket.socket, session: Session, count: int) -> Lead | None:
    channels: dict[int, Channel] = {}
    try:
        server.settimeout(session.settings.peer_timeout_s)
        while len(channels) < count:
            connected, _ = server.accept()  # they have connected before all ranks have met
            check_same_user(connected)
            connected.setblocking(True)
            keep_from_children(connected)
            channel = Channel(connected)
            received = channel.receive()
            if received is not None:
                channels[received[0]["rank"]] = channel
    except OSError as error:
        session.log.debug("the ranks of this node copy no snapshots together: %s", error)
        for channel in channels.values():
            channel.close()
        return None
    least_bytes = 0 if session.settings.snapshot_sharing == "on" else _LEAST_BYTES
    return Lead(dict(sorted(channels.items())), least_bytes=least_bytes)
