"""A folder that two machines share by NFS 4.2: Debian's server and client (`make test-nfs`)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import nfs

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(nfs.unavailable() is not None, reason=f"NFS is NOT tested: {nfs.unavailable()}"),
]

BEGINNING = """
from safepoint.errors import ConflictError
from safepoint.foundation import files
from safepoint.foundation.shared_folders.leases import reading
from tests.support.checkpoints import commit, prepared
output = prepared(mnt / "out")
def claims():
    try:
        return output.claim(wait_s=0, waiting=lambda who: None)
    except ConflictError as error:
        return error
"""


@pytest.fixture
def guest(tmp_path: Path) -> Callable[..., str]:
    def run(script: str, **programs: str) -> str:
        programs = {name: BEGINNING + program for name, program in programs.items()}
        printed = nfs.run_in_guest(script, programs, tmp_path)
        assert "the script has ended" in printed, printed
        return printed

    return run


def test_a_folder_has_one_writer_and_its_checkpoints_are_seen(guest: Callable[..., str]) -> None:
    """The lock of one machine refuses another; it outlives a restart of the server, and not its holder."""
    printed = guest(
        """
        on 1 hold & holder=$!
        sleep 3
        on 2 look
        stop_server; sleep 2; start_server
        on 2 look
        wait $holder
        on 2 look
        """,
        hold="""
import os, signal
print("claimed:", claims())
end_s = time.monotonic() + 20
step = 0
while time.monotonic() < end_s:
    step += 1
    commit(output, step)
    time.sleep(0.2)
print("committed:", step)
os.kill(os.getpid(), signal.SIGKILL)
""",
        look="""
from safepoint.checkpoint.format.verify import verify
newest = [path for path, _ in output.manifests()][0]
print("valid:", verify(newest).is_valid, "locked:", files.is_locked(output.control / "lock"), "claimed:", claims())
""",
    )
    assert "claimed: True\n" in printed, printed
    refused = "valid: True locked: True claimed: "
    assert printed.count(refused + "/mnt/2/out is in use by another run (pid ") == 2, printed
    assert " on client1 since " in printed
    assert printed.count("valid: True locked: False claimed: True") == 1, printed


def test_a_lease_protects_a_checkpoint_from_other_machines(guest: Callable[..., str]) -> None:
    """The server does not report the locks of a machine to which it has delegated the file."""
    printed = guest(
        """
        on 1 read & reader=$!
        sleep 5
        on 1 ask; on 2 ask
        wait $reader
        on 1 ask; on 2 ask
        """,
        read="""
with reading(commit(output, 3) / "safepoint-manifest.json"):
    time.sleep(12)
""",
        ask='print("in use:", output.is_in_use("checkpoint-3"))',
    )
    answers = [line for line in printed.splitlines() if line.startswith("in use: ")]
    assert answers == ["in use: True"] * 2 + ["in use: False"] * 2, printed


def test_keepers_find_each_others_files_at_once(guest: Callable[..., str]) -> None:
    """A client remembers for 30 s that a name is missing, which is as long as a grace period."""
    beginning = """
from safepoint.checkpoint.local.working_checkpoint import RankPart
from safepoint.snapshot.keeper.persist.snapshot_commit import Nodes
(output.work / "attempt/1").mkdir(parents=True, exist_ok=True)
give_up_s = time.monotonic() + 60
def is_over():
    return time.monotonic() > give_up_s
"""
    printed = guest(
        "on 1 first & first=$!; on 2 second & second=$!; wait $first $second",
        first=f"""{beginning}
nodes = Nodes(output.work / "attempt", index=0, count=2)
parts = nodes.collect(1, is_over)
print("part:", parts[0].error)
time.sleep(3)
nodes.announce(1)
print("offer:", nodes.newest_of_all(is_over))
""",
        second=f"""{beginning}
nodes = Nodes(output.work / "attempt", index=1, count=2)
time.sleep(3)
nodes.publish(1, RankPart(rank=1))
began_s = time.monotonic()
print("outcome:", repr(nodes.outcome(1, is_over)), "late:", time.monotonic() - began_s > 10)
""",
    )
    assert "part: None" in printed, printed
    assert "outcome: '' late: False" in printed, printed


def test_a_replaced_folder_and_open_files(guest: Callable[..., str]) -> None:
    """NFS exchanges no names and keeps the names of open files: a checkpoint is replaced and deleted all the same."""
    printed = guest(
        "on 1 work",
        work="""
from safepoint.checkpoint.format.verify import verify
folder = commit(output, 3)
with (folder / "model.safetensors").open("rb") as file:
    commit(output, 3)
    files.discard(commit(output, 4), trash=output.trash)
    print("valid:", verify(folder).is_valid, sorted(path.name for path in output.root.iterdir()))
print("claimed:", claims())
output.clean()
print("left:", list(output.trash.iterdir()), list(output.work.iterdir()))
""",
    )
    assert "valid: True ['.safepoint', 'checkpoint-3']" in printed, printed
    assert "left: [] []" in printed, printed
