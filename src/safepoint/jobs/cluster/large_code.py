"""Code that is too large for a config map. It is stored in the job's output location.

The name of the file is the SHA-256 of the code.
"""

import hashlib
from dataclasses import dataclass, field, replace

from safepoint.checkpoint.remote.code import MOST_BYTES
from safepoint.errors import UsageError
from safepoint.jobs.cluster.objects import Object
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.storage.location import Location, parse_location

FOLDER = ".safepoint/code"
"""The folder of the code, below the output location."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeCode:
    """The code of a job, outside of its config map.

    Args:
        data: the zip.
        output: the output location of the job.
        digest: the SHA-256 of `data`. A pod checks this digest before it unpacks the code.
    """

    data: bytes = field(repr=False)
    output: Location
    digest: str

    @property
    def location(self) -> Location:
        """The location of the zip."""
        return self.output.child(f"{FOLDER}/{self.digest}.zip")

    def variables(self, claim_folder: str) -> list[Object]:
        """The variables by which a pod finds the code.

        Args:
            claim_folder: where the pod mounts the claim (volume) of the output location.
        """
        location = self.location
        where = str(location) if location.claim is None else f"{claim_folder}/{location.path}"
        chosen = {"SAFEPOINT_CODE": where, "SAFEPOINT_CODE_DIGEST": self.digest}
        return [{"name": name, "value": text} for name, text in chosen.items()]


def split(spec: ClusterSpec, *, room_bytes: int) -> tuple[ClusterSpec, LargeCode | None]:
    """Separate the code from a job if the code does not fit into a config map.

    Args:
        spec: the specification of the job.
        room_bytes: how many bytes fit into a config map beside the archive of Safepoint.

    Returns:
        If the code fits: the unchanged job, and None. Otherwise: the job without its code, and the code.

    Raises:
        UsageError: the code is too large, or the job has no output location that all its pods share.
    """
    code = spec.code
    if code is None or sum(map(len, spec.files.values())) + len(code) <= room_bytes:
        return spec, None
    output = spec.settings.output_dir
    location = None if output is None else parse_location(output)
    if location is None or location.is_folder:
        raise UsageError(
            f"the job's code has {len(code):,} bytes, and a config map has room for {room_bytes:,}; "
            "nothing was submitted",
            hint="set --output-dir to a claim or an object store, so that the code can be stored there; or move data "
            "out of the folder of --code",
        )
    if len(code) > MOST_BYTES:
        raise UsageError(
            f"the job's code has {len(code):,} bytes, and the limit is {MOST_BYTES:,}; nothing was submitted",
            hint="move data out of the folder of --code, or put the code into the image",
        )
    digest = hashlib.sha256(code).hexdigest()
    return replace(spec, code=None), LargeCode(data=code, output=location, digest=digest)
