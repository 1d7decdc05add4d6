"""torch elastic's rendezvous over Safepoint's own store: the nodes are fixed, and no one else can speak to the store."""

import datetime
import ipaddress
import logging
import socket

import torch.distributed
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from safepoint.errors import UsageError
from safepoint.foundation import clock
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.rendezvous.admission import Gate, Key, RefusedError
from safepoint.training.rendezvous.job_secret import SECRET_FILE, agree_on_secret
from safepoint.training.rendezvous.store_server import StoreServer

_log = logging.getLogger("safepoint")
_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500
_TIMEOUT_S = 600.0
_RETRY_S = 0.2
_REFUSED_FOR_S = 30.0


class Rendezvous(RendezvousHandler):
    """Where the agents of a job meet.

    Args:
        plan: which nodes there are.
        settings: the run's, with the output folder through which nodes agree on a secret.
    """

    def __init__(self, plan: LaunchPlan, settings: RunSettings) -> None:
        self._plan = plan
        self._settings = settings
        self._address = plan.master_addr or _LOOPBACK
        self._port = plan.master_port or (_DEFAULT_PORT if plan.nnodes > 1 else 0)
        self._server: StoreServer | None = None
        self._store: torch.distributed.Store | None = None

    def get_backend(self) -> str:
        """What torch elastic calls it in its log."""
        return "safepoint"

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store too; none of them serves one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and this node's place.

        Raises:
            UsageError: the port is taken, or node 0 refuses this node.
        """
        if self._store is None:
            self._port = self._connect()
            self._store = torch.distributed.TCPStore(
                _LOOPBACK,
                self._port,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=_TIMEOUT_S),
            )
        address = RendezvousStoreInfo(_LOOPBACK, self._port)
        return RendezvousInfo(self._store, self._plan.node_rank, self._plan.nnodes, address)

    def _connect(self) -> int:
        """Start what this node serves; the port on loopback where its ranks find the store."""
        plan = self._plan
        try:
            if plan.nnodes == 1 or (_is_loopback(self._address) and plan.node_rank == 0):
                return self._serve(self._port)
            if _is_loopback(self._address):
                return self._port  # all nodes are on this machine, and node 0 serves them
            port = self._serve(0)
            self._join_nodes()
            return port
        except OSError as error:
            raise UsageError(
                f"port {self._port} cannot be used for the rendezvous: {error.strerror}; no rank was started",
                hint="choose another one with --master-port, the same on every node",
            ) from error

    def _serve(self, port: int) -> int:
        self._server = StoreServer(port)
        self._server.start()
        return self._server.port

    def _join_nodes(self) -> None:
        secret = agree_on_secret(self._settings)
        plan, server = self._plan, self._server
        assert server is not None
        if plan.node_rank == 0:
            server.serve_nodes(
                Gate(
                    secret.value,
                    num_nodes=plan.nnodes,
                    is_open=not secret.is_common,
                    on_unproven=_warn_of_unproven,
                ),
                self._port,
            )
            return
        key = Key(secret.value, node=plan.node_rank, may_use_token=not secret.is_common)
        begun_s, refused_since_s = clock.monotonic_s(), None
        while True:
            now_s = clock.monotonic_s()
            try:
                server.pass_on(key, self._address, self._port)
                return
            except RefusedError as error:
                refused_since_s = now_s if refused_since_s is None else refused_since_s
                if now_s - refused_since_s > _REFUSED_FOR_S:
                    raise UsageError(
                        f"node {plan.node_rank} could not join: {error}; no rank was started",
                        hint=f"give every node the same output folder or object store, or name a file with the same "
                        f"secret in {SECRET_FILE}; and each node its own --node-rank",
                    ) from error
            except OSError as error:
                if now_s - begun_s > _TIMEOUT_S:
                    raise UsageError(
                        f"node 0 cannot be reached at {self._address}:{self._port}: {error}; no rank was started",
                        hint="check --master-addr and --master-port, and that node 0 runs",
                    ) from error
            clock.sleep(_RETRY_S)

    def is_closed(self) -> bool:
        """Never: the nodes of a job do not change."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None: the nodes of a job do not change."""
        return 0

    def get_run_id(self) -> str:
        """What torch elastic calls the job."""
        return "safepoint"

    def shutdown(self) -> bool:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
        return True


def _is_loopback(address: str) -> bool:
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _warn_of_unproven(node: int) -> None:
    _log.warning(
        "node %s joined without a secret: the nodes share no object store and no output folder that they know of. "
        "Another machine that reached the port first could have joined in its place; name a file with the same secret on every "
        "node in %s",
        node,
        SECRET_FILE,
    )
