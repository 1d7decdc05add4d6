"""A stranger at the rendezvous store: another user of the machine, and a network neighbour."""

import asyncio
import contextlib
import gc
import json
import os
import pickle
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.training.rendezvous.admission import Gate, Key, RefusedError, _machine_of
from safepoint.training.rendezvous.store_server import StoreServer
from tests.support import networks
from tests.support.ports import free_port

_SECRET = b"s" * 32
_GREETING_BYTES, _REQUEST_BYTES, _ANSWER_BYTES = 23 + 32, 101, 33
_HELLO = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")
_CLIENT = """
import datetime, json, sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=sys.argv[2] == "torch", wait_for_workers=False,
                      timeout=datetime.timedelta(seconds=1))
found = []
def note(value):
    found.append(value.decode() if isinstance(value, bytes) else value)
def fails(call):
    try:
        note(call())
    except Exception as error:
        note(type(error).__name__)
store.set("k", "v"); note(store.get("k"))
note(store.add("n", 2)); note(store.add("n", -5)); note(store.get("n"))
note(store.check(["k", "n"])); note(store.check(["k", "missing"]))
note(store.compare_set("k", "other", "new")); note(store.compare_set("k", "v", "new"))
note(store.compare_set("absent", "", "first")); note(store.compare_set("absent2", "x", "first"))
note(store.num_keys()); note(store.delete_key("absent")); note(store.delete_key("absent"))
store.append("list", "a"); store.append("list", "b"); note(store.get("list"))
store.multi_set(["m1", "m2"], ["1", "2"]); note([value.decode() for value in store.multi_get(["m1", "m2"])])
fails(lambda: store.get("missing")); note(store.get("m1"))
fails(lambda: store.wait(["m1", "missing"], datetime.timedelta(milliseconds=300))); store.wait(["m1", "m2"])
store.queue_push("q", "1"); store.queue_push("q", "2"); note(store.queue_len("q")); note(store.queue_pop("q"))
note(store.queue_pop("q")); fails(lambda: store.queue_pop("q", False))
note(sorted(key for key in store.list_keys()))
store.set("big", "x" * 3_000_000); note(len(store.get("big")))
store.clone().set("from-clone", "1"); note(store.get("from-clone"))
if hasattr(store, "barrier"):
    second = datetime.timedelta(seconds=1)
    store.barrier("b", 1, second); fails(lambda: store.barrier("b2", 2, second))
print(json.dumps(found))
"""
_STRANGER = """
import os, socket, sys
"".encode("idna")  # imported while it may be read
os.setgid(65534); os.setuid(65534)
hello = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")
for _ in range(100):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as client:
        client.sendall(hello + bytes([1]) + (1).to_bytes(8, "little") + b"k" + (1).to_bytes(8, "little") + b"v")
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.settimeout(20)
try:
    client.sendall(hello + bytes([13]) + b"ping")
    print(client.recv(100))
except ConnectionError:
    print(b"")
"""


@pytest.fixture
def server() -> Iterator[StoreServer]:
    running = StoreServer()
    running.start()
    yield running
    running.close()


