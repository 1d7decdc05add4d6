"""Two gigabytes to an S3 server and back: Safepoint against boto3 and s3torchconnector, on Ceph RGW on loopback.

Every figure is of a process of its own, so that its processor time and its memory are its own too; products take
turns within a round, and who begins changes from round to round. Twice: as fast as the machine goes, and through a
link of 200 MB/s and 20 ms. Safepoint does what the mover and a resume do: a checkpoint is published, its content
compared with its manifest on the way, and fetched, verified and durable at the end; the peers only move bytes.

The machine's limits: the same file digested and copied on the disk; and, as a product of its own, what any program
has to do: the file digested and sent through a loopback socket, or received, digested, written and made durable.
Needs Ceph RGW (`make test-s3` installs it) and the peers (`make bench` installs them); says so where one is missing.
"""

import argparse
import importlib.util
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from figures import print_load, print_machine, row, verdict

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.ceph_rgw import CephRgw, ceph_rgw, unavailable

from safepoint.checkpoint.format.digest import FileDigester, digest_file
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest, Trigger
from safepoint.foundation import clock
from safepoint.testing.fault_proxy import FaultProxy

PRODUCTS = ("safepoint", "boto3", "s3torchconnector")
LIMIT = "limit"
WIRE = "HF_BENCH_WIRE"
BUCKET = CephRgw.bucket
NAME = "checkpoint-1"
MB = 1_000_000
GOAL_CPU_RATIO, GOAL_RSS_MB = 5, 256


# ---- one measurement, in a process of its own ---------------------------------------------------------------------


def safepoint_up(source: Path, key: str) -> None:
    from safepoint.checkpoint.format.verify import read_manifest
    from safepoint.checkpoint.remote.publish import publish
    from safepoint.checkpoint.remote.remote_folder import RemoteFolder
    from safepoint.checkpoint.remote.verified_upload import UploadRecord
    from safepoint.storage.location import parse_location
    from safepoint.storage.opening import open_store

    remote = RemoteFolder.as_guest(open_store(parse_location(f"s3://{BUCKET}/{key}")))
    sent = UploadRecord(source.with_suffix(".sent"))
    publish(remote, source.parent, read_manifest(source.parent), name=NAME, sent=sent)


def safepoint_down(key: str, target: Path, source: Path) -> None:
    from safepoint.checkpoint.remote.fetch import create_files, fetch, windows_of
    from safepoint.checkpoint.remote.remote_folder import RemoteFolder
    from safepoint.storage.location import parse_location
    from safepoint.storage.opening import open_store

    store = open_store(parse_location(f"s3://{BUCKET}/{key}"))
    files = RemoteFolder(store).manifest_of(NAME).files
    create_files(files, target)
    fetch(store, NAME, windows_of(files), target)


def boto3_client():
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])


def boto3_up(source: Path, key: str) -> None:
    boto3_client().upload_file(str(source), BUCKET, key)


def boto3_down(key: str, target: Path, source: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    boto3_client().download_file(BUCKET, key, str(target / source.name))


def s3torch_client():
    from s3torchconnector._s3client import S3Client
    from s3torchconnector._s3client.s3client_config import S3ClientConfig

    return S3Client(
        "us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL_S3"], s3client_config=S3ClientConfig(force_path_style=True)
    )


def s3torchconnector_up(source: Path, key: str) -> None:
    try:
        with source.open("rb") as file, s3torch_client().put_object(BUCKET, key) as writer:
            while block := file.read(16 << 20):
                writer.write(block)
    except Exception as error:
        # Ceph RGW 16 answers the completion without the header that this client insists on: the object stands, as its
        # download shows, and the client calls it an error.
        if 'Header "ETag" not found' not in str(error):
            raise


def s3torchconnector_down(key: str, target: Path, source: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    reader = s3torch_client().get_object(BUCKET, key)
    with (target / source.name).open("wb") as file:
        while block := reader.read(16 << 20):
            file.write(block)


def limit_up(source: Path, key: str) -> None:
    digest_file(source)
    with source.open("rb") as file, socket.create_connection(("127.0.0.1", int(os.environ[WIRE]))) as wire:
        wire.sendall(b"u")
        wire.sendfile(file)
        wire.shutdown(socket.SHUT_WR)
        wire.recv(1)


def limit_down(key: str, target: Path, source: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    digester, buffer, done = FileDigester(), memoryview(bytearray(1 << 20)), 0
    with (
        (target / source.name).open("wb", buffering=0) as file,
        socket.create_connection(("127.0.0.1", int(os.environ[WIRE]))) as wire,
    ):
        os.posix_fallocate(file.fileno(), 0, source.stat().st_size)
        wire.sendall(b"d")
        while count := wire.recv_into(buffer, flags=socket.MSG_WAITALL):
            digester.update(buffer[:count])
            done += os.pwrite(file.fileno(), buffer[:count], done)
        os.fsync(file.fileno())


def serve_wire(source: Path) -> None:
    """The other end of the limit's socket: takes a file and forgets it, or sends one."""
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            wire, _ = server.accept()
            with wire, source.open("rb") as file:
                if wire.recv(1) == b"d":
                    wire.sendfile(file)
                else:
                    while wire.recv_into(buffer):
                        pass


def worker(product: str, direction: str, source: Path, target: Path) -> None:
    function: Callable[..., None] = globals()[f"{product}_{direction}"]
    key = f"bench/{product}"
    before_kb = peak_kb()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started_s = time.perf_counter()
    function(source, key) if direction == "up" else function(key, target, source)
    seconds = time.perf_counter() - started_s
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "rss_mb": (peak_kb() - before_kb) / 1000}))


