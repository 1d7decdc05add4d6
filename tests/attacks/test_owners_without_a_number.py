"""A container without root uses a shared folder of the machine, such as /tmp. In the user namespace of the container,
the owner of the folder and all other users of the machine have the same number.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_STRANGER, _OWNER = 65533, 7
_CODE = """
import os, sys
from safepoint.foundation.shared_folders.ownership import is_planted, open_trusted
shared = sys.argv[1]
print(os.stat(shared).st_uid == os.stat(f"{shared}/theirs").st_uid, is_planted(f"{shared}/own/file"))
for name in ("theirs", "folder/file"):
    print(is_planted(f"{shared}/{name}"))
try:
    open_trusted(f"{shared}/theirs").close()
    print("opened")
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("user", [1000, 65534])
def test_files_of_users_who_look_alike(user: int, tmp_path: Path) -> None:
    """Those of the user of the job are accepted, unless this user has no number either."""
    namespace = ["unshare", "--user", *([f"--map-user={user}"] if user == 1000 else [])]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("this machine makes no user namespaces")
    shared = tmp_path / "shared"
    for folder in (shared, shared / "own", shared / "folder"):
        folder.mkdir()
    for file in ("own/file", "theirs", "folder/file"):
        (shared / file).touch()
    os.chown(shared / "theirs", _STRANGER, -1)
    os.chown(shared / "folder", _STRANGER, -1)
    os.chown(shared, _OWNER, -1)
    shared.chmod(0o1777)
    command = [*namespace, sys.executable, "-P", "-c", _CODE, str(shared)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    own = "False" if user == 1000 else "True"
    assert done.stdout.splitlines() == [f"True {own}", "True", "True", "refused"]