def _talk(port: int, data: bytes, *, num_bytes: int = 1 << 20) -> bytes:
    """What the server answers to `data` until it ends the connection, is silent, or has sent that many bytes."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        with contextlib.suppress(OSError):
            client.sendall(data)
            while len(received) < num_bytes and (block := client.recv(1 << 16)):
                received += block
    return received


def _ping(port: int) -> bytes:
    return _talk(port, _HELLO + bytes([13]) + b"ping", num_bytes=4)


def _answers(port: int, kind: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", _CLIENT, str(port), kind], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_answers_as_torchs_own_server(server: StoreServer) -> None:
    """Every call of torch's client returns what it returns with torch's own server."""
    assert _answers(server.port, "safepoint") == _answers(0, "torch")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer(server: StoreServer) -> None:
    """Another user of this machine is not answered, and changes nothing, also when it sends and closes at once.

    The kernel lists a closed socket as root's, so it must not pass for root.
    """
    done = subprocess.run(
        [sys.executable, "-c", _STRANGER, str(server.port)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "b''"
    assert _ping(server.port) == b"ping"
    count_keys = _HELLO + bytes([7])
    assert _talk(server.port, count_keys, num_bytes=8) == bytes(8)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00",
        _HELLO + bytes([1]) + b"\xff" * 8,
        _HELLO + bytes([99]),
        pickle.dumps(print),
        os.urandom(1 << 20),
    ],
    ids=["http", "half", "huge", "unknown", "pickle", "noise"],
)
def test_garbage_ends_only_its_own_connection(data: bytes, server: StoreServer) -> None:
    """What is not the protocol is answered by the end of the connection; the others go on."""
    assert len(_talk(server.port, data)) < 100
    assert _ping(server.port) == b"ping"


def test_connections_are_closed_with_the_server_if_clients_read_nothing() -> None:
    """Each client asks for a different number of answers, sends an invalid query, and reads nothing. The kernel takes
    the first answers, and the rest waits in the server. For some of the clients, the server has given up the
    connection, and has not sent all answers."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=100)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of all accepted connections
    server = StoreServer(listening=listening.detach())
    server.start()
    value, num_clients = bytes(10_000), 40
    get = bytes([3]) + (1).to_bytes(8, "little") + b"k"
    with contextlib.ExitStack() as stack:
        clients: list[socket.socket] = []
        for number in range(num_clients):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            store = bytes([1]) + (1).to_bytes(8, "little") + b"k" + len(value).to_bytes(8, "little") + value
            client.sendall(_HELLO + store + get * number + b"\xff")
            clients.append(client)
        num_before = -1
        while len(server._connections) != num_before:  # until each client is answered, or has more than may wait
            num_before = len(server._connections)
            time.sleep(1)
        assert 0 < num_before < num_clients
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", ResourceWarning)
            server.close()
            del server
            gc.collect()
    assert [str(one.message) for one in found] == []


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


