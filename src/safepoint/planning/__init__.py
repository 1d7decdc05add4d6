"""Computes, before a run begins, what the run will need and lose: storage, cost, interval, and a simulated cluster.

Arithmetic and simulation, without packages beside the standard library. Files that describe models and trainings are
read; nothing is written, and no job is looked up.

A plan of the storage of a model:

    model = planning.read_model(Path("config.json"))
    training = planning.Training(
        tensors=model.tensors, tied=model.tied, dtype="bfloat16", adapter=(), strategy=Strategy.FSDP,
        optimizer=OPTIMIZERS["adamw"], num_ranks=16,
    )
    plan = planning.plan_storage(planning.Run(model=model, training=training, nodes=2, gpus=8))
"""

from safepoint.planning.checkpoint_files import Training
from safepoint.planning.commit_costs import CommitCost, Platform, commit_cost
from safepoint.planning.costs import Situation, losses
from safepoint.planning.failures import MODELS, Cause, FailureModel, Hazard
from safepoint.planning.layouts import compare_layouts
from safepoint.planning.model import ModelShape, adapter_of, of_count, read_model
from safepoint.planning.policies import POLICIES, Plan, Policy, expected_ettr, plan_of
from safepoint.planning.simulation import Simulated, replay, simulate
from safepoint.planning.storage import Run, Speeds, StoragePlan, plan_storage

__all__ = [
    "MODELS",
    "POLICIES",
    "Cause",
    "CommitCost",
    "FailureModel",
    "Hazard",
    "ModelShape",
    "Plan",
    "Platform",
    "Policy",
    "Run",
    "Simulated",
    "Situation",
    "Speeds",
    "StoragePlan",
    "Training",
    "adapter_of",
    "commit_cost",
    "compare_layouts",
    "expected_ettr",
    "losses",
    "of_count",
    "plan_of",
    "plan_storage",
    "read_model",
    "replay",
    "simulate",
]
