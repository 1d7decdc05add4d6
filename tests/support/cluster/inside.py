"""The processes of the test cluster; runs as the first process of its namespaces.

    python -m tests.support.cluster.inside FOLDER

The first process starts the second one and reaps whatever loses its parent. When either ends, the kernel ends all
others of the namespace. `FOLDER/ready` appears when the node is ready and the addons serve.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster import programs
from tests.support.cluster.node import DNS_SERVICE, REGISTRY, Node

_SERVICE_RANGE, _API_SERVICE = "10.96.0.0/16", "10.96.0.1"
_ADDON_NAMESPACES = {"jobset": "jobset-system", "trainer": "kubeflow-system", "kueue": "kueue-system"}
_DEPLOYMENTS = {
    "jobset": "jobset-controller-manager",
    "trainer": "kubeflow-trainer-controller-manager",
    "kueue": "kueue-controller-manager",
}
# Trainer's own overlay names manifests of other projects by their addresses.
_TRAINER_OVERLAY = {
    "apiVersion": "kustomize.config.k8s.io/v1beta1",
    "kind": "Kustomization",
    "namespace": "kubeflow-system",
    "resources": ["namespace.yaml", "../../base/crds", "../../base/manager", "../../base/rbac", "../../base/webhook"],
    "secretGenerator": [
        {
            "name": "kubeflow-trainer-webhook-cert",
            "namespace": "kubeflow-system",
            "options": {"disableNameSuffixHash": True},
        }
    ],
}


class Cluster:
    """All processes and files of one cluster.

    Args:
        folder: for its files; `plan.json` in it names the address and the releases.
    """

    def __init__(self, folder: Path) -> None:
        plan = json.loads((folder / "plan.json").read_text())
        self.folder, self.bin, self.keys, self.logs = folder, programs.folder(), folder / "keys", folder / "logs"
        self.address: str = plan["address"]
        self.cgroup: str = plan["cgroup"]
        self.addons: dict[str, str] = plan["addons"]
        self.num_nodes: int = plan["nodes"]
        self.node = Node(self, 0)
        for place in (self.keys, self.logs):
            place.mkdir(parents=True, exist_ok=True)

    # ---- tools ----------------------------------------------------------------------------------------------------

    def spawn(self, name: str, *options: str | Path, log: str = "", inside: Sequence[str] = ()) -> None:
        """Start a program of the cluster.

        Args:
            name: the program.
            options: its arguments.
            log: its output goes to `logs/LOG.log`; by default, the name.
            inside: the command that enters the namespaces of a node.
        """
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        with (self.logs / f"{log or name}.log").open("ab") as output:
            subprocess.Popen(
                [*inside, self.bin / name, *map(str, options)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def kubectl(self, *words: str | Path, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator, and return what it prints."""
        command = [self.bin / "kubectl", "--kubeconfig", self.folder / "local.kubeconfig", *words]
        done = subprocess.run(list(map(str, command)), input=stdin, text=True, check=False, capture_output=True)
        if check and done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(map(str, words))}: {done.stderr.strip()[-1500:]}")
        return done.stdout

    def apply(self, objects: Sequence[dict[str, Any]]) -> None:
        """Create or change objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)

    def wait(self, what: str, is_so: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until `is_so`; an exception counts as no."""
        begun, why = time.monotonic(), ""
        while True:
            try:
                if is_so():
                    print(f"{what} after {time.monotonic() - begun:.1f} s", flush=True)
                    return
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                why = str(error)
            if time.monotonic() - begun > seconds:
                raise RuntimeError(f"{what}: not within {seconds:g} s {why}")
            time.sleep(0.2)

    def certificate(self, name: str, user: str, group: str = "", names: Sequence[str] = ()) -> None:
        """A key and a certificate, signed by the cluster's own authority."""
        key, request, signed, extra = (self.keys / f"{name}.{kind}" for kind in ("key", "csr", "crt", "ext"))
        subject = (f"/O={group}" if group else "") + f"/CN={user}"
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl("req", "-new", *curve, "-keyout", key, "-out", request, "-subj", subject)
        usage = "extendedKeyUsage=serverAuth,clientAuth\n"
        extra.write_text(usage + (f"subjectAltName={','.join(names)}\n" if names else ""))
        authority = ("-CA", self.keys / "ca.crt", "-CAkey", self.keys / "ca.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *authority, "-days", "30", "-out", signed, "-extfile", extra)

    def kubeconfig(self, name: str, user: str, group: str = "", host: str = "127.0.0.1") -> None:
        """A kubeconfig for a user of its own, `NAME.kubeconfig`."""
        self.certificate(name, user, group)

        def data(path: Path) -> str:
            return base64.b64encode(path.read_bytes()).decode()

        cluster = {"server": f"https://{host}:6443", "certificate-authority-data": data(self.keys / "ca.crt")}
        keys = {
            "client-certificate-data": data(self.keys / f"{name}.crt"),
            "client-key-data": data(self.keys / f"{name}.key"),
        }
        place = self.folder / f"{name}.kubeconfig"
        place.touch(mode=0o600)
        place.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "test", "user": keys}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                }
            )
        )

    # ---- the control plane ----------------------------------------------------------------------------------------

    def start_control_plane(self) -> None:
        """Keys, etcd, API server, controllers and scheduler."""
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        authority = ("-keyout", self.keys / "ca.key", "-out", self.keys / "ca.crt", "-subj", "/CN=test")
        _openssl("req", "-x509", "-new", *curve, *authority, "-days", "30")
        _openssl("genrsa", "-out", self.keys / "tokens.key", "2048")
        _openssl("rsa", "-in", self.keys / "tokens.key", "-pubout", "-out", self.keys / "tokens.pub")
        service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
        names = [f"DNS:{name}" for name in ("localhost", *service, f"{service[-1]}.cluster.local")]
        names += [f"IP:{address}" for address in ("127.0.0.1", self.address, self.node.gateway, _API_SERVICE)]
        self.certificate("apiserver", "kube-apiserver", names=names)
        self._identify(self.node)
        self.kubeconfig("admin", "admin", "system:masters", self.address)
        self.kubeconfig("local", "admin", "system:masters")
        self.kubeconfig("controllers", "system:kube-controller-manager")
        self.kubeconfig("scheduler", "system:kube-scheduler")
        self.start_etcd()
        self.start_api_server()
        self.wait("the API server is ready", lambda: self.kubectl("get", "--raw", "/readyz") == "ok")
        self.spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.folder}/controllers.kubeconfig",
            f"--root-ca-file={self.keys}/ca.crt",
            f"--service-account-private-key-file={self.keys}/tokens.key",
            "--use-service-account-credentials",
            "--leader-elect=false",
        )
        self.spawn("kube-scheduler", f"--kubeconfig={self.folder}/scheduler.kubeconfig", "--leader-elect=false")

    def start_etcd(self) -> None:
        """The database of the API server; without fsync, because it lives no longer than the tests."""
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        self.spawn(
            "etcd",
            "--data-dir",
            self.folder / "etcd",
            "--unsafe-no-fsync",
            *("--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", "--log-level", "warn"),
        )

    def start_api_server(self) -> None:
        """The API server; tests end it and start it again."""
        keys = self.keys
        self.spawn(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--secure-port=6443",
            f"--advertise-address={self.node.gateway}",
            *(f"--tls-cert-file={keys}/apiserver.crt", f"--tls-private-key-file={keys}/apiserver.key"),
            f"--client-ca-file={keys}/ca.crt",
            *(
                f"--service-account-key-file={keys}/tokens.pub",
                f"--service-account-signing-key-file={keys}/tokens.key",
            ),
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={_SERVICE_RANGE}",
            *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
            "--allow-privileged=true",
            *(f"--kubelet-client-certificate={keys}/admin.crt", f"--kubelet-client-key={keys}/admin.key"),
            f"--kubelet-certificate-authority={keys}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            # For servers of further APIs, such as Kueue's: while one is out of reach, no namespace can be deleted.
            *(f"--proxy-client-cert-file={keys}/admin.crt", f"--proxy-client-key-file={keys}/admin.key"),
            f"--requestheader-client-ca-file={keys}/ca.crt",
            "--requestheader-allowed-names=admin",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        )

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def start_nodes(self) -> None:
        """The first node, and the name server on it."""
        self.node.start()
        self._wait_for_node(self.node)
        self._start_name_server()

    def start_second_node(self) -> None:
        """A node in network and mount namespaces of its own, with the images that the pods of jobs need."""
        node = Node(self, 1)
        self._identify(node, "-1", self.node.gateway)
        node.start()
        node.host_image()
        self._wait_for_node(node)

    def _identify(self, node: Node, suffix: str = "", api_server: str = "127.0.0.1") -> None:
        """Make the keys of a node."""
        names = [f"DNS:{node.name}", f"IP:{node.gateway}", "IP:127.0.0.1"]
        self.certificate(f"kubelet{suffix}", node.name, names=names)
        self.kubeconfig(f"node{suffix}", f"system:node:{node.name}", "system:nodes", api_server)
        self.kubeconfig(f"proxy{suffix}", "system:kube-proxy", host=api_server)

    def _wait_for_node(self, node: Node) -> None:
        ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        self.wait(f"{node.name} is ready", lambda: self.kubectl("get", "node", node.name, "-o", ready) == "True")
        # No device is behind it: pods that request one are scheduled, and train on the processor.
        devices = json.dumps({"status": {"capacity": {"nvidia.com/gpu": "8"}}})
        self.kubectl("patch", "node", node.name, "--subresource=status", "--type=merge", "-p", devices)

    def _start_name_server(self) -> None:
        (self.folder / "Corefile").write_text(
            f".:53 {{\n  bind {self.node.gateway}\n  errors\n  kubernetes cluster.local in-addr.arpa {{\n"
            f"    kubeconfig {self.folder}/local.kubeconfig\n    ttl 1\n  }}\n}}\n"
        )
        self.spawn("coredns", "-conf", self.folder / "Corefile")
        ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
        metadata = {"name": "dns", "namespace": "kube-system"}
        labels = {"kubernetes.io/service-name": "dns"}
        self.apply(
            [
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "metadata": metadata,
                    "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
                },
                {
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {**metadata, "name": "dns-1", "labels": labels},
                    "addressType": "IPv4",
                    "endpoints": [{"addresses": [self.node.gateway]}],
                    "ports": ports,
                },
            ]
        )

    # ---- addons ---------------------------------------------------------------------------------------------------

    def start_addons(self) -> None:
        """JobSet, Trainer and Kueue, from their own manifests, as pods of images made here."""
        for name, version in self.addons.items():
            program = programs.addon(name, version)
            files = {"manager": self.bin / program.name}
            self.node.image(f"{name}:1", files, entrypoint=["/manager"], user="65532:65532")
            self._apply_manifests(name, programs.source(program))
        self.node.host_image()
        for name in self.addons:
            words = ("-n", _ADDON_NAMESPACES[name], "get", "deployment", _DEPLOYMENTS[name])
            ready = (*words, "-o", "jsonpath={.status.readyReplicas}")
            self.wait(f"{name} is ready", lambda ready=ready: self.kubectl(*ready) == "1", 180)

    def _apply_manifests(self, name: str, source: Path) -> None:
        place = self.folder / "manifests" / name
        shutil.copytree(source / ("manifests" if name == "trainer" else "config"), place)
        for path in place.rglob("*"):
            path.chmod(path.stat().st_mode | 0o200)
        overlay = place / "default"
        if name == "trainer":
            overlay = place / "overlays" / "manager"
            overlay.chmod(0o755)
            (overlay / "kustomization.yaml").write_text(yaml.safe_dump(_TRAINER_OVERLAY))
        text = self.kubectl("kustomize", overlay)
        objects = [item for item in yaml.safe_load_all(text) if item]
        for item in objects:
            if item["kind"] == "Deployment":
                _fit(item["spec"]["template"]["spec"]["containers"], name)
            has_status_server = (source / "pkg" / "statusserver").exists()  # Trainer 2.1 has none
            if has_status_server and "controller_manager_config.yaml" in item.get("data", {}):
                # Its status server, to which a training posts its progress.
                item["data"]["controller_manager_config.yaml"] += "\nfeatureGates:\n  TrainJobStatus: true\n"
        self.apply(objects)


def _fit(containers: list[dict[str, Any]], name: str) -> None:
    """Small requests, the image made here, and probes that notice within seconds."""
    containers[0].update(image=f"{REGISTRY}/{name}:1", imagePullPolicy="Never")
    for container in containers:
        container["resources"] = {"requests": {"cpu": "20m", "memory": "64Mi"}}
        for probe, period_s in (("readinessProbe", 2), ("livenessProbe", 20)):
            container.get(probe, {}).update(initialDelaySeconds=1, periodSeconds=period_s, timeoutSeconds=5)


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def _serve(folder: Path) -> None:
    cluster = Cluster(folder)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    cluster.start_control_plane()
    cluster.start_nodes()
    cluster.start_addons()
    if cluster.num_nodes > 1:
        cluster.start_second_node()
    (folder / "ready").touch()
    while True:
        time.sleep(3600)


def main() -> None:
    second = os.fork()
    if second == 0:
        _serve(Path(sys.argv[1]))
    while True:  # the first process of a PID namespace inherits its orphans
        ended, _ = os.wait()
        if ended == second:
            sys.exit(1)


if __name__ == "__main__":
    main()
