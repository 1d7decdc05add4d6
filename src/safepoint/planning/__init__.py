"""What a run will need, computed before it starts: storage, memory, time. Pure arithmetic; it needs no PyTorch.

from safepoint import planning
from safepoint.estimates.sizes import OPTIMIZERS, Strategy

model = planning.read_model(Path("config.json"))
training = planning.Training(
    tensors=model.tensors, dtype="bfloat16", adapter=(), strategy=Strategy.FSDP, optimizer=OPTIMIZERS["adamw"],
    num_ranks=16,
)
plan = planning.plan_storage(planning.Run(model=model, training=training, nodes=2, gpus=8))
"""

from safepoint.planning.checkpoint_files import Training
from safepoint.planning.layouts import compare_layouts
from safepoint.planning.model import ModelShape, adapter_of, of_count, read_model
from safepoint.planning.storage import Run, Speeds, StoragePlan, plan_storage

__all__ = [
    "ModelShape",
    "Run",
    "Speeds",
    "StoragePlan",
    "Training",
    "adapter_of",
    "compare_layouts",
    "of_count",
    "plan_storage",
    "read_model",
]
