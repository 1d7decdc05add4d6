"""Makes small committed checkpoints without training."""

import json
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest, Trigger
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.final_model import final_folder
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.working_checkpoint import (
    WorkingCheckpoint,
    extend_manifest,
    find_added_files,
    replace_record,
)

FILES = {
    0: {
        "model.safetensors": bytes(range(256)) * 20,
        "sub/optimizer.pt": b"optimizer" * 300,
        "rng_state_0.pth": b"zero",
    },
    1: {"rng_state_1.pth": b"one"},
}


def describe(step: int, *, attempt: int = 1):
    def make(files: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(
            run_id="run",
            attempt=attempt,
            step=step,
            epoch=step / 10,
            trigger=Trigger.PERIODIC,
            world_size=2,
            global_batch=8,
            gradient_accumulation=2,
            samples_seen=8 * step,
            strategy="ddp",
            libraries={"torch": "2.13.0"},
            created="2026-01-01T00:00:00.000Z",
            files=files,
        )

    return make


def prepared(root: Path) -> OutputFolder:
    output = OutputFolder(root)
    output.prepare()
    return output


def written(output: OutputFolder, step: int, files: dict[int, dict[str, bytes]] | None = None) -> WorkingCheckpoint:
    """The checkpoint that the ranks have written, before it is sealed."""
    working = WorkingCheckpoint(output, attempt_id="attempt", step=step)
    for rank, contents in (FILES if files is None else files).items():
        folder = working.rank_root(rank) / working.name
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return working


def commit(output: OutputFolder, step: int, files: dict[int, dict[str, bytes]] | None = None) -> Path:
    working = written(output, step, files)
    parts = [working.seal(rank) for rank in (FILES if files is None else files)]
    working.commit(parts, describe(step))
    working.discard()
    return working.target


def keep_final(output: OutputFolder, **contents: bytes) -> Path:
    """Write a final model for the uploader; `config_json` is the content of `config.json`."""
    working = WorkingCheckpoint(output, attempt_id="attempt", step=9, target=final_folder(output))
    folder = working.rank_root(0) / working.name
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    working.commit([working.seal(0)], describe(9))
    working.discard()
    return working.target


def name_added_files(folder: Path) -> list[str]:
    """Do what a save does after callbacks have added files to its checkpoint; returns their paths."""
    manifest = read_manifest(folder)
    added = find_added_files(folder, manifest)
    replace_record(folder, extend_manifest(manifest, added), added)
    return [entry.path for entry in added]


def sealed(record: dict[str, Any]) -> bytes:
    """A manifest whose own digest is right, whatever it says."""
    record = {name: value for name, value in record.items() if name != "manifest_digest"}
    body = (json.dumps(record, sort_keys=True, indent=1) + "\n").encode()
    return (json.dumps({**record, "manifest_digest": digest_bytes(body)}, sort_keys=True, indent=1) + "\n").encode()


def reseal(folder: Path) -> None:
    """Make the manifest fit what the files of a checkpoint are now, as its owner can."""
    record = json.loads((folder / MANIFEST_NAME).read_bytes())
    for entry in record["files"]:
        content = (folder / entry["path"]).read_bytes()
        entry |= {"digest": digest_bytes(content), "size_bytes": len(content)}
    (folder / MANIFEST_NAME).write_bytes(sealed(record))
