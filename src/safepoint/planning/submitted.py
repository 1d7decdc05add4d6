"""What a job needs that is about to be submitted: its local folder, its memory and its grace period.

The rules are in docs/adr/0026-sizes-that-a-job-asks-for.md. In short: the size of the local folder is an upper bound,
because Kubernetes evicts a pod whose folder exceeds its limit. The other figures are what the plan expects.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from safepoint.checkpoint.local.retention import KeepBest, KeepNewest, parse_policies
from safepoint.errors import UsageError
from safepoint.estimates.job_needs import JobNeeds
from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.foundation.quantities import parse_count
from safepoint.planning.checkpoint_files import Training, checkpoint_bytes, files_of, weights_file_bytes
from safepoint.planning.inputs import JobArguments, NamedModel, find_model, read_job_arguments
from safepoint.planning.model import ModelShape, adapter_of, dtype_of, short_count
from safepoint.planning.storage import Run, plan_storage, whole_gib, with_buffer
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import parse_location

_MORE_CHECKPOINTS = 4
"""Beside the N that stay: the best one, the one that is being written, the one that is being uploaded, and one that
is damaged or that another process reads."""
_OWN_MODELS = 2
"""How often a script may save the finished model into the folder itself, in 32 bits."""
_OTHER_FILES_BYTES = 10 * 10**9
"""The documents' safety buffer, for other files that a script writes."""
_GPU = "nvidia.com/gpu"


