"""The outline of a job before it is submitted: the facts that its needs depend on, except its model and arguments."""

from safepoint.checkpoint.local.retention import KeepBest, KeepNewest, parse_policies
from safepoint.estimates.job_needs import JobOutline
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import parse_location


def outline_for(settings: RunSettings, *, num_nodes: int, ranks_per_node: int | None) -> JobOutline:
    """The outline of a job with these options.

    Args:
        settings: the options of its run.
        num_nodes: the number of its nodes.
        ranks_per_node: the number of ranks on each node; None if the runtime or the pod decides it.
    """
    policies = parse_policies(settings.keep)
    best = [one.count for one in policies if isinstance(one, KeepBest)]
    newest = [one.count for one in policies if isinstance(one, KeepNewest)]
    is_unbounded = len(best) + len(newest) < len(policies)
    if settings.save_total_limit is not None:
        newest.append(settings.save_total_limit)
    return JobOutline(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        is_remote=settings.output_dir is not None and parse_location(settings.output_dir).is_remote,
        num_kept=max(newest, default=0) + sum(best) or None,
        is_unbounded=is_unbounded,
        snapshot_slots=settings.snapshot_slots,
    )
