"""Computes the needs of a job before it is submitted: the size of its local folder, its memory and its grace period.

The rules are in docs/adr/0026-sizes-that-a-job-asks-for.md. In short: the size of the local folder is an upper bound,
because Kubernetes evicts a pod whose folder exceeds its limit. The other figures are expected values.
"""

from collections.abc import Sequence
from pathlib import Path

from safepoint.errors import SafepointError
from safepoint.estimates.job_needs import JobNeeds, JobOutline
from safepoint.estimates.sizes import DTYPE_BYTES, OPTIMIZERS, Strategy
from safepoint.planning.checkpoint_files import Training, checkpoint_bytes, files_of
from safepoint.planning.inputs import JobArguments, NamedModel, find_model, read_job_arguments
from safepoint.planning.model import ModelShape, adapter_of, dtype_of, short_count
from safepoint.planning.storage import Run, plan_storage, whole_gib, with_buffer

_MORE_CHECKPOINTS = 4
"""The number of checkpoints that can be in the folder in addition to the kept checkpoints: the best checkpoint, one
that is being written, one that is being uploaded, and one that is damaged or that another process reads."""
_OWN_MODELS = 2
"""The size limit has room for a script that itself saves the finished model this many times in the folder, in 32
bits."""
_OTHER_FILES_BYTES = 10 * 10**9
"""The documents' safety buffer, for other files that a script writes."""


def needs_of(
    job: JobOutline, arguments: Sequence[str], *, code: Path | None = None, model_uri: str | None = None
) -> JobNeeds | None:
    """The needs of a job, derived from its arguments before it runs.

    Args:
        job: the job.
        arguments: the arguments of its program.
        code: the folder that is sent to the pods; None without such a folder.
        model_uri: the `storage_uri` of its model initializer.

    Returns:
        The needs. If the model is on this machine, but the needs cannot be computed, `problem` says why. None if no
        model is named, or if the model is not on this machine.
    """
    given = read_job_arguments(arguments, code=code)
    try:
        named = find_model(given.model, code=code, uri=model_uri)
        return None if named is None else _needs(job, given, named)
    except SafepointError as error:
        problem = error.message.removesuffix("; nothing was computed")
        return JobNeeds(model=given.model or model_uri or str(code), problem=problem)


def _needs(job: JobOutline, given: JobArguments, named: NamedModel) -> JobNeeds:
    shape, ranks = named.shape, job.ranks_per_node
    run = _expected(job, given, shape, ranks or 1)
    plan = plan_storage(run)
    most = _most_bytes(given, shape, num_ranks=job.num_nodes * (ranks or 8))
    keep = _kept(job, given)
    local = None
    if job.is_remote and keep is not None:
        checkpoints = (keep + _MORE_CHECKPOINTS) * most
        models = _OWN_MODELS * DTYPE_BYTES["float32"] * shape.num_parameters
        local = whole_gib(with_buffer(checkpoints + models) + _OTHER_FILES_BYTES)
    fit = plan.in_store if job.is_remote else plan.in_folder
    # With a folder in each of several pods, saves take no snapshot.
    has_snapshots = job.snapshot_slots != 0 and (job.num_nodes == 1 or not job.is_remote)
    training = run.training
    assumed = [str(training.strategy), training.optimizer.name, training.dtype]
    assumed += ["LoRA of rank " + str(given.lora_rank)] if given.lora_rank else []
    return JobNeeds(
        model=f"{named.label} ({short_count(shape.num_parameters)} parameters; from {named.named_by})",
        training=", ".join(assumed),
        checkpoint_bytes=plan.checkpoint_bytes,
        most_bytes=most,
        local_bytes=local,
        unlimited=_unlimited(given, named, keep, is_alone=(job.num_nodes, ranks) == (1, 1)),
        snapshot_bytes=plan.snapshot_bytes if has_snapshots else 0,
        save_s=fit.needed_s,
        least_grace_s=fit.grace_s,
    )


def _expected(job: JobOutline, given: JobArguments, shape: ModelShape, gpus: int) -> Run:
    """The run that the plan expects: AdamW and DDP, unless the arguments name others."""
    num_ranks = job.num_nodes * gpus
    dtype = given.dtype if given.dtype not in {None, "auto"} else shape.dtype
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
            tokenizer_bytes=shape.tokenizer_bytes,
        ),
        nodes=job.num_nodes,
        gpus=gpus,
        slots=job.snapshot_slots,
    )


def _most_bytes(given: JobArguments, shape: ModelShape, *, num_ranks: int) -> int:
    """The size of the largest checkpoint of all strategies: ZeRO-2, with weights in 32 bits and AdamW.

    ZeRO-2 writes the weights twice and the optimizer's states with another copy of the weights. ZeRO-3 with
    `stage3_gather_16bit_weights_on_model_save` writes less, and so do all other known optimizers. An adapter is
    computed for all linear layers, even if fewer are adapted. The tests compare all strategies and optimizers.
    """
    adapter = () if given.lora_rank is None else adapter_of(shape, rank=given.lora_rank, targets=("all-linear",))
    if given.lora_rank is not None and given.lora_targets:
        named = adapter_of(shape, rank=given.lora_rank, targets=given.lora_targets)
        adapter = tuple({one.name: one for one in (*adapter, *named)}.values())
    training = Training(
        tensors=shape.tensors,
        tied=shape.tied,
        dtype="float32",
        adapter=adapter,
        strategy=Strategy.ZERO2,
        optimizer=OPTIMIZERS["adamw"],
        num_ranks=num_ranks,
        tokenizer_bytes=shape.tokenizer_bytes,
    )
    return checkpoint_bytes(files_of(training))


def _kept(job: JobOutline, given: JobArguments) -> int | None:
    """The maximum number of checkpoints that stay in the folder; None if no known setting limits the number."""
    if job.is_unbounded:
        return None
    return max((count for count in (job.num_kept, given.keep) if count is not None), default=None)


def _unlimited(given: JobArguments, named: NamedModel, keep: int | None, *, is_alone: bool) -> str:
    if keep is None:
        return "it is not known how many checkpoints stay in it (--save-total-limit limits their number)"
    if not named.is_certain:
        return "no argument says that this model is trained (--model_name_or_path PATH says so)"
    if given.strategy is None and not is_alone:
        return "the arguments do not say with which strategy several ranks train (--fsdp or --deepspeed says so)"
    return given.doubt
