"""The only rank of a job trains its model as it is; several ranks train it in DistributedDataParallel."""

from pathlib import Path

import pytest

from tests.support.jobs import no_orphans, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_NAMED = """
import os, runpy, sys
from transformers import TrainerCallback, Trainer

class Names(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("trains a", type(trainers[0].model_wrapped).__name__, flush=True)

trainers, original = [], Trainer.__init__
def begin(self, *args, **kwargs):
    original(self, *args, **kwargs)
    trainers.append(self)
    self.add_callback(Names())
Trainer.__init__ = begin
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_model_is_replicated_only_for_several_ranks(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "named.py"
    script.write_text(_NAMED)
    output = tmp_path / "out"
    program = [str(script), *tiny(output, "--epochs", "1")]
    job = safepoint(output, "--nproc-per-node", str(num_ranks), program=program)
    with no_orphans(job):
        assert job.wait(200) == 0, job.text
    names = {line.split("trains a ")[1].split()[0] for line in job.text.splitlines() if "trains a " in line}
    assert any("DistributedDataParallel" in name for name in names) == (num_ranks > 1), names
    assert names, job.text
