"""Puts a job's code into the job's output location, if the code is too large for a config map.

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
"""The code is sent in pieces of this size, one in each config map. A config map holds at most 1 MiB."""


def put_code(api: ClusterApi, spec: ClusterSpec, code: LargeCode) -> None:
    """Put the code of a job into the location from which its pods read it, unless the same code is there already.

    If this machine reaches the location, this machine writes the code. If only pods reach the location, a helper
    writes the code. The helper gets the code in config maps, which are deleted afterwards.

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
