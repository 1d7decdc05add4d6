"""Someone replaces a checkpoint after the dashboard has read all its files, by one that states an older time.

The page must not show the check of the earlier checkpoint.
"""

import os
from pathlib import Path

from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.dashboard.reading.checkpoint_view import Check, rows_of
from safepoint.foundation import clock
from tests.support.checkpoints import commit, prepared, reseal


def test_the_check_of_the_earlier_one_is_not_shown(tmp_path: Path) -> None:
    folder = commit(prepared(tmp_path), 10)
    checked_s = clock.wall_s() - 60
    for path in folder.rglob("*"):
        os.utime(path, (checked_s - 60, checked_s - 60))
    checks = {"checkpoint-10": Check(time=clock.as_utc(checked_s), how="here")}
    [row] = rows_of(open_inventory(str(tmp_path))[0], checks=checks)
    assert row.check is not None
    (folder / "model.safetensors").write_bytes(b"other weights")
    reseal(folder)
    [row] = rows_of(open_inventory(str(tmp_path))[0], checks=checks)
    assert row.item.is_complete
    assert row.check is None
