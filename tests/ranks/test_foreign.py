"""Runs that begin from the checkpoints of a plain Trainer, in a folder and in a bucket."""

import functools
import uuid
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.foreign.examine import examine
from safepoint.checkpoint.format.verify import verify
from safepoint.storage.location import Location, Scheme
from safepoint.storage.opening import open_store
from tests.support.commands import safepoint as run_command
from tests.support.deepspeed import skip_without_deepspeed
from tests.support.foreign import (
    LAYOUTS,
    arguments_of,
    contents,
    copy_checkpoints,
    ranks_of,
    train_plain,
    variables_of,
)
from tests.support.jobs import Job, committed_steps, no_orphans, read_events, safepoint, tiny
from tests.support.moto_server import MotoServer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

_MARKER = "checkpoint-is-incomplete.txt.node-0-rank-0"


def _long(layout: str, usual: set[str]) -> Any:
    return layout if layout in usual else pytest.param(layout, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with the steps 4 and 8 of a plain Trainer; made once for each layout."""

    @functools.cache
    def make(layout: str) -> Path:
        skip_without_deepspeed(layout)
        output = tmp_path_factory.mktemp("foreign") / layout
        train_plain(output, layout, "--save-strategy", "steps", "--save-steps", "4", "--max-steps", "8")
        return output

    return make


def _start(output: Path, layout: str, *options: str, steps: int = 12, env: dict[str, str] | None = None) -> Job:
    program = tiny(output, "--end", "end", "--max-steps", str(steps), *arguments_of(layout))
    ranks = ("--nproc-per-node", str(ranks_of(layout)))
    return safepoint(output, *ranks, *options, program=program, **variables_of(layout), **(env or {}))


def _end(job: Job, code: int = 0) -> None:
    with no_orphans(job):
        assert job.wait(120) == code, job.text


@pytest.mark.parametrize("layout", [_long(layout, {"single", "zero3"}) for layout in LAYOUTS])
def test_a_folder_of_a_plain_trainer_is_continued(layout: str, foreign: Any, tmp_path: Path) -> None:
    """From its newest step; what is saved next is Safepoint's, and the old checkpoints stay as they are."""
    output = copy_checkpoints(foreign(layout), tmp_path / "run")
    before = contents(output)
    job = _start(output, layout, "--keep", "newest=1")
    _end(job)
    assert [event["step"] for event in read_events(output, "resumed_from_foreign")] == [8], job.text
    assert "These values are not restored exactly" in job.text
    assert committed_steps(output) == [12]
    assert verify(output / "checkpoint-12").is_valid
    assert contents(output) == before
    assert not list((output / ".safepoint" / "work").glob("foreign/*"))
    again = _start(output, layout, steps=14)
    _end(again)
    assert read_events(output, "resumed")[-1]["step"] == 12


@pytest.mark.parametrize("layout", [_long(layout, {"single"}) for layout in LAYOUTS])
def test_a_bucket_of_a_plain_trainer_is_continued(
    layout: str, foreign: Any, moto: MotoServer, tmp_path: Path
) -> None:
    """An upload that was not finished is passed over; nothing that was in the bucket changes."""
    prefix = f"foreign-{uuid.uuid4().hex}"
    store = moto.store(prefix)
    source = foreign(layout)
    for path in source.glob("checkpoint-*/**/*"):
        if path.is_file():
            store.upload(str(path.relative_to(source)), path)
    store.write(f"checkpoint-8/{_MARKER}", b"Upload queued for checkpoint-8")
    before = {item.key: item.version for item in store.list()}
    output = tmp_path / "run"
    job = _start(
        output,
        layout,
        *("--output-dir", str(moto.location(prefix)), "--local-dir", str(output)),
        env=moto.variables,
    )
    _end(job)
    assert [event["step"] for event in read_events(output, "resumed_from_foreign")] == [4], job.text
    assert _MARKER in job.text
    after = {item.key: item.version for item in store.list()}
    assert {key: after.get(key) for key in before} == before
    assert "checkpoint-12/safepoint-manifest.json" in after


_OPTIONAL = {"training_args.bin", "config.json", "generation_config.json", "README.md", "zero_to_fp32.py"}
_NOT_READ = {"training_args.bin", "README.md", "zero_to_fp32.py"}


@pytest.mark.parametrize("layout", [_long(layout, {"single", "ddp"}) for layout in LAYOUTS])
def test_every_file_is_checked(layout: str, foreign: Any, tmp_path: Path) -> None:
    """One that is missing, cut off or a link is a fault that names it; the whole checkpoint has none."""
    output = copy_checkpoints(foreign(layout), tmp_path / "run")
    checkpoint = output / "checkpoint-8"
    store = open_store(Location(scheme=Scheme.FILE, path=str(output)))
    assert examine(store, checkpoint.name).faults == ()
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        content, name = path.read_bytes(), str(path.relative_to(checkpoint))
        is_optional = path.name in _OPTIONAL or (layout.startswith(("fsdp", "zero")) and name == "model.safetensors")
        path.unlink()
        assert bool(examine(store, checkpoint.name).faults) != is_optional, name
        path.symlink_to("/etc/hostname")
        assert name in [fault.file for fault in examine(store, checkpoint.name).faults]
        path.unlink()
        for count in (0, 7, len(content) // 2, len(content.rstrip()) - 1):
            path.write_bytes(content[:count])
            assert bool(examine(store, checkpoint.name).faults) != (path.name in _NOT_READ), (name, count)
        path.write_bytes(content)
    assert examine(store, checkpoint.name).faults == ()


def test_only_unusable_ones(foreign: Any, tmp_path: Path) -> None:
    """Exit code 14 with the reason; `verify` says the same."""
    output = copy_checkpoints(foreign("single"), tmp_path / "run")
    (output / "checkpoint-4" / "optimizer.pt").unlink()
    (output / "checkpoint-8" / _MARKER).touch()
    job = _start(output, "single")
    _end(job, 14)
    assert "optimizer.pt: it is missing" in job.text
    assert "Safepoint did not write" in job.text
    verified = run_command("checkpoints", "verify", output / "checkpoint-4")
    assert verified.code == 14
    assert "optimizer.pt: it is missing" in verified.stdout


def test_a_newer_one_is_offered_and_can_be_chosen(foreign: Any, tmp_path: Path) -> None:
    """Safepoint's own come first, whatever else is in the folder; `--resume` takes the other one."""
    output = tmp_path / "run"
    _end(_start(output, "single", steps=6))
    copy_checkpoints(foreign("single"), output)
    job = _start(output, "single", steps=7)
    _end(job)
    assert read_events(output, "resumed")[-1]["step"] == 6
    newer = read_events(output, "newer_foreign")[-1]
    assert newer["step"] == 8
    assert f"--resume {newer['path']}" in job.text
    chosen = _start(output, "single", "--resume", newer["path"], steps=10)
    _end(chosen)
    assert read_events(output, "resumed_from_foreign")[-1]["step"] == 8, chosen.text
    assert committed_steps(output)[-1] == 10


def test_adopted_ones_are_safepoints(foreign: Any, tmp_path: Path) -> None:
    """They have digests, a resume says nothing special, and retention counts them."""
    output = copy_checkpoints(foreign("lora"), tmp_path / "run")
    assert run_command("checkpoints", "adopt", output).code == 0
    assert run_command("checkpoints", "verify", output, "--deep").code == 0
    _end(_start(output, "lora", "--keep", "newest=1"))
    assert read_events(output, "resumed")[-1]["step"] == 8
    assert not read_events(output, "resumed_from_foreign")
    assert committed_steps(output) == [12]
