"""Which ranks copy snapshots together: those of the first one's node, when all of them can."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.foundation.environment import Place
from safepoint.settings.run_settings import RunSettings
from safepoint.snapshot.replicas.team import Team
from safepoint.snapshot.replicas.team_helper import Helper
from safepoint.snapshot.replicas.team_lead import Lead
from safepoint.training.engine import teaming
from safepoint.training.engine.teaming import form_team
from tests.support.ranks import ThreadPeers, run_ranks


def form(
    nodes: list[int], *, sharing: str = "on", strategy: str = "ddp", device: str = "cpu", has_keeper: bool = True
) -> list[Any]:
    def one(peers: ThreadPeers) -> Team | None:
        rank, node = peers.place.rank, nodes[peers.place.rank]
        place = Place(rank=rank, world_size=len(nodes), local_world_size=nodes.count(node), node=node)
        session: Any = SimpleNamespace(
            place=place,
            settings=RunSettings(snapshot_sharing=sharing, peer_timeout_s=20),
            keeping=SimpleNamespace(keeper=object() if has_keeper else None),
        )
        parameter = SimpleNamespace(device=torch.device(device), requires_grad=True)
        framework: Any = SimpleNamespace(strategy=strategy, parameters=lambda: [parameter])
        team = form_team(session, peers, framework)  # type: ignore[arg-type]
        peers.gather(None)  # nobody hangs up before all have seen what came of it
        if team is not None:
            team.close()
        return team

    return run_ranks(len(nodes), one)


@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [
        ([0], [None]),
        ([0, 0], [Lead, Helper]),
        ([0, 0, 0], [Lead, Helper, Helper]),
        ([0, 1, 0, 1], [Lead, None, Helper, None]),
        ([0, 1], [None, None]),
    ],
)
def test_the_first_rank_s_node_is_a_team(nodes: list[int], kinds: list[type | None]) -> None:
    """Other nodes' ranks, and a rank that is alone on its node, copy by themselves."""
    teams = form(nodes)
    assert [None if team is None else type(team) for team in teams] == kinds
    if kinds[0] is Lead:
        helpers = [rank for rank, kind in enumerate(kinds) if kind is Helper]
        assert list(teams[0]._channels) == helpers


@pytest.mark.parametrize(
    ("options", "is_team"),
    [
        ({"sharing": "off"}, False),
        ({"sharing": "auto"}, False),
        ({"sharing": "off", "device": "cuda"}, False),
        ({"sharing": "auto", "device": "cuda"}, True),
        ({"strategy": "fsdp"}, False),
        ({"strategy": "deepspeed"}, False),
        ({"has_keeper": False}, False),
    ],
)
def test_where_there_is_a_team(options: dict[str, Any], is_team: bool) -> None:
    """On devices unasked, on processors by wish, and only where all ranks hold the same."""
    assert all((team is not None) == is_team for team in form([0, 0], **options))


def test_one_that_cannot_come_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copy as before."""
    reach = teaming._reach
    monkeypatch.setattr(teaming, "_reach", lambda name, rank: None if rank == 2 else reach(name, rank))
    assert form([0, 0, 0]) == [None, None, None]
