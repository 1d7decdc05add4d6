"""The connection between a launcher and its template: messages arrive as they were, and anything else is refused."""

import json
import os
import socket
import struct

import pytest

from safepoint.foundation.channels.channel import ChannelError
from safepoint.training.rank_processes.messages import (
    Birth,
    Born,
    Import,
    Message,
    Plan,
    Ready,
    Stale,
    TemplateChannel,
    Unfit,
)
from tests.support.patience import PATIENCE

BIRTH = Birth(
    arguments=(("train.py", "--x"), ("train.py",)),
    environments=({"A": "\udcff"}, {"B": ""}),
    folder="/",
    umask=0o22,
    cores=(0, 3),
    limits={"7": (10, None)},
)


def connected() -> tuple[TemplateChannel, TemplateChannel, socket.socket]:
    one, other = socket.socketpair()
    return TemplateChannel(one), TemplateChannel(other), other


@pytest.mark.parametrize(
    "message",
    [
        Plan(program=("a.py", "-x"), is_module=False, launcher_pid=3, left_out=("ray",)),
        BIRTH,
        Import(modules=tuple(f"module_{number}" for number in range(20_000))),
        Ready(num_modules=4000, took_s=1.5),
        Born(pids=(1, 2)),
        Stale(module="torch"),
        Unfit(name="ray", reason="has started a thread"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    """Also long ones, in several pieces, and text that is no Unicode."""
    one, other, _ = connected()
    pid = os.fork()
    if pid == 0:
        try:
            one.send_message(message)
        finally:
            os._exit(0)
    assert other.receive_message(60 * PATIENCE) == (message, [])
    os.waitpid(pid, 0)
    one.close()
    other.close()


def test_descriptors_come_with_their_message() -> None:
    """The receiver gets copies, which lead to the same file."""
    one, other, _ = connected()
    reader, writer = os.pipe()
    one.send_message(BIRTH, [writer, writer])
    message, descriptors = other.receive_message(60 * PATIENCE)
    assert message == BIRTH
    assert len(descriptors) == 2
    os.write(descriptors[1], b"x")
    assert os.read(reader, 1) == b"x"
    for descriptor in (reader, writer, *descriptors):
        os.close(descriptor)
    one.close()
    other.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        struct.pack("<II", 3, 0) + b"abc",
        struct.pack("<II", 2, 0) + b"[]",
        *(
            struct.pack("<II", len(body := json.dumps(document).encode()), 0) + body
            for document in (
                {"type": "Born"},
                {"type": "Born", "pids": 3},
                {"type": "Born", "pids": [], "more": 1},
                {"type": "Nothing"},
                {"type": ["Born"]},
                {"type": "Ready", "num_modules": "many", "took_s": 1.0},
            )
        ),
        struct.pack("<II", 50_000, 0) + b"[" * 50_000,
    ],
)
def test_garbage_is_no_message(garbage: bytes) -> None:
    """Each is refused as a whole, and no descriptor stays open."""
    one, other, raw = connected()
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(raw, [garbage], [0])
    with pytest.raises(ChannelError, match="it "):
        one.receive_message(60 * PATIENCE)
    assert len(os.listdir("/proc/self/fd")) == before
    one.close()
    other.close()


def test_a_half_message_ends_with_its_sender_or_its_time() -> None:
    """The receiver never waits for longer than it was given."""
    one, other, raw = connected()
    raw.send(struct.pack("<II", 100, 0) + b"half")
    with pytest.raises(ChannelError, match="does not answer"):
        one.receive_message(0.05)
    other.close()
    with pytest.raises(ChannelError, match="it has ended"):
        one.receive_message(60 * PATIENCE)
    with pytest.raises(ChannelError, match="it has ended"):
        one.send_message(Stale(module="x"))
    one.close()
