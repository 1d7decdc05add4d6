"""Builds the programs of the test cluster from their Go modules, and keeps them in the user's cache."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KUBERNETES = "1.36.3"
_SOURCES = Path(__file__).parent / "go"
_STAGING = """
api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap
code-generator component-base component-helpers controller-manager cri-api cri-client cri-streaming
csi-translation-lib dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator kube-controller-manager
kube-proxy kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission sample-apiserver
sample-cli-plugin sample-controller streaming
"""
_KUBERNETES_PROGRAMS = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"),
    *("kubelet", "kubectl"),
)
_LINK = "-s -w"
PACKAGES = ("runc", "containernetworking-plugins", "iptables", "conntrack", "iproute2", "socat", "openssl")
_COMMANDS = ("runc", "iptables", "conntrack", "ip", "socat", "openssl", "unshare", "nsenter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program.

    Args:
        name: of its file.
        package: the Go package with its `main`.
        module: the module that holds the package.
        version: the release of the module.
    """

    name: str
    package: str
    module: str
    version: str


def trainer(version: str) -> Program:
    """Kubeflow Trainer's controller."""
    module = "github.com/kubeflow/trainer/v2"
    package = f"{module}/cmd/trainer-controller-manager"
    return Program(name=f"trainer-{version}", package=package, module=module, version=f"v{version}")


def jobset(version: str) -> Program:
    """JobSet's controller."""
    return Program(
        name=f"jobset-{version}", package="sigs.k8s.io/jobset", module="sigs.k8s.io/jobset", version=f"v{version}"
    )


def kueue(version: str) -> Program:
    """Kueue's controller."""
    module = "sigs.k8s.io/kueue"
    return Program(name=f"kueue-{version}", package=f"{module}/cmd/kueue", module=module, version=f"v{version}")


_CONTAINERD = "github.com/containerd/containerd/v2"
_NODE = (
    Program(name="etcd", package="go.etcd.io/etcd/server/v3", module="go.etcd.io/etcd/server/v3", version="v3.6.6"),
    Program(
        name="coredns", package="github.com/coredns/coredns", module="github.com/coredns/coredns", version="v1.14.4"
    ),
    *(
        Program(name=name, package=f"{_CONTAINERD}/cmd/{name}", module=_CONTAINERD, version="v2.2.1")
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    ),
)
ADDONS = (jobset("0.12.0"), trainer("2.3.0"), kueue("0.19.2"))
OLDER = {
    "2.1": {"jobset": "0.10.1", "trainer": "2.1.0", "kueue": "0.19.2"},
    "2.2": {"jobset": "0.12.0", "trainer": "2.2.1", "kueue": "0.19.2"},
}
"""The addons of clusters with an older Trainer (`make test-cluster-long`)."""


def addon(name: str, version: str) -> Program:
    """The controller of an addon."""
    return {"jobset": jobset, "trainer": trainer, "kueue": kueue}[name](version)


def folder() -> Path:
    """Where the built programs are; another folder for other releases or sources."""
    text = "".join(path.read_text() for path in sorted(_SOURCES.iterdir()))
    digest = hashlib.sha256(repr((KUBERNETES, _NODE, text)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safepoint" / "tests"
    return cache / f"cluster-{digest}"


def missing(*, with_older: bool = False) -> list[Program | str]:
    """What `build` would build: programs, and the names of the two that have sources here."""
    older = {addon(*item) for addons in OLDER.values() for item in addons.items()} - {*ADDONS} if with_older else ()
    wanted = (*_NODE, *ADDONS, *sorted(older, key=lambda item: item.name))
    programs: list[Program | str] = [item for item in wanted if not (folder() / item.name).exists()]
    return [name for name in ("kubernetes", "pause") if not (folder() / name).exists()] + programs


def unavailable() -> str | None:
    """Why no cluster can run here, or None."""
    if os.geteuid() != 0:
        return "namespaces, mounts and cgroups need root"
    absent = [name for name in _COMMANDS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found; `make test-cluster` installs them on Debian"
    return "its programs are not built" if missing() else None


def install() -> str | None:
    """Install Debian's packages. Returns why that is not possible, or None."""
    if os.geteuid() != 0:
        return "namespaces, mounts and cgroups need root"
    if all(shutil.which(name) for name in _COMMANDS) and Path("/usr/lib/cni/bridge").exists():
        return None
    if shutil.which("apt-get") is None:
        return "there is no apt-get here"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", "-qq", *command], env=environment, check=False, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            return f"apt-get {command[0]} failed with exit code {done.returncode}"
    return None


def build(*, with_older: bool = False) -> str | None:
    """Build what is missing. Returns why that is not possible, or None."""
    if missing(with_older=with_older) and shutil.which("go") is None:
        return "there is no Go here"
    folder().mkdir(parents=True, exist_ok=True)
    for name in _KUBERNETES_PROGRAMS:
        if not (folder() / name).is_symlink():
            (folder() / name).symlink_to("kubernetes")
    for item in missing(with_older=with_older):
        with tempfile.TemporaryDirectory(dir=folder()) as place:
            try:
                if isinstance(item, Program):
                    _build_module(item, Path(place))
                elif item == "kubernetes":
                    _build_kubernetes(Path(place))
                else:
                    _go(Path(place), "build", "-ldflags", _LINK, "-o", "program", _SOURCES / f"{item}.go")
            except subprocess.CalledProcessError as error:
                name = item if isinstance(item, str) else item.name
                return f"{name} cannot be built: {error.stderr.strip()[-500:]}"
            Path(place, "program").replace(folder() / (item if isinstance(item, str) else item.name))
    return None


def _go(place: Path, *words: str | Path, extra: Mapping[str, str] | None = None) -> str:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-trimpath", **(extra or {})}
    command = ["go", *map(str, words)]
    return subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True, text=True).stdout


def source(program: Program) -> Path:
    """The module's own files, among them its manifests; downloaded if necessary."""
    found = json.loads(_go(Path("/"), "mod", "download", "-json", f"{program.module}@{program.version}"))
    return Path(found["Dir"])


def _build_module(program: Program, place: Path) -> None:
    """Build with the versions of the module's own go.mod: `go install` refuses modules with replacements."""
    found = source(program)
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(found / name, place / name)
    _go(place, "mod", "edit", "-module=cluster.test/program", f"-require={program.module}@{program.version}")
    text = (place / "go.mod").read_text()
    (place / "go.mod").write_text(re.sub(r"(?m)^.*=> \.{1,2}/.*\n", "", text))  # folders of its repository
    _go(place, "build", "-mod=mod", "-ldflags", _LINK, "-o", "program", program.package)


def _build_kubernetes(place: Path) -> None:
    """Kubernetes names its staging modules by folders, which have to be replaced by their releases."""
    staging = "0." + KUBERNETES.partition(".")[2]
    replaced = "".join(f"replace k8s.io/{name} => k8s.io/{name} v{staging}\n" for name in _STAGING.split())
    (place / "go.mod").write_text(
        f"module cluster.test/kubernetes\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes v{KUBERNETES}\n\n{replaced}"
    )
    shutil.copyfile(_SOURCES / "kubernetes.go", place / "main.go")
    _go(place, "mod", "tidy", "-e")
    major, minor, _ = KUBERNETES.split(".")
    version = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in version.items())
    _go(place, "build", "-ldflags", f"{_LINK} {stamps}", "-o", "program", ".")