class TestOtherNodes:
    """The port for the other nodes of a job."""

    @pytest.fixture
    def port(self, server: StoreServer) -> int:
        port = free_port()
        server.serve_nodes(Gate(_SECRET, num_nodes=3, is_open=False), port)
        return port

    @staticmethod
    def _join(port: int, secret: bytes, node: int, *, may_use_token: bool = False) -> StoreServer:
        other = StoreServer()
        other.start()
        try:
            other.pass_on(Key(secret, node=node, may_use_token=may_use_token), "127.0.0.1", port)
        except BaseException:
            other.close()
            raise
        return other

    def test_a_node_that_knows_the_secret(self, server: StoreServer, port: int) -> None:
        """The ranks of another node reach the store through their own loopback."""
        other = self._join(port, _SECRET, 1)
        answers = _answers(other.port, "safepoint")
        other.close()
        assert answers == _answers(0, "torch")

    @pytest.mark.parametrize("may_use_token", [False, True])
    def test_a_stranger(self, may_use_token: bool, port: int) -> None:
        """Without the secret no one joins a job whose nodes have one in common."""
        with pytest.raises(RefusedError):
            self._join(port, b"another secret of some length", 1, may_use_token=may_use_token)

    @pytest.mark.parametrize("node", [0, 3, 4_000_000_000])
    def test_a_number_that_no_node_has(self, node: int, port: int) -> None:
        """The secret alone is no place in the job."""
        with pytest.raises(RefusedError):
            self._join(port, _SECRET, node)

    def test_a_recorded_handshake_does_not_open_again(self, port: int) -> None:
        """What a node has sent to join, sent again by another program, is refused."""
        sent = bytearray()

        async def listen_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            writer.write(await there.readexactly(_GREETING_BYTES))
            sent.extend(await reader.readexactly(_REQUEST_BYTES))
            back.write(sent)
            writer.write(await there.readexactly(_ANSWER_BYTES))
            for end in (back, writer):
                end.close()
                await end.wait_closed()
            ended.set()

        ended = asyncio.Event()

        async def run() -> None:
            listening = await asyncio.start_server(listen_in, "127.0.0.1", 0)
            _, writer = await Key(_SECRET, node=1, may_use_token=False).connect(
                "127.0.0.1", listening.sockets[0].getsockname()[1]
            )
            writer.close()
            listening.close()
            await ended.wait()

        asyncio.run(run())
        answer = _talk(port, bytes(sent), num_bytes=_GREETING_BYTES + _ANSWER_BYTES)
        assert answer[_GREETING_BYTES:] == bytes(_ANSWER_BYTES)

    @pytest.mark.parametrize("data", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n" * 50, pickle.dumps(print) * 20])
    def test_garbage(self, data: bytes, port: int) -> None:
        """Nothing but the greeting and a refusal comes back."""
        assert len(_talk(port, data)) <= 23 + 32 + 33

    def test_many_that_say_nothing(self, port: int) -> None:
        """Five hundred connections without a handshake neither use up descriptors nor keep a node out."""
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(500)]
        try:
            other = self._join(port, _SECRET, 2)
            other.close()
            open_here = len(os.listdir(f"/proc/{os.getpid()}/fd"))
            assert open_here < len(idle) + 200
        finally:
            for client in idle:
                client.close()

    @pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
    def test_a_port_that_another_user_has_for_one_protocol(self, family: socket.AddressFamily) -> None:
        """Node 0 does not serve the other protocol alone: nodes would reach the stranger, who passes them on."""
        if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
            pytest.skip("this machine has no IPv6")
        stranger, port = socket.socket(family), free_port()
        if family == socket.AF_INET6:
            stranger.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        stranger.bind(("", port))
        stranger.listen()
        server = StoreServer()
        server.start()
        with stranger, pytest.raises(OSError, match="in use"):
            server.serve_nodes(Gate(_SECRET, num_nodes=2, is_open=False), port)
        server.close()

    def test_a_rank_waits_while_node_0_is_too_busy_to_answer(self, server: StoreServer, port: int) -> None:
        """A flood closes or delays some handshakes; that ends no rank."""
        drops = iter([False, True, True, True, False])

        async def front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if next(drops):
                writer.close()
                return
            there, back = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, back))
                both.create_task(_pump(there, writer))

        async def run() -> None:
            listening = await asyncio.start_server(front, "127.0.0.1", 0)
            there = listening.sockets[0].getsockname()[1]
            other = await asyncio.to_thread(self._join, there, _SECRET, 1)
            assert await asyncio.to_thread(_ping, other.port) == b"ping"
            await asyncio.to_thread(other.close)
            listening.close()

        asyncio.run(run())
        assert next(drops, None) is None

    def test_many_addresses_of_one_machine_count_as_one(self) -> None:
        """A neighbour has 2^64 addresses of IPv6."""
        machines = [_machine_of(f"2001:db8:0:1::{number:x}") for number in range(1, 9)]
        assert len(set(machines)) == 1
        others = {_machine_of(host) for host in ("2001:db8:0:2::1", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "10.0.0.3")}
        assert len(others | set(machines)) == 5
        assert _machine_of("::ffff:10.0.0.1") == _machine_of("10.0.0.1")

    def test_without_a_common_secret_the_first_keeps_the_number(self, server: StoreServer) -> None:
        """Where nodes have nothing in common, a second program cannot take a node's place."""
        port, unproven = free_port(), list[int]()
        server.serve_nodes(Gate(_SECRET, num_nodes=2, is_open=True, on_unproven=unproven.append), port)
        first = self._join(port, b"a secret of node 1 alone", 1, may_use_token=True)
        with pytest.raises(RefusedError):
            self._join(port, b"a secret of a stranger..", 1, may_use_token=True)
        answers = _answers(first.port, "safepoint")
        first.close()
        assert answers == _answers(0, "torch")
        assert unproven == [1]

    def test_a_stranger_in_the_place_of_the_first_node(self) -> None:
        """A node does not speak to a program that does not know the secret."""

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"safepoint rendezvous 1\n" + bytes(32))
            await reader.readexactly(101)
            writer.write(b"\1" + bytes(32))
            await reader.read()
            writer.close()
            await writer.wait_closed()
            ended.set()

        ended = asyncio.Event()

        async def run() -> None:
            listening = await asyncio.start_server(impostor, "127.0.0.1", 0)
            port = listening.sockets[0].getsockname()[1]
            with pytest.raises(RefusedError):
                await Key(_SECRET, node=1, may_use_token=True).connect("127.0.0.1", port)
            listening.close()
            await ended.wait()

        asyncio.run(run())


