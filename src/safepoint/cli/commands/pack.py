"""`safepoint pack`: writes the modules of Safepoint that a pod needs into one file."""

from pathlib import Path
from typing import Annotated

import typer

from safepoint.cli.output import print_answer
from safepoint.errors import StorageError
from safepoint.foundation.files import write_atomic
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
    try:
        write_atomic(output, data, durable=False)
    except OSError as error:
        raise StorageError(
            f"{output} cannot be written: {error.strerror}", hint="give another path with -o"
        ) from error
    document = {"path": str(output), "size_bytes": len(data), "digest": pod_archive.digest_of(data)}
    print_answer(as_json, document, [f"{output}: {format_bytes(len(data))}, {document['digest']}"])
