"""The guide to process images is executed: each command prints what the guide shows."""

import os
from pathlib import Path

import pytest

from tests.docs.test_guides import GUIDES, follow, new_user
from tests.support.criu import environment
from tests.support.moto_server import MotoServer


@pytest.mark.timeout(300)
def test_everything_in_the_guide_is_so(moto: MotoServer, tmp_path: Path) -> None:
    """A new user, who is root, and has a CRIU that works here."""
    with new_user(tmp_path) as folder:
        os.environ.update(environment())
        follow(GUIDES / "freeze-and-thaw.md", folder, moto.endpoint)
