"""The lease of a plan: while a command carries out a plan, other commands do not carry out steps of it.

Without the lease, a command that only reads the jobs could stop the job while `scale` still waits for a save. The
lease is an annotation of the TrainJob that keeps the plan. The command that carries out the plan renews the lease
regularly. If that command is killed, the lease ends `_LASTS_S` seconds after it was last renewed, and then another
command can continue. All times are from the API server's clock.
"""

import contextlib
import json
import secrets
import threading
from typing import Any

from safepoint.errors import ConflictError, NotFoundError, SafepointError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.plans import Plan
from safepoint.jobs.cluster.objects import Object, at, name_of, texts, uid_of
from safepoint.jobs.cluster.spec import DOMAIN
from safepoint.jobs.cluster.transport.admission import RefusedError

LEASE = f"{DOMAIN}/lease"
"""The annotation with the lease. It is JSON: a random name of the holder, and the time of the last renewal."""
_LASTS_S, _RENEW_S, _AGAIN_S = 30.0, 8.0, 1.0


def is_held(plan: Plan, now_s: float) -> bool:
    """Whether a command carries out this plan now.

    Args:
        plan: the plan, as it was just read.
        now_s: the time on the API server's clock, in seconds since 1970.
    """
    return _holder(plan.document, now_s) is not None


def _holder(document: Object, now_s: float) -> str | None:
    """The holder of the lease; None if the lease is not valid now. Another person may have changed it."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        found: Any = json.loads(texts(document, "metadata", "annotations").get(LEASE, ""))
        if abs(now_s - clock.parse_utc(at(found, "renewed"))) < _LASTS_S:
            return str(at(found, "holder"))
    return None


class PlanLease:
    """The lease of one command. At the end of the `with` block, the command releases the lease.

    Args:
        api: the API of the cluster, in the namespace of the plan.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api, self._holder = api, secrets.token_hex(8)
        self._renewed: Plan | None = None
        self._is_over = threading.Event()

    def __enter__(self) -> "PlanLease":
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        plan = self._renewed
        if plan is None or exception[0] is None:
            return  # without an exception, the plan is complete, so it does not exist any more
        with contextlib.suppress(SafepointError):
            found = self._api.find("trainjobs", name_of(plan.document))
            if found is not None and uid_of(found) == plan.uid and self._is_own(found):
                self._api.patch("trainjobs", name_of(found), {"metadata": {"annotations": {LEASE: None}}})

    @property
    def annotations(self) -> dict[str, str]:
        """The annotations of a plan that is created with this lease."""
        renewed = clock.as_utc(self._api.now_s())
        return {LEASE: json.dumps({"holder": self._holder, "renewed": renewed})}

    def takes(self, plan: Plan) -> bool:
        """Whether this command may carry out the plan. If the lease of the plan is free, take it.

        Args:
            plan: the plan, as it was just read.

        Raises:
            AccessDeniedError: you may not change TrainJobs.
        """
        holder = _holder(plan.document, self._api.now_s())
        if holder is None and not self._write(plan.document):
            return False
        if holder not in {None, self._holder}:
            return False
        if self._renewed is None or self._renewed.uid != plan.uid:
            self._renewed = plan
            threading.Thread(target=self._renew, args=(plan,), name="safepoint-lease", daemon=True).start()
        return True

    def _write(self, document: Object) -> bool:
        """Write the lease; returns False if another command has changed or deleted the plan meanwhile."""
        metadata: Object = {"annotations": self.annotations}
        version = at(document, "metadata", "resourceVersion")
        if version is not None:
            metadata["resourceVersion"] = version
        try:
            self._api.patch("trainjobs", name_of(document), {"metadata": metadata})
        except RefusedError:  # a rule of the cluster refuses the change, and waiting does not help
            raise
        except (ConflictError, NotFoundError):
            return False
        return True

    def _is_own(self, document: Object) -> bool:
        """Whether this command holds the lease. True also if the lease has expired, and no other command has taken
        it."""
        with contextlib.suppress(ValueError, RecursionError):
            found: Any = json.loads(texts(document, "metadata", "annotations").get(LEASE, ""))
            return at(found, "holder") == self._holder
        return False

    def _renew(self, plan: Plan) -> None:
        """Renew the lease again and again, until the command has ended or another command has the lease."""
        pause_s = _RENEW_S
        while not self._is_over.wait(pause_s):
            pause_s = _AGAIN_S
            with contextlib.suppress(SafepointError):
                found = self._api.find("trainjobs", name_of(plan.document))
                if found is None or uid_of(found) != plan.uid or not self._is_own(found):
                    return
                if self._write(found):
                    pause_s = _RENEW_S
