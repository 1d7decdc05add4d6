"""Gives each start of the ranks its own keys in torch elastic's store.

torch 2.13 keeps one TCPStore over all restarts of the ranks and writes the same keys into it each time. So a
restarted rank may read the address of a dead process ("Gloo connectFullMesh failed … Connection refused", observed in
about every second restart). On several nodes, there is no other store to use. So this module makes the number of the
restart a part of each key. All ranks must use the same number. On each node, an agent restarts the ranks. Safepoint's
agents count restarts in the same way on all nodes. torchrun's agents do not, so under torchrun this module works only
on a single node.
"""

import functools
from types import ModuleType
from typing import Any

from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.imports import after_import


def install(context: RankContext) -> None:
    """Put the number of the restart before every key, if it is certain that all ranks have the same number."""
    place = context.place
    has_one_agent = place.local_world_size == place.world_size
    if place.restart == 0 or (context.settings.launcher_pid is None and not has_one_agent):
        return

    def hook(module: ModuleType) -> None:
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        rendezvous: Any = module
        create = rendezvous._create_c10d_store

        @functools.wraps(create)
        def create_for_this_start(*args: Any, **kwargs: Any) -> Any:
            prefix = f"safepoint/start-{place.restart}"
            return PrefixStore(prefix, create(*args, **kwargs))

        rendezvous._create_c10d_store = create_for_this_start

    after_import("torch.distributed.rendezvous", hook)
