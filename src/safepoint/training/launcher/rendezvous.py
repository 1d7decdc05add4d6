"""The rendezvous of torch elastic (where the nodes of a job find each other), over Safepoint's own store.

The number of nodes is fixed when the job starts. The store is a `TCPStore` of torch, which holds keys with values for
the ranks, and not an object store. The store refuses programs that do not belong to the job.
"""

import datetime
import errno
import ipaddress
import logging
import socket

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from safepoint.errors import ExitCode, SafepointError, UsageError
from safepoint.foundation import clock
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.rendezvous.admission import Gate, Key, NoAnswerError, RefusedError, SameUser
from safepoint.training.rendezvous.job_secret import SECRET_FILE, agree_on_secret
from safepoint.training.rendezvous.store_server import StoreServer

_log = logging.getLogger("safepoint")
_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500
_TIMEOUT_S = 600.0
_RETRY_S = 0.2
_MAX_REFUSALS = 50


class NoPortError(SafepointError):
    """Other programs use all ports from which this machine's kernel chooses. A later start may find a port."""

    exit_code = ExitCode.TERMINATED_UNSAVED

    def __init__(self) -> None:
        super().__init__(
            "no port on 127.0.0.1 is free for the rendezvous, because other programs use all of them; no rank was "
            "started",
            hint="find these programs with `ss -tanp`; run the same command again when they have ended",
        )


class Rendezvous(RendezvousHandler):
    """Connects one node's agent, which supervises the node's ranks, to the job's store. Node 0 serves the store.

    Args:
        plan: which nodes there are.
        settings: the options of the run. Through the output location in these options, the nodes agree on a secret.
    """

    def __init__(self, plan: LaunchPlan, settings: RunSettings) -> None:
        self._plan = plan
        self._settings = settings
        self._address = plan.master_addr or _LOOPBACK
        self.is_on_one_machine = plan.nnodes == 1 or _is_loopback(self._address)
        """Whether all nodes are on this machine. The address is looked up once, so the value is fixed."""
        self._port = plan.master_port or (_DEFAULT_PORT if plan.nnodes > 1 else 0)
        self._server: StoreServer | None = None
        self._store: Store | None = None

    def get_backend(self) -> str:
        """The name of this rendezvous in the log of torch elastic."""
        return "safepoint"

    @property
    def use_agent_store(self) -> bool:
        """Always True: the ranks use this store too, and no rank serves a store of its own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Connect to the store at the first call. Returns the store, this node's number and the number of nodes.

        Raises:
            UsageError: the port is taken, node 0 cannot be reached, or node 0 refuses this node.
            NoPortError: no port is free.
            StorageError: the nodes could not agree on a secret through their output location.
        """
        if self._store is None:
            self._port = self._connect()
            self._store = TCPStore(
                _LOOPBACK,
                self._port,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=_TIMEOUT_S),
            )
        address = RendezvousStoreInfo(_LOOPBACK, self._port)
        return RendezvousInfo(self._store, self._plan.node_rank, self._plan.nnodes, address)

    def _connect(self) -> int:
        """Start this node's server. Returns the loopback port at which the node's ranks reach the store."""
        plan = self._plan
        is_first = plan.node_rank == 0
        self._server = StoreServer(self._port if self.is_on_one_machine and is_first else 0, plan.listening)
        try:
            self._server.start()
            if not self.is_on_one_machine:
                self._join_nodes(self._server)
            elif not is_first:
                self._join_first_node(self._server, SameUser(), _LOOPBACK)
        except OSError as error:
            if not self._server.requested_port and not self._server.port and error.errno == errno.EADDRINUSE:
                raise NoPortError from error
            raise UsageError(
                f"port {self._port} cannot be used for the rendezvous: {error.strerror}; no rank was started",
                hint="choose another port with --master-port, the same on every node",
            ) from error
        return self._server.port

    def _join_nodes(self, server: StoreServer) -> None:
        secret = agree_on_secret(self._settings)
        plan = self._plan
        if plan.node_rank > 0:
            key = Key(secret.value, node=plan.node_rank, may_use_token=not secret.is_common)
            self._join_first_node(server, key, self._address)
            return
        gate = Gate(secret.value, num_nodes=plan.nnodes, is_open=not secret.is_common, on_unproven=_warn_of_unproven)
        server.serve_nodes(gate, self._port)

    def _join_first_node(self, server: StoreServer, key: Key | SameUser, address: str) -> None:
        """Make `server` pass connections on to node 0. Retry until node 0 admits this node.

        Node 0 may start later than this node.

        Raises:
            UsageError: node 0 did not answer in time, or has refused this node too often.
        """
        deadline_s, num_refused = clock.monotonic_s() + _TIMEOUT_S, 0
        while True:
            try:
                return server.pass_on(key, address, self._port)
            except (RefusedError, OSError) as error:
                num_refused += isinstance(error, RefusedError) and not isinstance(error, NoAnswerError)
                if num_refused == _MAX_REFUSALS or clock.monotonic_s() > deadline_s:
                    raise UsageError(
                        f"node {self._plan.node_rank} could not join node 0 at {self._address}:{self._port}: "
                        f"{error}; no rank was started",
                        hint="give every node the same output folder or object store, or set "
                        f"{SECRET_FILE} on every node to a file with the same secret; "
                        "check --master-addr, --master-port and --node-rank",
                    ) from error
            clock.sleep(_RETRY_S)

    def is_closed(self) -> bool:
        """Always False: the nodes of a job do not change."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Always zero: the nodes of a job do not change."""
        return 0

    def get_run_id(self) -> str:
        """The name of the job for torch elastic."""
        return "safepoint"

    def shutdown(self) -> bool:
        """Stop this node's server."""
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
        "node %s joined without a secret: the nodes share no object store and no output folder. Another machine that "
        "reached the port first could have joined in its place; to prevent that, set %s on every node to a file with "
        "the same secret",
        node,
        SECRET_FILE,
    )