def peak_kb() -> int:
    """The largest resident memory so far; `ru_maxrss` would begin with that of the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def manifest_of(source: Path) -> Manifest:
    return Manifest(
        run_id="bench",
        attempt=1,
        step=1,
        epoch=1.0,
        trigger=Trigger.PERIODIC,
        world_size=1,
        global_batch=1,
        gradient_accumulation=1,
        samples_seen=1,
        strategy="single",
        created=clock.utc_now(),
        files=(FileEntry.of(source.name, digest_file(source)),),
    )


# ---- the whole ----------------------------------------------------------------------------------------------------


def measure(
    product: str, direction: str, endpoint: str, rgw: CephRgw, source: Path, scratch: Path
) -> dict[str, float]:
    environ = {
        **os.environ,
        **rgw.variables,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    target = scratch / "fetched"
    command = [sys.executable, __file__, "worker", product, direction, str(source), str(target)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{product} {direction} failed:\n{done.stderr}")
    if direction == "down":
        fetched = target / source.name
        assert fetched.stat().st_size == source.stat().st_size
        fetched.unlink()
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def unthrottled(rgw: CephRgw) -> Iterator[str]:
    yield rgw.endpoint


@contextmanager
def slow(rgw: CephRgw) -> Iterator[str]:
    with FaultProxy(f"127.0.0.1:{rgw.port}", delay_s=0.02, bytes_per_s=200 * MB) as proxy:
        yield proxy.endpoint


LINKS: dict[str, Callable[[CephRgw], AbstractContextManager[str]]] = {
    "unthrottled": unthrottled,
    "200 MB/s, 20 ms": slow,
}


def limits(source: Path, scratch: Path) -> None:
    started_s = time.perf_counter()
    digest_file(source)
    digested_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    with source.open("rb") as reader, (scratch / "copy").open("wb") as writer:
        done = 0
        while count := os.sendfile(writer.fileno(), reader.fileno(), done, 16 << 20):
            done += count
        os.fsync(writer.fileno())
    copied_s = time.perf_counter() - started_s
    (scratch / "copy").unlink()
    size_mb = source.stat().st_size / MB
    print(f"   limits: digest {size_mb / digested_s:.0f} MB/s, copy with fsync {size_mb / copied_s:.0f} MB/s")


def peers_missing() -> str | None:
    """Which peers are not installed, or None; a comparison without one would have no ratio."""
    missing = [product for product in PRODUCTS if importlib.util.find_spec(product) is None]
    return f"{', '.join(missing)} not installed; `make bench` installs the peers" if missing else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    reason = unavailable() or peers_missing()
    if reason is not None:
        print(f"bench_storage: not run: {reason}")
        return
    print_machine(f"{options.mb} MB to an S3 server and back")
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as folder:
        scratch = Path(folder)
        source = scratch / NAME / "model.safetensors"
        source.parent.mkdir()
        with source.open("wb") as file:
            for _ in range(options.mb):
                file.write(os.urandom(MB))
        (source.parent / MANIFEST_NAME).write_bytes(manifest_of(source).to_bytes())
        limits(source, scratch)
        command = [sys.executable, __file__, "wire", str(source)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as wire:
            try:
                assert wire.stdout is not None
                os.environ[WIRE] = wire.stdout.readline().strip()
                for link in LINKS:
                    compare(link, source, scratch, options)
            finally:
                wire.kill()
    print_load("after")


def compare(link: str, source: Path, scratch: Path, options: argparse.Namespace) -> None:
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    warm_up = scratch / "warm-up"
    warm_up.write_bytes(os.urandom(64 * MB))
    products = (*PRODUCTS, LIMIT) if link == "unthrottled" else PRODUCTS
    for number in range(options.rounds):
        order = products[number % len(products) :] + products[: number % len(products)]
        # A new server for each round: it keeps objects in memory, and what was overwritten for hours.
        with ceph_rgw() as rgw, LINKS[link](rgw) as endpoint:
            rgw.store("bench").upload("warm-up", warm_up)  # the first one makes the server's pools, seconds long
            for product in order:
                for direction in ("up", "down"):
                    found = measure(product, direction, endpoint, rgw, source, scratch)
                    results.setdefault((product, direction), []).append(found)
    gb = options.mb / 1000
    print(f"\n-- {link}")
    for direction in ("up", "down"):
        for product in products:
            trials = results[product, direction]
            print(row(f"{direction}: {product}", [options.mb / trial["seconds"] for trial in trials], unit="MB/s"))
            print(row("      processor", [trial["cpu_s"] / gb for trial in trials], unit="s/GB"))
            print(row("      memory grows by", [trial["rss_mb"] for trial in trials], unit="MB"))

        def middle(product: str, field: str, direction: str = direction) -> float:
            return statistics.median(trial[field] for trial in results[product, direction])

        print(
            verdict(
                f"{direction}: throughput over s3torchconnector's",
                value=middle("s3torchconnector", "seconds") / middle("safepoint", "seconds"),
                goal=1.0,
                at_most=False,
                unit="times",
            )
        )
        print(
            verdict(
                f"{direction}: processor time, boto3's over Safepoint's",
                value=middle("boto3", "cpu_s") / middle("safepoint", "cpu_s"),
                goal=GOAL_CPU_RATIO,
                at_most=False,
                unit="times",
            )
        )
        if LIMIT in products:
            best = middle("boto3", "cpu_s") / middle(LIMIT, "cpu_s")
            print(f"   {direction}: the same ratio for the limit, the most that there is: {best:.3f} times")
        print(
            verdict(
                f"{direction}: memory",
                value=max(trial["rss_mb"] for trial in results["safepoint", direction]),
                goal=GOAL_RSS_MB,
                at_most=True,
                unit="MB",
            )
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
    elif sys.argv[1:2] == ["wire"]:
        serve_wire(Path(sys.argv[2]))
    else:
        main()
