"""`safepoint submit`: runs a training script in the background, as a job."""

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from safepoint.answers.job_documents import job_document
from safepoint.cli.cluster_options import (
    Namespace,
    On,
    SubmitOptions,
    cluster_of,
    given_options,
    refuse_on_cluster,
    refuse_without_cluster,
)
from safepoint.cli.commands.run import check_resume
from safepoint.cli.commands.run_options import RunOptions, with_options
from safepoint.cli.defaults import origins_of
from safepoint.cli.output import print_answer, print_warning
from safepoint.errors import UsageError
from safepoint.foundation.environment import current_folder
from safepoint.foundation.events import console
from safepoint.foundation.quantities import parse_whole
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.slots import count_slots, remark_on
from safepoint.jobs.model.spec import JobSpec, name_from, names_of_secrets
from safepoint.training.launcher.launch_plan import LaunchPlan


@with_options
def submit(
    context: typer.Context,
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="The training script and its own arguments. Options of Safepoint come before SCRIPT.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the job.", show_default="the script's name and four random characters"
        ),
    ] = None,
    module: Annotated[
        bool,
        typer.Option(
            "-m", "--module", help="SCRIPT is the name of a module, as for `python -m`.", show_default=False
        ),
    ] = False,
    nproc_per_node: Annotated[
        str,
        typer.Option(
            metavar="N|auto|cpu|gpu",
            envvar="SAFEPOINT_NPROC_PER_NODE",
            help="Number of ranks (training processes) on each node. cpu: one per core. gpu: one per GPU. auto: one "
            "per accelerator, or one per core on a machine without accelerators. With --on, auto leaves the number "
            "to the runtime.",
        ),
    ] = "1",
    nnodes: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar="SAFEPOINT_NNODES",
            help="Number of nodes. On this machine, a node is a process that starts its ranks; with --on, a pod.",
        ),
    ] = 1,
    cpu: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of CPUs that each node (with --on, each pod) reserves.",
            min=0,
            show_default="one per rank; with --on, no request",
        ),
    ] = None,
    gpu: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of GPUs of each node.",
            min=0,
            show_default="one per rank if the machine has GPUs; with --on, none",
        ),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Jobs with a higher priority start first, and preempt jobs with a lower one. With --on, use "
            "--priority-class instead.",
        ),
    ] = 0,
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar="SAFEPOINT_MAX_RESTARTS",
            help="Maximum number of restarts of the ranks after a rank has failed.",
        ),
    ] = 3,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            help="Set an environment variable for the script. Can be repeated. Pass no secrets: the values are "
            "stored in the job history or, with --on, in the TrainJob.",
        ),
    ] = None,
    connection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Read the access keys for the object store from the table NAME of "
            "~/.config/safepoint/connections.toml. With --on: read them from the Secret NAME in the namespace.",
        ),
    ] = None,
    on: On = None,
    namespace: Namespace = None,
    queue: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --on: the LocalQueue of Kueue for the job.")
    ] = None,
    priority_class: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --on and --queue: the WorkloadPriorityClass of Kueue for the job."),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --on: the training runtime of Kubeflow Trainer.",
            show_default="torch-distributed",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="With --on: the image of the pods.", show_default="the runtime's image"),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --on: the memory of each pod, such as 32Gi.")
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --on: send this folder, without hidden files and __pycache__, to the pods, and run SCRIPT in "
            "it.",
        ),
    ] = None,
    local_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|none",
            help="With --on and an object store: the size limit of the local folder for checkpoints, such as 200Gi.",
            show_default="computed if the arguments name the model, see docs/cluster.md; otherwise no limit",
        ),
    ] = None,
    shared_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --on: the size limit of /dev/shm in each pod, such as 8Gi. It is a part of the pod's memory.",
            show_default="the memory of the pod",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="With --on: print the job's Kubernetes objects, and create nothing."),
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "-o", "--format", metavar="yaml|json", help="Format of what --dry-run prints.", show_default="yaml"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    *,
    options: RunOptions,
) -> None:
    """Run a training script in the background, as a job.

    The job continues when you close this shell. To manage it, pass its name to `status`, `watch`, `logs`, `suspend`,
    `resume`, `scale` or `delete`.
    """
    on = cluster_of(on)
    cluster_only = SubmitOptions(
        queue=queue,
        priority_class=priority_class,
        runtime=runtime,
        image=image,
        memory=memory,
        code=code,
        local_limit=local_limit,
        shared_memory=shared_memory,
        is_dry_run=dry_run,
    )
    if form not in {None, "yaml", "json"}:
        raise UsageError(f"--format {form!r} must be yaml or json")
    if form is not None and not dry_run:
        raise UsageError(f"--format {form} has no effect without --dry-run", hint="add --dry-run, or omit --format")
    if on is not None:
        from safepoint.cli import on_cluster

        refuse_on_cluster(on, {"--priority": priority or None}, hint="use --priority-class, with --queue")
        settings = options.settings()
        console.set_up(settings.verbosity)
        spec = on_cluster.spec_of(
            program,
            cluster_only,
            settings,
            given=given_options(context),
            name=name,
            is_module=module,
            num_nodes=nnodes,
            ranks=_ranks(nproc_per_node),
            cpu=cpu,
            gpu=gpu,
            env=dict(_variable(text) for text in env or ()),
            connection=connection,
            max_restarts=max_restarts,
        )
        on_cluster.submit(on, namespace, spec, is_dry_run=dry_run, as_json=as_json or form == "json")
        return
    refuse_without_cluster(namespace, cluster_only)
    machine = count_slots()
    asked = _ranks(nproc_per_node)
    automatic = {"auto": machine.gpu or machine.cpu, "cpu": machine.cpu, "gpu": machine.gpu}
    ranks = automatic[asked] if isinstance(asked, str) else asked
    if ranks < 1:
        raise UsageError(f"--nproc-per-node {asked} means 0 ranks on this machine", hint="give a number, or auto")
    gpus = (ranks if machine.gpu else 0) if gpu is None else gpu
    settings = options.settings()
    log = console.set_up(settings.verbosity)
    check_resume(settings.resume)
    LaunchPlan(program=tuple(program), is_module=module)  # checks that the program exists
    spec = JobSpec(
        name=name_from(Path(program[0]).stem, secrets.token_hex(2)) if name is None else name,
        program=tuple(program),
        is_module=module,
        python=sys.executable,
        working_dir=current_folder(),
        num_nodes=nnodes,
        ranks_per_node=ranks,
        cpu_per_node=ranks if cpu is None else cpu,
        gpu_per_node=gpus,
        settings=settings,
        max_restarts=max_restarts,
        env=dict(_variable(text) for text in env or ()),
        data_connection=connection,
        priority=priority,
        origins=origins_of(context, ("submit",)),
    )
    doubtful = names_of_secrets(spec.env)
    if doubtful:
        log.warning(
            "--env has %s; values of --env are stored in the job history: keep secrets in connections.toml or a file",
            ", ".join(doubtful),
        )
    with LocalJobs() as jobs:
        job = jobs.submit(spec)
        if remark := remark_on(spec, machine):
            print_warning(remark)
        lines = [
            f"job {job.name} is {job.state}",
            "",
            f"  safepoint status {job.name}",
            f"  safepoint logs -f {job.name}",
            f"  safepoint suspend {job.name}",
        ]
        print_answer(as_json, job_document(jobs, job), lines)


def _ranks(text: str) -> int | str:
    if text in {"auto", "cpu", "gpu"}:
        return text
    number = parse_whole(text)
    if number is None or number < 1:
        raise UsageError(f"--nproc-per-node {text[:60]!r} must be a positive number, auto, cpu or gpu")
    return number


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise UsageError(f"--env {text!r} must be NAME=VALUE")
    return name, value
