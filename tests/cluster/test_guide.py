"""The guide to clusters is executed: each command prints what the guide shows."""

import json
import os
from pathlib import Path

import pytest

from tests.docs.test_guides import GUIDES, follow, new_user
from tests.support.cluster.workspace import Workspace


@pytest.mark.long
@pytest.mark.timeout(900)
def test_everything_in_the_guide_is_so(team: Workspace, tmp_path: Path) -> None:
    """A new user has only a kubeconfig, whose current context names a namespace."""
    document = json.loads(team.cluster.kubeconfig.read_text())
    document["contexts"][0]["context"]["namespace"] = team.namespace
    with new_user(tmp_path) as folder:
        os.environ.pop("KUBECONFIG", None)
        kubeconfig = folder.parent / ".kube" / "config"
        kubeconfig.parent.mkdir()
        kubeconfig.write_text(json.dumps(document))
        follow(GUIDES / "cluster.md", folder)
    assert team.left_at_last() == []
