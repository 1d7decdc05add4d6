"""Which ranks to start on a node."""

import os
from dataclasses import dataclass

from safepoint.errors import UsageError
from safepoint.foundation.environment import current_folder, is_importable
from safepoint.foundation.quantities import parse_whole
from safepoint.training.program import find_script


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Which ranks to start on this node.

    Args:
        program: script and arguments, or module and arguments.
        is_module: run the program as `python -m` does.
        nproc_per_node: ranks on this node, or `auto`, `cpu`, `gpu` as for torchrun.
        nnodes: number of nodes.
        node_rank: this node's number, from 0.
        master_addr: host of node 0; needed with several nodes.
        master_port: a free port of node 0; None for 29500, or for any free port if there is one node.
        listening: on node 0, the descriptor of a socket that listens at this port.
        max_restarts: how often the ranks are started again after a rank has failed.
    """

    program: tuple[str, ...]
    is_module: bool = False
    nproc_per_node: str = "1"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    listening: int | None = None
    max_restarts: int = 3

    def __post_init__(self) -> None:
        if not self.program:
            raise UsageError("no script was named", hint="safepoint run [OPTIONS] SCRIPT [ARGS…]")
        if not self.is_module:
            find_script(self.program[0])
        if self.is_module and not is_importable(self.program[0], current_folder()):
            raise UsageError(
                f"there is no module {self.program[0]}",
                hint="check its name and PYTHONPATH; to run a file, leave out -m",
            )
        if self.nproc_per_node not in {"auto", "cpu", "gpu"} and not parse_whole(self.nproc_per_node):
            raise UsageError(
                f"--nproc-per-node {self.nproc_per_node[:60]!r} must be a positive number, auto, cpu or gpu"
            )
        if self.nnodes < 1:
            raise UsageError(f"--nnodes {self.nnodes} must be at least 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise UsageError(f"--node-rank {self.node_rank} must be at least 0 and below --nnodes {self.nnodes}")
        if self.nnodes > 1 and self.master_addr is None:
            raise UsageError("several nodes need --master-addr", hint="on all nodes, give the host name of node 0")
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise UsageError(f"--master-port {self.master_port} must be a port number")
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts} must not be negative")

    def set_default_threads(self) -> None:
        """As torchrun does: give each of several ranks one thread, unless the user has chosen a number."""
        if (parse_whole(self.nproc_per_node) or 0) > 1:
            # Set here, because torchrun's code sets it with a long warning.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
