"""`safepoint doctor`: checks that this machine and an output location are ready for a run."""

import dataclasses
import os
import sys
from typing import Annotated, Any

import typer

from safepoint.cli.cluster_options import (
    Namespace,
    On,
    cluster_api,
    cluster_of,
    refuse_on_cluster,
    refuse_without_cluster,
)
from safepoint.cli.defaults import effective
from safepoint.cli.lazy import LazyGroup
from safepoint.cli.output import print_answer
from safepoint.cli.place import Connection
from safepoint.doctor.examination import examine
from safepoint.doctor.finding import Finding, Status
from safepoint.errors import SafepointError
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.units import plural
from safepoint.jobs.local.paths import state_folder
from safepoint.settings.run_settings import RunSettings, place_output

_COLOURS: dict[str, str] = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red"}


def doctor(
    context: typer.Context,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="LOCATION",
            help="The output location to check: a path, s3://, gs://, az:// or pvc://.",
            show_default="the location in your settings; if they have none, no location is checked",
        ),
    ] = None,
    local_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="With an object store: the local folder to which checkpoints are written before their upload.",
            show_default="as for `safepoint run`",
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Grace period of the platform: the time between SIGTERM and SIGKILL.",
            show_default="as for `safepoint run`",
        ),
    ] = None,
    connection: Connection = None,
    on: On = None,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check that this machine and an output location are ready for a run.

    The command prints the result of each check. For a warning or a failure, it also prints why the result matters and
    how to fix the cause. It leaves no files behind. With --on, it checks a cluster instead.

    Exit codes: 0 no check failed; 1 a check failed.
    """
    is_plain = bool(os.environ.get("NO_COLOR") or os.environ.get("CI") or not sys.stdout.isatty())
    cluster = cluster_of(on)
    if cluster is not None:
        refuse_on_cluster(
            cluster,
            {"--output-dir": output_dir, "--local-dir": local_dir, "--grace": grace, "--connection": connection},
        )
        from safepoint.jobs.cluster.examination import examine_cluster  # not at the top: takes 0.2 s

        with cluster_api(cluster, namespace) as api:
            _answer(examine_cluster(api), is_placed=True, is_plain=is_plain, as_json=as_json)
        return
    refuse_without_cluster(namespace)
    root = context.find_root().command
    assert isinstance(root, LazyGroup)
    values: dict[str, Any] = {item.option: item.value for item in effective(root, ("run",), Configuration.load())}
    given = {"output-dir": output_dir, "local-dir": local_dir, "grace": grace}
    values |= {name: value for name, value in given.items() if value is not None}
    settings = RunSettings(output_dir=values["output-dir"], local_dir=values["local-dir"], grace_s=values["grace"])
    place = None
    if settings.output_dir is not None:
        place = place_output(settings.output_dir, local_dir=settings.local_dir)
    findings = examine(place, grace_s=settings.grace_s, margin_s=settings.margin_s, images=state_folder() / "jobs")
    _answer(findings, is_placed=place is not None, is_plain=is_plain, as_json=as_json)


def _answer(findings: list[Finding], *, is_placed: bool, is_plain: bool, as_json: bool) -> None:
    document = {"findings": [dataclasses.asdict(finding) for finding in findings]}
    lines = _lines(findings, is_placed=is_placed)
    print_answer(as_json, document, lines, {} if is_plain else _COLOURS)
    num_failures = sum(finding.status is Status.FAILURE for finding in findings)
    if num_failures:
        raise SafepointError(
            f"{plural(num_failures, 'check')} failed", hint="see the line `fix` below each failed check"
        )


def _lines(findings: list[Finding], *, is_placed: bool) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        status = finding.status.ljust(len(Status.FAILURE))
        lines.append(f"{status}  {finding.check.ljust(width)}  {finding.found}")
        if finding.fix:
            indent = " " * (len(Status.FAILURE) + width + 4)
            lines += [f"{indent}why: {finding.why}", f"{indent}fix: {finding.fix}"]
    if not is_placed:
        lines.append("not checked: the output location; give it with --output-dir")
    return lines
