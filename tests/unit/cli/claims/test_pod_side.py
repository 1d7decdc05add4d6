"""The two sides of a command about a claim: its words for the pod, and the answer of the pod."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.cli.claims import from_outside, pod_side
from safepoint.cli.lazy import walk
from safepoint.cli.main import root
from safepoint.errors import ExitCode
from safepoint.foundation import clock
from safepoint.foundation.events.answer_frames import Ending, EndingReader, FrameWriter, Part, read_frame
from safepoint.jobs.cluster.helper import helper
from safepoint.jobs.cluster.helper.helper_objects import HelperRequest
from safepoint.storage.location import CLAIMS
from safepoint.transparent.images.location import ImageLocation
from tests.support.checkpoints import commit, prepared
from tests.support.commands import Outcome, safepoint
from tests.support.criu_images import add_image


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[HelperRequest]:
    """The pod is this process: it has the claim `ckpt` in a folder. The list receives what a pod would be for."""
    received: list[HelperRequest] = []
    now_s = clock.wall_s() + 60
    monkeypatch.setattr(clock, "wall_s", lambda: now_s)

    def run(api: object, request: HelperRequest, receive: Callable[[Part, str], None], **options: Any) -> int:
        received.append(request)
        log = io.StringIO()
        monkeypatch.setenv(CLAIMS, f"ckpt={tmp_path}")
        ending = pod_side.run(request.arguments, FrameWriter(log, {str(tmp_path): "pvc://ckpt"}), is_terminal=False)
        monkeypatch.delenv(CLAIMS)
        writer = FrameWriter(log, {str(tmp_path): "pvc://ckpt"})
        writer.end(ending)
        frames = [frame for line in log.getvalue().splitlines() if (frame := read_frame(line)) is not None]
        reader = EndingReader()
        for frame in frames:
            ended = reader.read(frame)
            if ended is not None:
                return helper.code_of(ended)
            if frame.part is not Part.ENDING:
                receive(frame.part, frame.text)
        raise AssertionError("the log has no ending")

    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "current-context": "a",
                "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
                "clusters": [{"name": "a", "cluster": {"server": "https://127.0.0.1:1"}}],
                "users": [{"name": "a", "user": {}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setattr(helper, "run_helper", run)
    return received


def saved(folder: Path) -> Path:
    """A folder with three checkpoints."""
    output = prepared(folder)
    for step in (10, 20, 30):
        commit(output, step)
    return folder


def both(tmp_path: Path, *words: str) -> tuple[Outcome, Outcome]:
    """The outcome for a claim of a cluster, and for the folder, in which the claim's address replaces the folder."""
    there = safepoint("checkpoints", *words, "pvc://ckpt/out", "--on", ".")
    here = safepoint("checkpoints", *words, tmp_path / "out")

    def shown(text: str) -> str:
        return text.replace(str(tmp_path), "pvc://ckpt")

    return there, Outcome(code=here.code, stdout=shown(here.stdout), stderr=shown(here.stderr))


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "--json", "--deep"),
        ("show",),
        ("show", "--json"),
        ("verify", "--deep"),
        ("verify", "--json"),
        ("prune", "--keep", "newest=1", "--dry-run"),
        ("prune", "--keep", "newest=x"),
        ("prune", "--keep", "every=1", "--json"),
        ("repair", "--dry-run", "--idle", "5"),
    ],
)
def test_the_answer_is_that_of_a_folder(
    words: tuple[str, ...], tmp_path: Path, requests: list[HelperRequest]
) -> None:
    output = saved(tmp_path / "out")
    damaged = sorted(output.glob("checkpoint-*/*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    there, here = both(tmp_path, *words)
    assert there == here
    (request,) = requests
    assert request.claims == ("ckpt",)
    assert request.is_read_only is not (words[0] == "prune" and "--dry-run" not in words)


def images_in(folder: Path) -> Path:
    """Two images, of which the second needs the first."""
    location = ImageLocation(folder)
    folder.parent.mkdir(exist_ok=True)
    for number in (1, 2):
        add_image(location, folder.parent / f"dump-{number}", {100: b"x" * 4096 + bytes((number,)) * 4096})
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "--json"),
        ("show",),
        ("show", "--json"),
        ("verify",),
        ("verify", "--deep", "--json"),
    ],
)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_process_images_are_read_in_a_pod(
    words: tuple[str, ...], is_damaged: bool, tmp_path: Path, requests: list[HelperRequest]
) -> None:
    """The answer is that of a folder."""
    images = images_in(tmp_path / "x" / "images")
    if is_damaged:
        (images / "image-1" / "part-0" / "pages-1.regions").unlink()
    here = safepoint("images", *words, images)
    there = safepoint("images", *words, "pvc://ckpt/x/images", "--on", ".")
    assert there.code == here.code == (14 if is_damaged and words[0] == "verify" else 0)
    assert there.stdout == here.stdout.replace(str(tmp_path), "pvc://ckpt")
    assert "image-2" in there.stdout
    (request,) = requests
    assert (request.claims, request.is_read_only) == (("ckpt",), True)
    assert request.arguments[:2] == ("images", words[0])


