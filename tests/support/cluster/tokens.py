"""Tokens of service accounts that expire early: those that the API server makes live for at least ten minutes."""

import base64
import json
import time
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tests.support.cluster.workspace import Workspace

_ISSUER = "https://kubernetes.default.svc"
_LEEWAY_S = 60
"""How long after its end the API server still accepts a token."""


def token_of(team: Workspace, account: str, *, accepted_for_s: float) -> str:
    """A token of a service account, signed with the key of the cluster.

    Args:
        team: the namespace of the account.
        account: its name.
        accepted_for_s: how long the API server accepts it; a negative number for a token that has expired.
    """
    now = time.time()
    claims = {
        "iss": _ISSUER,
        "aud": [_ISSUER],
        "sub": f"system:serviceaccount:{team.namespace}:{account}",
        "iat": int(now) - 3600,
        "nbf": int(now) - 3600,
        "exp": int(now + accepted_for_s) - _LEEWAY_S,
        "kubernetes.io": {
            "namespace": team.namespace,
            "serviceaccount": {"name": account, "uid": team.get("serviceaccount", account)["metadata"]["uid"]},
        },
    }
    key = serialization.load_pem_private_key((team.cluster.folder / "keys" / "tokens.key").read_bytes(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    signed = f"{_encoded({'alg': 'RS256', 'typ': 'JWT'})}.{_encoded(claims)}"
    signature = key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _encoded(document: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).rstrip(b"=").decode()
