"""Reads the inputs of a plan: options, TrainingArguments, checkpoints, and a job's arguments."""

from safepoint.planning.inputs.job_arguments import JobArguments, read_job_arguments
from safepoint.planning.inputs.job_model import NamedModel, find_model
from safepoint.planning.inputs.records import (
    Given,
    find_optimizer,
    given_by_adapter,
    given_by_files,
    notes_on_adapter,
    parse_layout,
    parse_parameters,
    read_arguments,
)

__all__ = [
    "Given",
    "JobArguments",
    "NamedModel",
    "find_model",
    "find_optimizer",
    "given_by_adapter",
    "given_by_files",
    "notes_on_adapter",
    "parse_layout",
    "parse_parameters",
    "read_arguments",
    "read_job_arguments",
]
