"""Computes what a run will need and lose before it begins: storage, cost, interval, and a simulated cluster.

Pure arithmetic and simulation with the standard library only; nothing here reads a job or writes a file.
"""

from safepoint.planning.commit_costs import CommitCost, Platform, commit_cost
from safepoint.planning.costs import Situation, losses
from safepoint.planning.failures import MODELS, Cause, FailureModel, Hazard
from safepoint.planning.policies import POLICIES, Plan, Policy, expected_ettr, plan_of
from safepoint.planning.simulation import Simulated, replay, simulate

__all__ = [
    "MODELS",
    "POLICIES",
    "Cause",
    "CommitCost",
    "FailureModel",
    "Hazard",
    "Plan",
    "Platform",
    "Policy",
    "Simulated",
    "Situation",
    "commit_cost",
    "expected_ettr",
    "losses",
    "plan_of",
    "replay",
    "simulate",
]
