"""The roles that docs/cluster.md has to copy."""

import re
from pathlib import Path
from typing import Any

import yaml

_PAGE = Path(__file__).parents[3] / "docs" / "cluster.md"


def documented_roles() -> list[dict[str, Any]]:
    """The Role and the ClusterRole."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", _PAGE.read_text(), re.M | re.S)
    return [role for block in blocks for role in yaml.safe_load_all(block) if role["kind"].endswith("Role")]
