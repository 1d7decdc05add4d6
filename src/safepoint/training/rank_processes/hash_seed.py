"""One seed for the hashes of strings (PYTHONHASHSEED) for all ranks of a job, whether they are copies or not.

Copies of one process share its seed, so new processes, new templates and later attempts need the same seed. The seed
is computed from the name of the program. So no node has to wait for another node before its template can start, and a
job that is started again has the same seed. If the user has set a value on a node, the node uses this value. If the
user has set a value on node 0 only, the other nodes read it from the store through which the nodes find each other.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = "PYTHONHASHSEED"
_KEY = "safepoint/hash-seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HashSeed:
    """The seed that is computed from a program.

    Args:
        program: script and arguments, or module and arguments.
        is_module: whether the program is a module.
    """

    program: tuple[str, ...]
    is_module: bool

    @property
    def value(self) -> str:
        """The seed. A script's folder and arguments do not change the seed, because they may differ between nodes."""
        name = self.program[0] if self.is_module else Path(self.program[0]).name
        return str(int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:4], "big"))

    def choose(self) -> None:
        """Set the seed in the environment of this process, unless the user has set a seed."""
        os.environ[_VARIABLE] = os.environ.get(_VARIABLE) or self.value

    def agree(self, store: Any, *, node: int, is_wanted: bool) -> bool:
        """Set the seed of node 0 in the environment, unless the user has set a seed on this node.

        Every node has to call this method once, because the other nodes wait for node 0.

        Args:
            store: the torch `Store` of the job.
            node: this node's number, from 0.
            is_wanted: whether the ranks of this node need a common seed.

        Returns:
            Whether the environment has changed.

        Raises:
            RuntimeError: node 0 has ended.
        """
        own = os.environ.get(_VARIABLE, "")
        if node == 0:
            store.set(_KEY, own)
            return False
        if not is_wanted or own != self.value:
            return False
        first: str = store.get(_KEY).decode()
        if first in {"", own}:
            return False
        os.environ[_VARIABLE] = first
        return True