class _JobToPlan(Protocol):
    """The part of a job's specification that its needs depend on."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def ranks_per_node(self) -> int | None: ...
    @property
    def ranks_from(self) -> str | None: ...
    @property
    def resources(self) -> Mapping[str, str]: ...
    @property
    def settings(self) -> RunSettings: ...


def needs_of(
    job: _JobToPlan, arguments: Sequence[str], *, code: Path | None = None, model_uri: str | None = None
) -> JobNeeds | None:
    """What a job needs, as far as its arguments say before it runs.

    Args:
        job: the job.
        arguments: of its program.
        code: the folder that is sent along.
        model_uri: the `storage_uri` of its model initializer.

    Returns:
        The needs. If the model is here and cannot be planned, `problem` says why. None if no model is named, or if
        the model is not on this machine.
    """
    given = read_job_arguments(arguments, code=code)
    try:
        named = find_model(given.model, code=code, uri=model_uri)
        return None if named is None else _needs(job, given, named)
    except UsageError as error:
        problem = error.message.removesuffix("; nothing was computed")
        return JobNeeds(model=given.model or model_uri or str(code), problem=problem)


def _needs(job: _JobToPlan, given: JobArguments, named: NamedModel) -> JobNeeds:
    shape, settings = named.shape, job.settings
    ranks = _ranks_of(job)
    run = _expected(job, given, shape, ranks or 1)
    plan = plan_storage(run)
    location = parse_location(settings.output_dir) if settings.output_dir is not None else None
    is_own_folder = location is not None and location.is_remote
    most = _most_bytes(given, shape, num_ranks=job.num_nodes * (ranks or 8))
    keep = _kept(settings, given)
    whole = weights_file_bytes(shape.tensors, "float32")
    local = None
    if is_own_folder and keep is not None:
        checkpoints = (keep + _MORE_CHECKPOINTS) * most
        local = whole_gib(with_buffer(checkpoints + _OWN_MODELS * whole) + _OTHER_FILES_BYTES)
    fit = plan.in_store if is_own_folder else plan.in_folder
    # With a folder in each of several pods, saves take no snapshot.
    has_snapshots = settings.snapshot_slots != 0 and (job.num_nodes == 1 or not is_own_folder)
    training = run.training
    assumed = [str(training.strategy), training.optimizer.name, training.dtype]
    assumed += ["LoRA of rank " + str(given.lora_rank)] if given.lora_rank else []
    return JobNeeds(
        model=f"{named.label} ({short_count(shape.num_parameters)} parameters; {named.named_by})",
        training=", ".join(assumed),
        checkpoint_bytes=plan.checkpoint_bytes,
        most_bytes=most,
        local_bytes=local,
        unlimited=_unlimited(given, named, keep, is_alone=(job.num_nodes, ranks) == (1, 1)),
        snapshot_bytes=plan.snapshot_bytes if has_snapshots else 0,
        save_s=fit.needed_s,
        least_grace_s=fit.grace_s,
    )


def _ranks_of(job: _JobToPlan) -> int | None:
    """The ranks of a node; None if the runtime or the pod decides."""
    if job.ranks_per_node is not None:
        return job.ranks_per_node
    text = job.resources.get(_GPU) if job.ranks_from is None else None
    try:
        return parse_count(text) or None if text is not None else None
    except ValueError:
        return None


def _expected(job: _JobToPlan, given: JobArguments, shape: ModelShape, gpus: int) -> Run:
    """The run that the plan expects: AdamW and DDP, where the arguments name nothing else."""
    num_ranks = job.num_nodes * gpus
    dtype = given.dtype if given.dtype not in {None, "auto"} else shape.dtype
    slots = job.settings.snapshot_slots
    return Run(
        model=shape,
        training=Training(
            tensors=shape.tensors,
            tied=shape.tied,
            dtype="float32" if dtype is None else dtype_of(dtype),
            adapter=()
            if given.lora_rank is None
            else adapter_of(shape, rank=given.lora_rank, targets=given.lora_targets),
            strategy=given.strategy or (Strategy.DDP if num_ranks > 1 else Strategy.SINGLE),
            optimizer=given.optimizer or OPTIMIZERS["adamw"],
            num_ranks=num_ranks,
            is_mixed=given.is_mixed,
            tokenizer_bytes=shape.extra_bytes,
        ),
        nodes=job.num_nodes,
        gpus=gpus,
        slots=slots,
    )


def _most_bytes(given: JobArguments, shape: ModelShape, *, num_ranks: int) -> int:
    """The largest checkpoint of all strategies with weights in 32 bits and AdamW, which keeps the most of all.

    ZeRO-3 with `stage3_gather_16bit_weights_on_model_save` writes the weights once more, and has less than ZeRO-2 all
    the same. An adapter counts with all linear layers, whichever of them are adapted.
    """
    adapter = () if given.lora_rank is None else adapter_of(shape, rank=given.lora_rank, targets=("all-linear",))
    if given.lora_rank is not None and given.lora_targets:
        named = adapter_of(shape, rank=given.lora_rank, targets=given.lora_targets)
        adapter = tuple({one.name: one for one in (*adapter, *named)}.values())
    return max(
        checkpoint_bytes(
            files_of(
                Training(
                    tensors=shape.tensors,
                    tied=shape.tied,
                    dtype="float32",
                    adapter=adapter,
                    strategy=strategy,
                    optimizer=OPTIMIZERS["adamw"],
                    num_ranks=num_ranks,
                    tokenizer_bytes=shape.extra_bytes,
                )
            )
        )
        for strategy in Strategy
    )


def _kept(settings: RunSettings, given: JobArguments) -> int | None:
    """How many checkpoints stay in the folder at most; None if nothing that is known here limits their number."""
    policies = parse_policies(settings.keep)
    best = [one.count for one in policies if isinstance(one, KeepBest)]
    newest = [one.count for one in policies if isinstance(one, KeepNewest)]
    if len(best) + len(newest) < len(policies):
        return None  # what `every` and `younger` keep has no bound
    newest += [count for count in (settings.save_total_limit, given.keep) if count is not None]
    return max(newest, default=0) + sum(best) or None


def _unlimited(given: JobArguments, named: NamedModel, keep: int | None, *, is_alone: bool) -> str:
    if keep is None:
        return "how many checkpoints stay in it is not known (--save-total-limit N limits their number)"
    if not named.is_certain:
        return "no argument says that this model is trained (--model_name_or_path PATH says so)"
    if given.strategy is None and not is_alone:
        return "the arguments do not say with which strategy several ranks train (--fsdp or --deepspeed says so)"
    return given.doubt
