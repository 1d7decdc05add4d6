"""`safepoint pack`: writes the modules of Safepoint that a pod needs into one file."""

from pathlib import Path
from typing import Annotated

import typer

from safepoint.cli.output import print_answer, write_file
from safepoint.foundation.units import format_bytes
from safepoint.jobs.cluster import pod_archive


def pack(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.")] = Path(
        pod_archive.NAME
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write the modules of Safepoint that a pod needs into one file.

    With this file, `python safepoint.pyz run train.py` trains in an image without Safepoint. The image needs PyTorch,
    xxhash and typer. The same release of Safepoint always writes the same bytes.
    """
    data = pod_archive.build_archive()
    write_file(output, data, option="-o")
    document = {"path": str(output), "size_bytes": len(data), "digest": pod_archive.digest_of(data)}
    print_answer(as_json, document, [f"{output}: {format_bytes(len(data))}, {document['digest']}"])
