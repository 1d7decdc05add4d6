"""A real S3 server on loopback: Ceph RGW from Debian's packages, in its own folder, in memory.

    python -m tests.support.ceph_rgw install      # apt-get, as root
    python -m tests.support.ceph_rgw serve        # prints the variables to reach it, until it is interrupted

One monitor, one OSD whose store is memory, one gateway; no manager, no systemd. With authentication between them,
because without it the gateway hangs. `unavailable()` says why it cannot run here.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server, free_ports

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd")
_BINARIES = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
_POLICY = Path("/usr/sbin/policy-rc.d")


def unavailable() -> str | None:
    """Why Ceph RGW cannot run here, or None if it can."""
    missing = [name for name in _BINARIES if shutil.which(name) is None]
    return f"{', '.join(missing)} not found; `make test-s3` installs it on Debian, as root" if missing else None


def install() -> str | None:
    """Install the packages. Returns why that is not possible, or None."""
    if unavailable() is None:
        return None
    if shutil.which("apt-get") is None:
        return "there is no apt-get here"
    if os.geteuid() != 0:
        return "installing packages needs root"
    had_policy = _POLICY.exists()
    if not had_policy:  # keeps Debian from starting the services
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    try:
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
            result = subprocess.run(["apt-get", "-qq", *command], check=False, **quiet)
            if result.returncode != 0:
                return f"apt-get {command[0]} failed with exit code {result.returncode}"
    finally:
        if not had_policy:
            _POLICY.unlink(missing_ok=True)
    return unavailable()


class CephRgw(S3Server):
    """One cluster in `folder`. The path has to be short, because its sockets are there."""

    other_keys = ("stranger", "stranger-secret")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._mon_port, self.port = free_ports(2)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._configuration = folder / "ceph.conf"

    def start(self) -> None:
        fsid = str(uuid.uuid4())
        self._write_configuration(fsid)
        self._make_keys()
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{self._mon_port}]", "map")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "map", "--keyring", "keyring")
        self._spawn("ceph-mon", "-i", "a", "-f")
        osd_id = str(uuid.uuid4())
        self._run("ceph", "osd", "create", osd_id)
        self._run("ceph", "osd", "crush", "add", "osd.0", "1", "root=default", "host=local")
        (self._folder / "osd").mkdir()
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        self._spawn("ceph-osd", "-i", "0", "-f")
        self._spawn("radosgw", "-n", "client.rgw", "-f")
        self._wait()
        for name, secret in (self.keys, self.other_keys):
            self._run(
                "radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}",
                f"--access-key={name}", f"--secret-key={secret}", name="client.rgw",
            )  # fmt: skip
        self.make_bucket()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _write_configuration(self, fsid: str) -> None:
        folder = self._folder
        self._configuration.write_text(f"""[global]
fsid = {fsid}
mon_host = [v1:127.0.0.1:{self._mon_port}]
mon_initial_members = a
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {folder}/keyring
run_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
mon_data = {folder}/mon
mon_cluster_log_file = {folder}/cluster.log
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = 8589934592
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
ms_type = async
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{self.port}
rgw_dynamic_resharding = false
rgw_thread_pool_size = 64
""")

    def _make_keys(self) -> None:
        everything = ["--cap", "mon", "allow *", "--cap", "osd", "allow *"]
        for index, (name, caps) in enumerate(
            {
                "mon.": ["--cap", "mon", "allow *"],
                "client.admin": everything,
                "osd.0": ["--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"],
                "client.rgw": everything,
            }.items()
        ):
            create = [] if index else ["--create-keyring"]
            self._run("ceph-authtool", *create, "keyring", "--gen-key", "-n", name, *caps)

    def _run(self, program: str, *arguments: str, name: str = "client.admin") -> None:
        command = [program, *arguments]
        if program not in {"monmaptool", "ceph-authtool"}:
            command += ["-c", str(self._configuration)]
        if program in {"ceph", "radosgw-admin"}:
            command += ["-n", name]
        result = subprocess.run(command, cwd=self._folder, capture_output=True, check=False, timeout=60)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {result.stderr.decode()}")

    def _spawn(self, program: str, *arguments: str) -> None:
        with (self._folder / f"{program}.out").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [program, *arguments, "-c", str(self._configuration)], cwd=self._folder, stdout=log, stderr=log
                )
            )

    def _wait(self) -> None:
        deadline = time.monotonic() + 120 * PATIENCE
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args} ended: see {self._folder}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"Ceph RGW does not answer: see {self._folder}")
            time.sleep(0.1)


@contextlib.contextmanager
def ceph_rgw() -> Iterator[CephRgw]:
    """A running server; all its processes and files are removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rgw-"))
    server = CephRgw(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _main() -> int:
    if sys.argv[1:] == ["install"]:
        reason = install()
        if reason:
            print(f"Ceph RGW is not available: {reason}; the tests on a real S3 server are SKIPPED")
        return 3 if reason else 0
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ceph_rgw() as server:
        print(f"# serving after {time.monotonic() - started:.1f} s", file=sys.stderr)
        print("\n".join(f"export {name}={value}" for name, value in server.variables.items()), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(_main())
