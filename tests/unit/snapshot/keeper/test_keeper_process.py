"""The keeper's process, as a program, and what it does with connections that do not follow the protocol."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safepoint.checkpoint.format.manifest import ManifestFacts, Trigger
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation import clock
from safepoint.foundation.channels.codec import encode
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from safepoint.snapshot.protocol import messages
from safepoint.snapshot.protocol.channel import names_of, new_keeper_key
from safepoint.snapshot.protocol.messages import CheckpointFacts, Hello, KeeperPlan, StagedFile
from tests.support.keeper_messages import RANK_MESSAGES

TIMEOUT_S = 60
HEADER = struct.Struct("<II")
HELLO = Hello(rank=7, num_ranks=1, restart=0)


def test_it_imports_no_torch() -> None:
    """It is there when ranks are, and costs no second and no memory of its own."""
    code = (
        "import sys, safepoint.snapshot.keeper.__main__;print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n", done.stderr


class Training:
    """A rank that follows the protocol, and checks that its keeper still serves it."""

    def __init__(self, folder: Path, keeper: KeeperClient) -> None:
        self._folder = folder
        self._keeper = keeper
        self.step = 0

    def begin(self) -> Block:
        """Begin a snapshot of the next step; returns its block, which is not filled."""
        self.step += 1
        keeper, block = self._keeper, Block.allocate(self._keeper.new_block_number(), 5)
        keeper.lend(block)
        manifest = ManifestFacts(
            run_id="run",
            attempt=1,
            step=self.step,
            epoch=0.0,
            world_size=1,
            global_batch=1,
            gradient_accumulation=1,
            samples_seen=0,
            strategy="single",
        )
        facts = CheckpointFacts(manifest=manifest, folder=str(self._folder), attempt_id="attempt", save=self.step)
        file = StagedFile(path="state.bin", block=block.number, offset=0, size_bytes=5)
        fields = {"trigger": Trigger.PERIODIC, "is_requested": True, "facts": facts, "number": self.step}
        keeper.begin_snapshot(self.step, (file,), **fields)
        return block

    def save(self) -> None:
        block = self.begin()
        block.write(0, b"state")
        self.end(block)

    def end(self, block: Block) -> None:
        """The snapshot is complete; expect a checkpoint of it."""
        keeper = self._keeper
        keeper.send(messages.SnapshotStaged(step=self.step))
        outcome = keeper.wait(self.step, clock.monotonic_s() + TIMEOUT_S)
        assert outcome.is_durable, outcome.error
        assert (Path(outcome.path) / "state.bin").read_bytes() == b"state"
        assert verify(Path(outcome.path)).is_valid
        keeper.send(messages.ReturnBlock(number=block.number))
        block.close()


class Keeper:
    """A keeper's process with one rank that is served."""

    def __init__(self, folder: Path) -> None:
        OutputFolder(folder).prepare()
        self.key = new_keeper_key()
        self._process = KeeperProcess(KeeperPlan(key=self.key))
        client = KeeperClient.connect(self.key, wait_s=TIMEOUT_S, rank=0, num_ranks=1)
        assert client is not None
        self.client = client
        assert client.open_folder(str(folder)) == ""
        self.training = Training(folder, client)

    def connect(self) -> socket.socket:
        """A connection that says nothing yet."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(TIMEOUT_S)
        connected.connect(f"\0{names_of(self.key)[0]}")
        return connected

    def close(self) -> None:
        self.client.close_folder()
        self.client.send(messages.Goodbye())
        self.client.close()
        assert self._process.finish(lambda: None)


@pytest.fixture(name="keeper", scope="module")
def _keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path_factory.mktemp("output"))
    yield keeper
    keeper.training.save()
    keeper.close()


@pytest.mark.parametrize("ends", ["staged", "cancelled", "overwritten"])
def test_a_training_that_opens_another_folder_waits_for_the_write_in_progress(tmp_path: Path, ends: str) -> None:
    """Its rank ends the copy after that, or gives it up; the keeper commits or gives up, and writes on."""
    first, second = tmp_path / "first", tmp_path / "second"
    keeper = Keeper(first)
    client, training = keeper.client, keeper.training
    block = training.begin()
    deadline_s = clock.monotonic_s() + TIMEOUT_S
    while not any((first / ".safepoint" / "work").glob("attempt/*/*")):
        assert clock.monotonic_s() < deadline_s
        clock.sleep(0.001)
    OutputFolder(second).prepare()
    client.request_folder(str(second))
    block.write(0, b"state")
    if ends == "staged":
        client.send(messages.SnapshotStaged(step=training.step))
    elif ends == "cancelled":
        client.send(messages.CancelSnapshot(step=training.step, number=training.step))
    else:
        client.overwrite([block])
    assert client.folder_error() == ""
    checkpoint = first / "checkpoint-1"
    assert checkpoint.exists() is (ends == "staged")
    assert ends != "staged" or verify(checkpoint).is_valid
    keeper.training = Training(second, client)
    keeper.training.save()
    keeper.close()


def frame(body: bytes) -> bytes:
    """As `Channel` sends it."""
    return HEADER.pack(len(body), 0) + body


def answers(connected: socket.socket) -> list[messages.KeeperMessage]:
    """Everything that the keeper sends until it closes the connection, which it must."""
    data = b""
    with contextlib.suppress(ConnectionResetError):  # the keeper has closed it with something unread
        while received := connected.recv(1 << 16):
            data += received
    found: list[messages.KeeperMessage] = []
    while data:
        length, _ = HEADER.unpack(data[: HEADER.size])
        found.append(messages.decode_keeper_message(data[HEADER.size : HEADER.size + length]))
        data = data[HEADER.size + length :]
    return found


def test_another_version_is_refused(keeper: Keeper) -> None:
    """With both versions, and what to do."""
    with keeper.connect() as connected:
        record = {**json.loads(encode(HELLO)), "version": messages.VERSION + 1, "color": "blue"}
        connected.sendall(frame(json.dumps(record).encode()))
        [refused] = answers(connected)
    assert isinstance(refused, messages.Refused)
    assert f"uses version {messages.VERSION + 1}" in refused.reason
    assert "run one release of safepoint" in refused.reason
    keeper.training.save()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    has_said_hello=st.booleans(),
    body=st.binary(max_size=100)
    | st.one_of(*RANK_MESSAGES.values()).map(lambda message: encode(message)[: len(encode(message)) // 2]),
)
def test_bytes_that_are_no_message_close_their_connection_only(
    keeper: Keeper, has_said_hello: bool, body: bytes
) -> None:
    """Before the first message and after it: the rank that follows the protocol is served on."""
    with keeper.connect() as connected:
        if has_said_hello:
            connected.sendall(frame(encode(HELLO)))
        connected.sendall(frame(body))
        kinds = [type(message) for message in answers(connected)]
        assert messages.Welcome in kinds if has_said_hello else kinds == [messages.Refused]


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x00", HEADER.pack(100, 0) + b"abc", HEADER.pack(1 << 31, 0) + b"abc", b"\xff" * 100],
    ids=["nothing", "half a header", "half a body", "too long", "noise"],
)
def test_truncated_frames_close_their_connection_only(keeper: Keeper, sent: bytes) -> None:
    """The other side ends, or sends more than a frame may have."""
    for hello in (b"", frame(encode(HELLO))):
        with keeper.connect() as connected:
            connected.sendall(hello + sent)
            connected.shutdown(socket.SHUT_WR)
            answers(connected)
    keeper.training.save()


BEYOND = StagedFile(path="a", block=1, offset=PAGE_BYTES - 1, size_bytes=2)
BEGIN = {"step": 1, "number": 1, "request": 1, "trigger": Trigger.PERIODIC, "is_requested": True, "facts": None}


@pytest.mark.parametrize(
    ("sent", "num_descriptors"),
    [
        ([messages.LendBlock(number=1, capacity_bytes=PAGE_BYTES)], 0),
        (
            [
                messages.LendBlock(number=1, capacity_bytes=4 * PAGE_BYTES),
                messages.BeginSnapshot(files=(BEYOND,), **BEGIN),
            ],
            1,
        ),
        ([messages.LendBlock(number=0, capacity_bytes=PAGE_BYTES)], 2),
        ([messages.LendBlock(number=1, capacity_bytes=PAGE_BYTES << 50)], 1),
        ([messages.BlockPopulated(number=1)], 0),
        ([messages.Goodbye()], 1),
        ([HELLO], 0),
        ([messages.BeginSnapshot(files=(BEYOND,), **BEGIN)], 0),
        (
            [
                messages.LendBlock(number=1, capacity_bytes=PAGE_BYTES),
                messages.BeginSnapshot(files=(BEYOND,), **BEGIN),
            ],
            1,
        ),
    ],
    ids=[
        "no memory",
        "too small",
        "two descriptors",
        "too large",
        "not lent",
        "memory",
        "second hello",
        "no block",
        "beyond the block",
    ],
)
def test_messages_that_contradict_each_other_close_their_connection_only(
    keeper: Keeper, sent: list[messages.RankMessage], num_descriptors: int
) -> None:
    """Memory that is smaller than it is said to be would kill a process that reads it."""
    descriptor = os.memfd_create("block")
    os.ftruncate(descriptor, PAGE_BYTES)
    with keeper.connect() as connected:
        connected.sendall(frame(encode(HELLO)))
        for index, message in enumerate(sent):
            body = encode(message)
            descriptors = [descriptor] * num_descriptors if index == 0 else []
            socket.send_fds(connected, [HEADER.pack(len(body), len(descriptors))], descriptors)
            connected.sendall(body)
        assert isinstance(answers(connected)[0], messages.Welcome)
    os.close(descriptor)
    keeper.training.save()