_SCRIPT = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in open(f"/proc/net/{table}").readlines()[1:]:
            columns = line.split()
            if table.startswith("udp") or columns[3] == "0A":
                print("LISTENS", table, columns[1], flush=True)
dist.barrier()
"""


def _run(output: Path, script: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "safepoint.cli.main", "run", "--nproc-per-node", "2", *options]
    return [*command, "--output-dir", str(output), str(script)]


@pytest.mark.ranks
@pytest.mark.usefixtures("start_of_ranks")
@pytest.mark.skipif(bool(networks.unavailable()), reason="needs a network namespace")
def test_a_job_of_one_node_listens_on_loopback_only(tmp_path: Path) -> None:
    """In a network of its own, no socket of a job is open to another machine."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    with networks.two_networks() as (here, _):
        command = here.command(*_run(tmp_path / "out", script))
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listening = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("LISTENS")]
    assert listening
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    assert [address for address in listening if not address.startswith(loopback)] == []


_WAITING = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while not os.path.exists(os.environ["STOP"]):
    dist.all_reduce(torch.ones(1))
    open(os.environ["STOP"] + ".running", "w").close()
    time.sleep(0.1)
    votes = torch.tensor([os.path.exists(os.environ["STOP"])], dtype=torch.int64)
    dist.all_reduce(votes)
    if votes.item():
        break
os.write(1, f"SUM {dist.get_world_size()}\\n".encode())  # in one call: two ranks write at once
"""
_NEIGHBOUR = """
import datetime, os, pickle, socket, sys
address = sys.argv[1], 29500
hello = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")
put = bytes([1]) + (14).to_bytes(8, "little") + b"safepoint/stop" + (1).to_bytes(8, "little") + b"1"
for data in (b"", b"x", b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(1 << 20), pickle.dumps(print), hello + put,
             bytes([0]) + (1).to_bytes(4, "big") + bytes(96) + hello + put,
             bytes([1]) + (1).to_bytes(4, "big") + b"t" * 96 + hello + put):
    with socket.create_connection(address, timeout=3) as client:
        try:
            client.recv(55)
            client.sendall(data)
            print("ANSWER", client.recv(100).strip(bytes(1)))
        except OSError:
            print("ANSWER", b"")
idle = [socket.create_connection(address, timeout=3) for _ in range(300)]
print("DONE")
"""


@pytest.mark.ranks
@pytest.mark.skipif(bool(networks.unavailable()), reason="needs a network namespace")
def test_a_neighbour_does_nothing_to_a_job_of_two_nodes(tmp_path: Path) -> None:
    """Over the network, a job's nodes find each other, and a third program can neither read, write nor disturb."""
    script, secret, stop = tmp_path / "train.py", tmp_path / "secret", tmp_path / "stop"
    script.write_text(_WAITING)
    secret.write_text("0123456789abcdef" * 2)
    with networks.two_networks() as ends:
        nodes: list[subprocess.Popen[str]] = []
        for number, end in enumerate(ends):
            place = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", ends[0].address]
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": end.interface,
                "SAFEPOINT_JOB_SECRET_FILE": str(secret),
                "STOP": str(stop),
            }
            nodes.append(
                subprocess.Popen(
                    end.command(*_run(tmp_path / "out", script, *place)),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        give_up_s = time.monotonic() + 240
        while not (tmp_path / "stop.running").exists() and time.monotonic() < give_up_s:
            assert all(node.poll() is None for node in nodes), [node.communicate()[0] for node in nodes]
            time.sleep(0.1)
        neighbour = ends[1].command(sys.executable, "-c", _NEIGHBOUR, ends[0].address)
        tried = subprocess.run(neighbour, capture_output=True, text=True, timeout=120, check=False)
        stop.touch()
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert tried.stdout.splitlines()[-1:] == ["DONE"], tried.stderr
    assert set(tried.stdout.splitlines()[:-1]) == {"ANSWER b''"}
    for node, output in zip(nodes, outputs, strict=True):
        assert node.returncode == 0, output
        assert output.count("SUM 4") == 2, output
