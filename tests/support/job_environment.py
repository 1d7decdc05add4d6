"""The environment of the jobs of tests."""

import os

from tests.support.patience import PATIENCE


def environment(**changes: str) -> dict[str, str]:
    """The environment of a job: one thread a rank, the default grace period, no settings of the test process but
    whether its ranks are forked from a template."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SAFEPOINT_", "PET_", "TORCHELASTIC_"))
    }
    kept.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    kept.update(SAFEPOINT_GRACE=f"{30 * PATIENCE:g}", SAFEPOINT_PRELOAD=os.environ.get("SAFEPOINT_PRELOAD", "0"))
    kept.update(changes)
    return kept
