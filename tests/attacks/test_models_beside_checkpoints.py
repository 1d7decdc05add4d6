"""Another user puts a model into an output folder to which everyone may write, when the training has just ended.

A model that a script saves after its training becomes the final model of the run. The stranger's must not.
"""

import os
from pathlib import Path

import pytest

from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.final_model import adopt_scripts_model, final_folder, note_end
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools.copy import as_final
from tests.attacks.test_checkpoints_of_other_runs import as_root
from tests.support.checkpoints import commit, prepared

_STRANGER = 65534
_PLACES = ["model.safetensors", "config.json", "final/model.safetensors"]


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    """A folder with the sticky bit."""
    found = prepared(tmp_path)
    commit(found, 10)
    tmp_path.chmod(0o1777)
    return found


@as_root
@pytest.mark.parametrize("place", _PLACES)
def test_it_is_not_the_final_model(place: str, output: OutputFolder) -> None:
    end = note_end(output, as_final(read_manifest(output.root / "checkpoint-10")))
    path = output.root / place
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"stranger's")
    top = output.root / place.partition("/")[0]
    for one in {path, top}:
        os.chown(one, _STRANGER, _STRANGER)
    assert not adopt_scripts_model(output, end)
    assert not final_folder(output).exists()


@pytest.mark.parametrize("place", _PLACES)
def test_the_scripts_own_model(place: str, output: OutputFolder) -> None:
    end = note_end(output, as_final(read_manifest(output.root / "checkpoint-10")))
    path = output.root / place
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"own")
    assert adopt_scripts_model(output, end)
    assert (final_folder(output) / path.name).read_bytes() == b"own"
