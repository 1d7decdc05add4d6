"""How the agents of two nodes end."""

import threading
from types import SimpleNamespace

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import WorkerState

from safepoint.training.launcher.agent import SafepointAgent


def agent_of(node: int, store: HashStore) -> SafepointAgent:
    """An agent whose ranks have succeeded."""
    agent = object.__new__(SafepointAgent)
    group = SimpleNamespace(group_world_size=2, group_rank=node, state=WorkerState.SUCCEEDED, store=store)
    vars(agent).update(_worker_group=group, _has_notified=False)
    return agent


def test_the_node_with_the_store_ends_last_after_a_success() -> None:
    """Otherwise the other node, which still reads from the store, prints a traceback at the end of a good run."""
    store = HashStore()
    first = threading.Thread(target=agent_of(0, store).notify_others, daemon=True)
    first.start()
    first.join(0.5)
    assert first.is_alive(), "node 0 did not wait"
    agent_of(1, store).notify_others()
    first.join(20)
    assert not first.is_alive()
    assert not store.check(["safepoint/stop"]), "no node asked for a stop"
