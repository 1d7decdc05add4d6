"""Puts the code of a job that is too large for a config map into the job's output location.

If only pods can reach the location, a helper writes the code: a short-lived Kubernetes Job that runs one command of
Safepoint.
"""

from safepoint.checkpoint.remote.code import COMMAND, write_code
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.helper.helper import run_helper
from safepoint.jobs.cluster.helper.helper_objects import HelperRequest
from safepoint.jobs.cluster.helper.job_storage import JobStorage, open_directly
from safepoint.jobs.cluster.large_code import LargeCode
from safepoint.jobs.cluster.spec import ClusterSpec

_PIECE_BYTES = 900 << 10
"""The size of the piece in one config map, which holds at most 1 MiB."""


def put_code(api: ClusterApi, spec: ClusterSpec, code: LargeCode) -> None:
    """Put the code of a job where its pods read it, unless it is there already.

    The code is sent to an object store directly. If only pods reach the output location, a helper writes the code
    there: it gets the code in config maps, which are deleted afterwards.

    Raises:
        SafepointError: the code cannot be put there; nothing was submitted.
    """
    storage = JobStorage(output=spec.settings.output_dir, connection=spec.connection, env=spec.env, env_here=spec.env)
    folder = code.location.parent
    inventory = open_directly(api, storage, folder)
    if inventory is not None:
        write_code(code.location, code.data, code.digest, inventory.store)
        return
    data = code.data
    request = HelperRequest(
        arguments=(COMMAND, str(code.location), code.digest),
        claims=() if folder.claim is None else (folder.claim,),
        is_read_only=False,
        connection=spec.connection,
        env=spec.env,
        image=spec.image,
        pieces=[data[begin : begin + _PIECE_BYTES] for begin in range(0, len(data), _PIECE_BYTES)],
        may_bind=True,
    )
    run_helper(api, request, lambda part, text: None)
