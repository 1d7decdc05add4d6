"""Tells refusals by a rule of the cluster, such as a quota, from missing rights, and describes them.

An API server checks a request twice: first whether the user has the right (RBAC or another authorizer), and then
whether the object meets the rules of the cluster (admission). It answers both with the status 403 and the reason
`Forbidden`. Two kinds of refusals state their cause in a field of the answer: a namespace that is being deleted, and
a ValidatingAdmissionPolicy. For the others, only the message differs. The beginnings of these messages are constants
in the sources of Kubernetes: `responsewriters/errors.go`, `resourcequota/controller.go`, `limitranger/admission.go`,
`pod-security-admission/admission/admission.go`, `webhook/errors/statuserror.go`, and `sccadmission/admission.go` of
OpenShift.
"""

import re
from enum import StrEnum
from typing import Any

from safepoint.errors import ConflictError
from safepoint.jobs.cluster.objects import at, items

_MOST_CHARACTERS = 4000


class Rule(StrEnum):
    """A kind of rule that refuses objects. The value describes the refusal."""

    QUOTA = "a quota of the namespace is used up"
    QUOTA_DEMAND = "a quota of the namespace requires values that are missing"
    LIMITS = "a LimitRange of the namespace refuses the resources"
    POD_SECURITY = "the Pod Security Standard of the namespace refuses the pod"
    SECURITY_CONTEXT = "no security context constraint of the cluster allows the pod"
    POLICY = "a ValidatingAdmissionPolicy of the cluster refuses the request"
    WEBHOOK = "an admission webhook of the cluster refuses the request"
    DELETION = "the namespace is being deleted, and takes no new objects"


ABOUT_AMOUNTS = {Rule.QUOTA, Rule.QUOTA_DEMAND, Rule.LIMITS, Rule.DELETION}
"""The rules that do not depend on what the program of a pod may do."""

_ASK = "ask the cluster's administrator"
_HINTS = {
    Rule.QUOTA: f"delete what you do not need, request less, or {_ASK} for a larger quota",
    Rule.QUOTA_DEMAND: f"request these resources, or {_ASK} for a LimitRange with default values",
    Rule.LIMITS: f"request resources within these limits, or {_ASK} to change the LimitRange",
    Rule.POD_SECURITY: f"change what the message names, or {_ASK} for a namespace with another standard",
    Rule.SECURITY_CONTEXT: f"{_ASK} for a security context constraint that allows what the message names",
    Rule.POLICY: f"change what the message names, or {_ASK} about this policy",
    Rule.WEBHOOK: f"change what the message names, or {_ASK} about this webhook",
    Rule.DELETION: "use another namespace",
}
_TERMINATING = "NamespaceTerminating"
"""The cause (`details.causes[].reason`) of a refusal in a namespace that is being deleted."""
_BEGINNINGS = (
    (re.compile(r"exceeded quota: ", re.IGNORECASE), Rule.QUOTA),
    (re.compile(r"(failed quota: |insufficient quota to match)", re.IGNORECASE), Rule.QUOTA_DEMAND),
    (re.compile(r"\[?(minimum|maximum) \S{1,100} usage per \S{1,40} is "), Rule.LIMITS),
    (re.compile(r"\[?\S{1,100} max limit to request ratio per "), Rule.LIMITS),
    (re.compile(r"(pod )?violates PodSecurity "), Rule.POD_SECURITY),
    (re.compile(r"unable to validate against any security context constraint"), Rule.SECURITY_CONTEXT),
    (re.compile(r"ValidatingAdmissionPolicy '"), Rule.POLICY),
    (re.compile(r'admission webhook "[^"]{1,300}" denied the request'), Rule.WEBHOOK),
    (re.compile(r"unable to create new content in namespace \S{1,63} because it is being terminated"), Rule.DELETION),
)
_LATER = re.compile(r"(not yet ready to handle request|status unknown for quota: )")


class RefusedError(ConflictError):
    """A rule of the cluster refuses an object. The user has the right to create or change such objects."""

    rule: Rule


def rule_of(message: str) -> Rule | None:
    """The rule that has refused an object, according to the message of the API server; None if no rule is known.

    Args:
        message: the message of a Kubernetes Status, or of an event about an object that could not be created.
    """
    why = _why(message)
    return next((rule for pattern, rule in _BEGINNINGS if pattern.match(why)), None)


def is_temporary(message: str) -> bool:
    """Whether the API server has refused a request only because it does not know the rules yet."""
    return _LATER.match(_why(message)) is not None


def refused_by_rule(document: dict[str, Any]) -> RefusedError | None:
    """The exception to raise for an answer of the API server; None if no rule is known to have refused the request.

    Args:
        document: the body of the answer, a Kubernetes Status.
    """
    message = str(at(document, "message") or "")
    causes = items(document, "details", "causes")
    if any(at(cause, "reason") == _TERMINATING for cause in causes):
        return refused(Rule.DELETION, message)
    found = (rule_of(text) for text in (message, *(str(at(cause, "message") or "") for cause in causes[:10])))
    rule = next((one for one in found if one is not None), None)
    return None if rule is None else refused(rule, message)


def refused(rule: Rule, message: str, *, end: str = "") -> RefusedError:
    """The exception to raise if a rule has refused an object.

    Args:
        rule: the rule.
        message: the message of the API server or of an event.
        end: what was done, as the last clause of the message.
    """
    what = quota_of(message) if rule is Rule.QUOTA else None
    error = RefusedError(f"{rule}: {what or message}{end and f'; {end}'}", hint=_HINTS[rule])
    error.rule = rule
    return error


def quota_of(message: str) -> str | None:
    """The quota that refuses an object: its name, and for each resource what the quota has, what is used, and what
    the object needs. None if the message has another form.
    """
    why = _why(message)
    name, _, amounts = why.partition(": ")[2].partition(", requested: ")
    requested, _, rest = amounts.partition(", used: ")
    used, _, limited = rest.partition(", limited: ")
    needed, taken, whole = (_amounts(text) for text in (requested, used, limited))
    if not name or not needed or needed.keys() != taken.keys() or needed.keys() != whole.keys():
        return None
    of = message[:_MOST_CHARACTERS].partition(" is forbidden: ")[0].removeprefix("Error creating: ")
    resources = [
        f"{resource}: {taken[resource]} of {whole[resource]} used, {needed[resource]} more needed"
        for resource in needed
    ]
    return f"quota {name} refuses {of}; {'; '.join(resources)}"


def _amounts(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): amount.strip() for name, equals, amount in pairs if equals and name.strip()}


def _why(message: str) -> str:
    """The message without its beginning, which names the object that was refused."""
    before, separator, why = message[:_MOST_CHARACTERS].partition(" is forbidden: ")
    return why if separator else before
