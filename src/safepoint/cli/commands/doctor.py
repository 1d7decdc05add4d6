"""`safepoint doctor`: checks this machine and the output location before a training relies on them."""

import dataclasses
import os
import sys
from typing import Annotated, Any

import typer

from safepoint.cli.defaults import effective
from safepoint.cli.lazy import LazyGroup
from safepoint.cli.output import print_answer
from safepoint.cli.place import Connection
from safepoint.doctor.examination import examine
from safepoint.doctor.finding import Finding, Status
from safepoint.errors import SafepointError
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.units import plural, printable
from safepoint.settings.output_place import place_output
from safepoint.settings.run_settings import RunSettings

_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red"}


def doctor(
    context: typer.Context,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="LOCATION",
            help="Where checkpoints would go: a path, s3://, gs://, az:// or pvc://.  [that of `safepoint run`]",
        ),
    ] = None,
    local_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The local folder for an object store.  [that of `safepoint run`]"),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time that the platform grants between SIGTERM and SIGKILL.  [that of `safepoint run`]",
        ),
    ] = None,
    connection: Connection = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check before a run that this machine and the output location are usable.

    Each check prints what was found and, unless all is well, why it matters and what to do. Nothing is changed and
    nothing is left behind. Exit codes: 0 if no check failed, 1 otherwise.
    """
    root = context.find_root().command
    assert isinstance(root, LazyGroup)
    values: dict[str, Any] = {item.option: item.value for item in effective(root, ("run",), Configuration.load())}
    given = {"output-dir": output_dir, "local-dir": local_dir, "grace": grace}
    values |= {name: value for name, value in given.items() if value is not None}
    settings = RunSettings(output_dir=values["output-dir"], local_dir=values["local-dir"], grace_s=values["grace"])
    place = None
    if settings.output_dir is not None:
        place = place_output(settings.output_dir, local_dir=settings.local_dir)
    findings = examine(place, grace_s=settings.grace_s, margin_s=settings.margin_s)
    document = {"findings": [dataclasses.asdict(finding) for finding in findings]}
    print_answer(as_json, document, _lines(findings, is_placed=place is not None))
    num_failures = sum(finding.status is Status.FAILURE for finding in findings)
    if num_failures:
        raise SafepointError(f"{plural(num_failures, 'check')} failed", hint="the line `fix` of each says what to do")


def _lines(findings: list[Finding], *, is_placed: bool) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("CI") or not sys.stdout.isatty()
    lines: list[str] = []
    for finding in findings:
        status = finding.status.ljust(len(Status.FAILURE))
        coloured = status if is_plain else typer.style(status, fg=_COLOURS[finding.status])
        lines.append(f"{coloured}  {finding.check.ljust(width)}  {printable(finding.found)}")
        if finding.fix:
            indent = " " * (len(Status.FAILURE) + width + 4)
            lines += [f"{indent}why: {finding.why}", f"{indent}fix: {printable(finding.fix)}"]
    if not is_placed:
        lines.append("not checked: the output location; name it with --output-dir")
    return lines
