"""Another user fills /dev/shm, where the launcher's folder is, with data or with empty files, while a run goes on.

The ranks still report there how they ended. Otherwise a run that has saved would end with 143 instead of 75, and
ranks that Safepoint ended for a reason that stays would be restarted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_CODE = """
import contextlib, ctypes, json, os, sys
from dataclasses import asdict
from pathlib import Path

from safepoint.foundation.environment import Place
from safepoint.training.outcome.rank_record import RankRecordWriter, read_records
from safepoint.training.outcome.verdict import reach_verdict

folder, fills, message = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
options = b"size=256k,nr_inodes=100"
assert ctypes.CDLL(None).mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options) == 0


def fill():
    with contextlib.suppress(OSError):
        if fills == "data":
            with open(folder / "fill", "ab", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        else:
            for number in range(1000):
                (folder / f"empty-{number}").touch()


first = [RankRecordWriter(str(folder), Place(rank=rank, world_size=2)) for rank in range(2)]
fill()
first[0].stepped()
fill()
first[1].failed(lost_peer=True, message=message)
fill()
first[0].failed(lost_peer=False, message=message)
fill()
found = [read_records(folder, 0)]
again = [RankRecordWriter(str(folder), Place(rank=rank, world_size=2, restart=1)) for rank in range(2)]
fill()
found.append(read_records(folder, 1))
for record in again:
    record.stepped()
    fill()
    record.ended(75, message)
    fill()
found.append(read_records(folder, 1))
verdict = reach_verdict({0: 75, 1: 75}, found[-1], stop_signal=15, killed=False)
answer = [[{**asdict(one), "ended_s": one.ended_s is not None} for _, one in sorted(each.items())] for each in found]
print(json.dumps([answer, verdict.exit_code]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize("fills", ["data", "files"])
@pytest.mark.parametrize("message", ["why", "\N{SNOWMAN}" * 3000])
def test_records_of_ranks(fills: str, message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", _CODE, str(tmp_path), fills, message],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("this system has no mount namespaces")
    assert done.returncode == 0, done.stderr
    (first, begun, last), exit_code = json.loads(done.stdout)
    assert [(one["has_stepped"], one["lost_peer"], one["ended_s"]) for one in first] == [
        (True, False, True),
        (False, True, True),
    ]
    assert all(message.startswith(one["message"]) and one["message"] for one in first)
    assert [(one["has_stepped"], one["exit_code"], one["ended_s"]) for one in begun] == [(False, None, False)] * 2
    assert [(one["has_stepped"], one["exit_code"]) for one in last] == [(True, 75)] * 2
    assert exit_code == 75
