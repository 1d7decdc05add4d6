"""A run without training: commits, prunes and uploads small checkpoints as fast as it can, until it is killed.

It begins as a run does: lock, clean up, newest valid checkpoint of folder and store, claim, uploader. Each step's
files are a function of the step, so that anything torn is seen. One line on stdout for each thing that happened.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any

from safepoint.checkpoint.commit import FolderDestination, commit
from safepoint.checkpoint.format.catalog import checkpoint_name, newest_valid
from safepoint.checkpoint.format.manifest import FileEntry, Manifest, Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import KeepNewest, prune
from safepoint.checkpoint.local.working_checkpoint import WorkingCheckpoint
from safepoint.checkpoint.remote.fetch import check_listing, create_files, fetch, windows_of
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader_process import UploaderPlan
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.training.context.uploads import Uploader

KEEP = 2


def say(*words: object) -> None:
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


def content(step: int, name: str) -> bytes:
    size = 17 << 20 if name == "big" else 50_000  # the big one goes in parts
    return random.Random(f"{step}-{name}").randbytes(1000) * (size // 1000)


def files_of(step: int) -> list[str]:
    return ["model", "sub/optimizer", *(["big"] if step % 4 == 0 else [])]


def check(folder: Path, step: int) -> None:
    for name in files_of(step):
        assert (folder / name).read_bytes() == content(step, name), f"{folder}/{name} is not that of step {step}"


def begin(output: OutputFolder, remote: RemoteFolder, attempt: int) -> int:
    output.prepare()
    assert output.claim(wait_s=10, waiting=lambda who: None)
    output.clean()
    found = newest_valid(output.root, rejected=lambda path, fault: say("rejected", path, fault))
    step = found[1].step if found else 0
    if found:
        check(found[0], step)
    newer = [other for other in remote.steps() if other > step]
    if newer:
        name = checkpoint_name(newer[0])
        manifest = remote.manifest(newer[0])
        check_listing(remote.store, name, manifest)
        working = output.work / "fetch"
        create_files(manifest.files, working)
        fetch(remote.store, name, windows_of(manifest.files), working)
        commit(FolderDestination(working, output.root / name, trash=output.trash), manifest)
        check(output.root / name, newer[0])
        step = newer[0]
        say("fetched", step)
    remote.claim(Claim(run_id="run", attempt=attempt, attempt_id=f"run-{attempt}", since="", host=""))
    say("cleaned", remote.clean(keep=[path.name for path, _ in list(output.manifests())[:1]]))
    return step


def describe(step: int, attempt: int):
    facts: dict[str, Any] = {"epoch": 0.0, "world_size": 1, "global_batch": 1, "gradient_accumulation": 1}

    def make(files: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(
            run_id="run",
            attempt=attempt,
            step=step,
            trigger=Trigger.PERIODIC,
            samples_seen=step,
            strategy="single",
            created="now",
            files=files,
            **facts,
        )

    return make


def main(folder: str, location: str, number: str) -> None:
    attempt = int(number)
    output = OutputFolder(Path(folder))
    remote = RemoteFolder(open_store(parse_location(location)))
    step = begin(output, remote, attempt)
    Uploader(UploaderPlan(folder=folder, location=location, attempt_id=f"run-{attempt}", keep=f"newest={KEEP}"))
    say("began", step)
    while True:
        step += 1
        working = WorkingCheckpoint(output, attempt_id=f"run-{attempt}", step=step)
        root = working.rank_root(0) / working.name
        for name in files_of(step):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content(step, name))
        working.commit([working.seal(0)], describe(step, attempt))
        working.discard()
        say("committed", step)
        prune(output, [KeepNewest(KEEP)], lambda event: None)
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
