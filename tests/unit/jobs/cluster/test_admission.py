"""Tests of safepoint.jobs.cluster.transport.admission, with answers in the form in which API servers send them."""

from typing import Any

import pytest

from safepoint.errors import AccessDeniedError, ConflictError, UsageError
from safepoint.jobs.cluster.transport.admission import RefusedError, Rule, quota_of, rule_of
from safepoint.jobs.cluster.transport.failures import RejectedError, refusal

QUOTA = (
    "exceeded quota: few, requested: limits.cpu=8,pods=1, used: limits.cpu=6,pods=5, limited: limits.cpu=10,pods=5"
)
POLICY = "ValidatingAdmissionPolicy 'gpus' with binding 'gpus-team' denied request: at most 4 GPUs"


def answer(
    why: str, *, code: int = 403, reason: str = "Forbidden", causes: list[Any] | None = None
) -> dict[str, Any]:
    """The answer to a request that creates the pod `tiny`."""
    details: dict[str, Any] = {"name": "tiny", "kind": "pods"} | ({} if causes is None else {"causes": causes})
    message = f'pods "tiny" is forbidden: {why}'
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


REFUSED = [
    (answer(QUOTA), Rule.QUOTA),
    (answer("failed quota: few: must specify limits.cpu for: node"), Rule.QUOTA_DEMAND),
    (answer("insufficient quota to match these scopes: [{PriorityClass In [high]}]"), Rule.QUOTA_DEMAND),
    (answer("maximum memory usage per Container is 1Gi, but limit is 2Gi"), Rule.LIMITS),
    (answer("[maximum cpu usage per Pod is 1, but limit is 2, minimum memory usage per Pod is 1Gi]"), Rule.LIMITS),
    (answer("cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000"), Rule.LIMITS),
    (answer('violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'), Rule.POD_SECURITY),
    (answer("unable to validate against any security context constraint: [...]"), Rule.SECURITY_CONTEXT),
    (answer(POLICY, causes=[{"message": POLICY}]), Rule.POLICY),
    (answer(POLICY, causes=[{"message": POLICY}], code=401, reason="Unauthorized"), Rule.POLICY),
    ({"reason": "Forbidden", "message": 'admission webhook "a.b" denied the request: no queue'}, Rule.WEBHOOK),
    (answer('admission webhook "a.b" denied the request without explanation'), Rule.WEBHOOK),
    (
        answer(
            "unable to create new content in namespace team because it is being terminated",
            causes=[{"reason": "NamespaceTerminating", "field": "metadata.namespace"}],
        ),
        Rule.DELETION,
    ),
    (answer("in words of another release", causes=[{"reason": "NamespaceTerminating"}]), Rule.DELETION),
]


@pytest.mark.parametrize(("document", "rule"), REFUSED)
def test_a_rule_of_the_cluster_is_no_missing_right(document: dict[str, Any], rule: Rule) -> None:
    """The message names the rule and what Kubernetes says; the hint says what to do."""
    error = refusal(document.get("code", 403), document, "POST pods")
    assert isinstance(error, RefusedError)
    assert (error.rule, error.exit_code) == (rule, ConflictError.exit_code)
    assert str(rule) in error.message
    assert "rights" not in (error.hint or "")
    assert error.hint
    assert rule is Rule.QUOTA or document["message"] in error.message


RIGHT = 'User "ada" cannot create resource "pods" in API group "" in the namespace "team"'


@pytest.mark.parametrize(
    "document",
    [
        {"reason": "Forbidden", "message": f"pods is forbidden: {RIGHT}"},
        answer(RIGHT),
        answer(f"{RIGHT}: exceeded quota: few"),
        answer(RIGHT.replace("ada", "violates PodSecurity exceeded quota: ")),
        {"reason": "Forbidden", "message": 'forbidden: User "ada" cannot get path "/metrics"'},
        {"message": "the proxy forbids this: exceeded quota: few"},
        {},
    ],
)
def test_a_missing_right_is_no_rule(document: dict[str, Any]) -> None:
    error = refusal(403, document, "POST pods")
    assert isinstance(error, AccessDeniedError)
    assert "rights" in (error.hint or "")


@pytest.mark.parametrize(
    "why",
    ["not yet ready to handle request", "status unknown for quota: few, resources: pods"],
)
def test_rules_that_the_server_does_not_know_yet(why: str) -> None:
    """The request was not carried out, and is repeated."""
    assert isinstance(refusal(403, answer(why), "POST pods"), RejectedError)


def test_a_policy_that_finds_an_object_invalid() -> None:
    """The usual reason of a ValidatingAdmissionPolicy. Such an answer was never taken for a missing right."""
    error = refusal(422, answer(POLICY, code=422, reason="Invalid"), "POST pods")
    assert isinstance(error, UsageError)
    assert "at most 4 GPUs" in error.message


def test_what_a_quota_has_and_what_is_needed() -> None:
    error = refusal(403, answer(QUOTA), "POST pods")
    assert error.message == (
        'a quota of the namespace is used up: quota few refuses pods "tiny"; '
        "limits.cpu: 6 of 10 used, 8 more needed; pods: 5 of 5 used, 1 more needed"
    )
    assert "larger quota" in (error.hint or "")
    of_event = quota_of(f'Error creating: pods "tiny-node-0-" is forbidden: {QUOTA}')
    assert of_event is not None
    assert of_event.startswith('quota few refuses pods "tiny-node-0-"; limits.cpu: 6 of 10 used')


@pytest.mark.parametrize(
    "why",
    [
        "exceeded quota: few",
        "exceeded quota: few, requested: pods=1, used: pods=1",
        "exceeded quota: few, requested: pods=1, used: cpu=1, limited: pods=1",
        "exceeded quota: , requested: pods=1, used: pods=1, limited: pods=1",
        "exceeded quota: few, requested: pods, used: pods, limited: pods",
    ],
)
def test_a_quota_in_another_form_is_shown_as_it_is(why: str) -> None:
    assert quota_of(answer(why)["message"]) is None
    assert why in refusal(403, answer(why), "POST pods").message


def test_messages_without_end() -> None:
    """A message of a server that is not trusted is read only up to a limit."""
    for text in ("exceeded quota: " + ", requested: " * 1_000_000, "[" * 5_000_000, "x is forbidden: " * 1_000_000):
        assert rule_of(text) in {Rule.QUOTA, None}
        assert quota_of(text) is None
