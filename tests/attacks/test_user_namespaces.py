"""A user namespace shows all users that it does not know as one. If the job runs as that one, all look like it."""

import shutil
import subprocess
import sys

import pytest

_CODE = """
import os, socket, sys
from safepoint.snapshot.protocol.channel import check_same_user
from safepoint.training.rendezvous import admission
ours, theirs = socket.socketpair(socket.AF_UNIX)
try:
    check_same_user(ours)
    print("keeper admits")
except PermissionError:
    print("keeper refuses")
class Writer:
    get_extra_info = lambda self, name: None
admission.user_at_other_end = lambda connected: int(sys.argv[1])
print("store admits" if admission.is_same_user(Writer()) else "store refuses")
"""


def _in_namespace(*options: str, user: int) -> list[str]:
    command = ["unshare", "--user", f"--map-user={user}", f"--map-group={user}", *options]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("this machine makes no user namespaces")
    command += [sys.executable, "-P", "-c", _CODE, str(user)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_user_of_all_strangers_is_nobodys() -> None:
    """As in a container without root that shares the network of the machine."""
    assert _in_namespace(user=65534) == ["keeper refuses", "store refuses"]


@pytest.mark.parametrize(
    ("options", "user"), [((), 1000), (("--net",), 65534), (("--net",), 1000)], ids=["known", "alone", "known alone"]
)
def test_a_user_that_is_certain(options: tuple[str, ...], user: int) -> None:
    assert _in_namespace(*options, user=user) == ["keeper admits", "store admits"]
