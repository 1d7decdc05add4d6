"""A node of the test cluster: containerd, kubelet and kube-proxy, with images that are made here."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

NODES = ("node-a", "node-b")
REGISTRY = "registry.test"
HOST_IMAGE = f"{REGISTRY}/host:1"
"""A root of links into /usr: a pod that uses it mounts the machine's /usr, and has its programs without a copy."""
DNS_SERVICE = "10.96.0.10"
_POD_RANGE = "10.244.0.0/16"
_LINK = ("10.243.1.1", "10.243.1.2")
"""The addresses of the first and the second node on the cable between them."""
_FOLDERS = ("tmp", "etc", "var", "run", "proc", "sys", "dev", "root", "usr", "opt", "mnt", "home")
_PRIVATE = ("/var/lib/cni", "/var/lib/kubelet", "/run/containerd")
"""What the programs of a node write at fixed paths."""


class Tools(Protocol):
    """What a node needs of its cluster."""

    folder: Path
    bin: Path
    keys: Path
    cgroup: str

    def spawn(self, name: str, *options: str | Path, log: str = "", inside: Sequence[str] = ()) -> None:
        """Start a program."""

    def wait(self, what: str, is_so: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until `is_so`."""


class Node:
    """One node. The first one runs in the namespaces of the cluster, the second one in some of its own.

    Args:
        tools: of the cluster.
        number: 0 or 1.
    """

    def __init__(self, tools: Tools, number: int) -> None:
        self._tools, self._number = tools, number
        self.name = NODES[number]
        self.gateway = f"10.244.{number}.1"
        self._suffix = f"-{number}" if number else ""
        self._folder = tools.folder / self.name
        self._inside: tuple[str, ...] = ()

    def start(self) -> None:
        """Start its programs. It is ready some seconds later."""
        (self._folder / "cni").mkdir(parents=True)
        if self._number:
            self._enter_namespaces()
        for words in (
            ("link", "add", "cni0", "type", "bridge"),
            ("address", "add", f"{self.gateway}/24", "dev", "cni0"),
            ("link", "set", "cni0", "up"),
        ):
            self._run("ip", *words)
        self._run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        # Not the bridge's own `ipMasq`: with it, connections between pods of two nodes have a node's address, and
        # such a connection is reset when the kernel loses track of it.
        outside = ("-s", _POD_RANGE, "!", "-d", _POD_RANGE)
        self._run("iptables", "--wait", "-t", "nat", "-A", "POSTROUTING", *outside, "-j", "MASQUERADE")
        first = {"subnet": f"10.244.{self._number}.0/24", "rangeStart": f"10.244.{self._number}.10"}
        addresses = {"ranges": [[first]], "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "dataDir": str(self._folder / "addresses"), **addresses},
        }
        plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}
        (self._folder / "cni" / "10-bridge.conflist").write_text(json.dumps(network))
        self._start_containerd()
        self._start_kubelet()
        self._spawn(
            "kube-proxy",
            f"--kubeconfig={self._tools.folder}/proxy{self._suffix}.kubeconfig",
            "--proxy-mode=iptables",
            f"--cluster-cidr={_POD_RANGE}",
            f"--hostname-override={self.name}",
            "--conntrack-max-per-core=0",
        )

    def _enter_namespaces(self) -> None:
        """Make the second node's namespaces, and a cable between the nodes."""
        unshare = ("unshare", "--net", "--mount", "--propagation", "private", "sleep", "infinity")
        holder = subprocess.Popen(unshare, stdin=subprocess.DEVNULL, start_new_session=True)
        own = os.readlink("/proc/self/ns/net")
        self._tools.wait(
            f"{self.name} has namespaces", lambda: os.readlink(f"/proc/{holder.pid}/ns/net") not in {"", own}
        )
        self._inside = ("nsenter", "--target", str(holder.pid), "--net", "--mount")
        for place in _PRIVATE:
            Path(place).mkdir(parents=True, exist_ok=True)
            self._run("mount", "-t", "tmpfs", "tmpfs", place)
        here, there = _LINK
        for command in (
            ("ip", "link", "add", "node-b", "type", "veth", "peer", "name", "node-a", "netns", str(holder.pid)),
            ("ip", "address", "add", f"{here}/30", "dev", "node-b"),
            ("ip", "link", "set", "node-b", "up"),
            ("ip", "route", "add", f"{self.gateway.rpartition('.')[0]}.0/24", "via", there),
        ):
            subprocess.run(command, check=True, capture_output=True)
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "address", "add", f"{there}/30", "dev", "node-a")
        self._run("ip", "link", "set", "node-a", "up")
        self._run("ip", "route", "add", "default", "via", here)

    def _run(self, *words: str) -> None:
        subprocess.run([*self._inside, *words], check=True, capture_output=True)

    def _spawn(self, name: str, *options: str | Path) -> None:
        self._tools.spawn(name, *options, log=f"{name}{self._suffix}", inside=self._inside)

    def _start_kubelet(self) -> None:
        tools = self._tools
        cgroup = f"{tools.cgroup}/{self.name}" if self._number else tools.cgroup
        for line in Path("/proc/mounts").read_text().splitlines():
            if " cgroup" in line:
                Path(line.split()[1], cgroup.strip("/")).mkdir(exist_ok=True)
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self._folder}/containerd.sock",
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "100Mi"},
            # Otherwise it waits for 10 s before it restarts a container, and twice as long each further time.
            "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{tools.keys}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{tools.keys}/kubelet{self._suffix}.crt",
            "tlsPrivateKeyFile": f"{tools.keys}/kubelet{self._suffix}.key",
            "syncFrequency": "5s",
            "imageMinimumGCAge": "240h",
            "imageGCHighThresholdPercent": 100,
            "resolvConf": f"{tools.folder}/resolv.conf",
            "podLogsDir": f"{self._folder}/pod-logs",  # a kubelet removes the logs of pods that are not its own
        }
        (self._folder / "kubelet.yaml").write_text(json.dumps(settings))
        (tools.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        self.start_kubelet()

    def start_kubelet(self) -> None:
        """The kubelet; tests end that of the first node and start it again."""
        self._spawn(
            "kubelet",
            f"--config={self._folder}/kubelet.yaml",
            f"--kubeconfig={self._tools.folder}/node{self._suffix}.kubeconfig",
            f"--hostname-override={self.name}",
            f"--node-ip={self.gateway}",
            f"--root-dir={self._folder}/kubelet",
        )

    def _start_containerd(self) -> None:
        pause = f"{REGISTRY}/pause:1"
        (self._folder / "containerd.toml").write_text(
            f"""version = 3
root = "{self._folder}/containerd"
state = "{self._folder}/containerd-state"
[grpc]
  address = "{self._folder}/containerd.sock"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
  enable_unprivileged_ports = true
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{self._folder}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
      BinaryName = "{shutil.which("runc")}"
"""
        )
        self._spawn("containerd", "-c", self._folder / "containerd.toml")

        def answers() -> bool:
            self._ctr("version")
            return True

        self._tools.wait("containerd answers", answers)
        self.image("pause:1", {"pause": self._tools.bin / "pause"}, entrypoint=["/pause"])

    # ---- images ---------------------------------------------------------------------------------------------------

    def host_image(self) -> None:
        """Import the image that has the machine's programs."""
        accounts: dict[str, Path | bytes] = {
            "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
            "etc/group": b"root:x:0:\nuser:x:1000:\n",
            "etc/nsswitch.conf": b"hosts: files dns\npasswd: files\n",
            "etc/ld.so.cache": Path("/etc/ld.so.cache"),
        }
        into_usr = [(name, f"usr/{name}") for name in ("bin", "sbin", "lib", "lib64")]
        self.image(HOST_IMAGE.partition("/")[2], accounts, links=into_usr)

    def image(
        self,
        name: str,
        files: Mapping[str, Path | bytes],
        *,
        links: Sequence[tuple[str, str]] = (),
        entrypoint: Sequence[str] = (),
        user: str = "",
    ) -> None:
        """Import an image of one layer, made here: there is no registry."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as archive:
            for path in _FOLDERS:
                entry = tarfile.TarInfo(path)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if path == "tmp" else 0o755
                archive.addfile(entry)
            for path, source in files.items():
                data = source if isinstance(source, bytes) else source.read_bytes()
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(data), 0o755
                archive.addfile(entry, io.BytesIO(data))
            for path, target in links:
                entry = tarfile.TarInfo(path)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                archive.addfile(entry)
        digest = hashlib.sha256(layer.getvalue()).hexdigest()
        settings = {"User": user, "Entrypoint": list(entrypoint), "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{}],
        }
        manifest = [{"Config": "config.json", "RepoTags": [f"{REGISTRY}/{name}"], "Layers": ["layer.tar"]}]
        parts = {
            "config.json": json.dumps(config).encode(),
            "layer.tar": layer.getvalue(),
            "manifest.json": json.dumps(manifest).encode(),
        }
        place = self._folder / "image.tar"
        with tarfile.open(place, "w") as archive:
            for part, data in parts.items():
                entry = tarfile.TarInfo(part)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        self._ctr("images", "import", place)
        place.unlink()

    def _ctr(self, *words: str | Path) -> None:
        """Talk to containerd."""
        command = [self._tools.bin / "ctr", "-a", self._folder / "containerd.sock", "-n", "k8s.io", *words]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