def test_one_process_image_in_a_claim(tmp_path: Path, requests: list[HelperRequest]) -> None:
    images_in(tmp_path / "images")
    done = safepoint("images", "show", "pvc://ckpt/images/image-1", "--on", ".", "--json")
    assert (done.document["name"], done.document["needs"]) == ("image-1", [])
    missing = safepoint("images", "show", "pvc://ckpt/images/image-9", "--on", ".")
    assert (missing.code, "pvc://ckpt/images/image-9" in missing.stderr) == (14, True), missing.stderr


def test_a_key_of_this_machine_is_not_sent_to_a_pod(tmp_path: Path, requests: list[HelperRequest]) -> None:
    done = safepoint("images", "list", "pvc://ckpt/images", "--on", ".", "--key", tmp_path / "key")
    assert done.code == ExitCode.USAGE
    assert "is a file of this machine" in done.stderr
    assert not requests


def test_a_folder_that_is_missing(tmp_path: Path, requests: list[HelperRequest]) -> None:
    there, here = both(tmp_path, "list", "--json")
    assert (there.code, there.exit_error) == (ExitCode.NOT_FOUND, here.exit_error)
    assert requests


def test_a_copy_needs_a_place_that_the_pod_has(tmp_path: Path, requests: list[HelperRequest]) -> None:
    done = safepoint("checkpoints", "copy", "pvc://ckpt/out", tmp_path / "b", "--on", ".")
    assert done.code == ExitCode.USAGE
    assert "is a folder of this machine" in done.stderr
    assert not requests
    saved(tmp_path / "out")
    assert safepoint("checkpoints", "copy", "pvc://ckpt/out", "pvc://ckpt/b", "--on", ".").code == 0
    assert list((tmp_path / "b").glob("checkpoint-*"))
    assert [request.is_read_only for request in requests] == [False]


def test_options_without_effect_are_refused(tmp_path: Path, requests: list[HelperRequest]) -> None:
    output = saved(tmp_path / "out")
    for options, words in (
        (("--on", "."), "is on this machine"),
        (("--image", "a"), "--image has no effect"),
        (
            ("--image", "a", "--memory", "1Gi"),
            "--image, --memory have no effect: no pod is needed — omit the",
        ),
        (("--namespace", "a"), "--namespace has no effect"),
    ):
        done = safepoint("checkpoints", "list", output, *options)
        assert done.code == ExitCode.USAGE
        assert words in done.stderr
    done = safepoint("checkpoints", "list", "pvc://ckpt/out")
    assert done.code == ExitCode.USAGE
    assert "--on" in done.stderr
    assert not requests


def test_a_bug_in_the_pod_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> Ending:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(pod_side, "open_inventory", fails)
    log = io.StringIO()
    ending = pod_side.run(["remove-checkpoints", "x"], FrameWriter(log, {}), is_terminal=False)
    assert (ending.code, ending.message) == (1, "ZeroDivisionError: by zero")
    assert "Traceback" in "".join(frame.text for line in log.getvalue().splitlines() if (frame := read_frame(line)))


def test_remove_checkpoints(tmp_path: Path) -> None:
    output = saved(tmp_path / "out")
    (output / "mine.txt").write_text("x")
    log = io.StringIO()
    num = len(list(output.glob("checkpoint-*")))
    for expected in (num, 0):
        log.truncate(0)
        ending = pod_side.run(["remove-checkpoints", str(output)], FrameWriter(log, {}), is_terminal=False)
        assert ending == Ending(code=0)
        (frame,) = [frame for line in log.getvalue().splitlines() if (frame := read_frame(line.strip("\0")))]
        assert json.loads(frame.text) == {"deleted": expected}
    assert (output / "mine.txt").exists()
    assert not list(output.glob("checkpoint-*"))
    assert (
        pod_side.run(["remove-checkpoints", str(tmp_path / "none")], FrameWriter(log, {}), is_terminal=False).code
        == 0
    )


def test_what_the_pod_prints_cannot_move_the_cursor(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    from_outside.print_part(Part.STDOUT, "a\x1b[31mred\x1b[0m\x1b[2Jb\n")
    assert capsys.readouterr().out == "a\x1b[31mred\x1b[0m\\x1b[2Jb\n\x1b[0m"


def test_which_commands_write_to_a_claim() -> None:
    """A new command has to be added to one of the two lists: a claim that it writes to must not be read-only."""
    reading = {"list", "show", "verify", "diff"}
    commands = {path[1] for path, _ in walk(root()) if path[0] == "checkpoints"}
    assert commands == reading | from_outside._WRITTEN.keys()
