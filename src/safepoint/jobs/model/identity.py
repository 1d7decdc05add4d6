"""The environment variables that lead to an object store: keys, logins, servers, regions and accounts."""

import enum
from collections.abc import Iterable


class VariableKind(enum.Enum):
    """What a variable of an object store holds.

    The kind decides from where a job may take the variable, and who may see it.
    """

    KEY = "a key; secret, and accepted from a Secret of a cluster, but from no other object"
    KEY_OWNER = "who owns a key; not secret, but accepted only from the same sources as a key"
    LOGIN = "how this machine gets keys"
    SERVER = "the address of the server; another person's object sets it only together with keys"
    PLACE = "the region or the account; another person's object may set it"


VARIABLES = {
    "AWS_ACCESS_KEY_ID": VariableKind.KEY,
    "AWS_SECRET_ACCESS_KEY": VariableKind.KEY,
    "AWS_SESSION_TOKEN": VariableKind.KEY,
    "AWS_PROFILE": VariableKind.LOGIN,
    "AWS_ROLE_ARN": VariableKind.LOGIN,
    "AWS_WEB_IDENTITY_TOKEN_FILE": VariableKind.LOGIN,
    "AWS_ENDPOINT_URL": VariableKind.SERVER,
    "AWS_ENDPOINT_URL_S3": VariableKind.SERVER,
    "AWS_S3_ENDPOINT": VariableKind.SERVER,
    "AWS_REGION": VariableKind.PLACE,
    "AWS_DEFAULT_REGION": VariableKind.PLACE,
    "AZURE_STORAGE_ACCOUNT_KEY": VariableKind.KEY,
    "AZURE_STORAGE_ACCESS_KEY": VariableKind.KEY,
    "AZURE_STORAGE_MASTER_KEY": VariableKind.KEY,
    "AZURE_STORAGE_SAS_KEY": VariableKind.KEY,
    "AZURE_STORAGE_SAS_TOKEN": VariableKind.KEY,
    "AZURE_STORAGE_TOKEN": VariableKind.KEY,
    "AZURE_CLIENT_SECRET": VariableKind.KEY,
    "AZURE_STORAGE_CLIENT_SECRET": VariableKind.KEY,
    "AZURE_CLIENT_ID": VariableKind.KEY_OWNER,
    "AZURE_TENANT_ID": VariableKind.KEY_OWNER,
    "AZURE_STORAGE_ACCOUNT_NAME": VariableKind.PLACE,
    "GOOGLE_SERVICE_ACCOUNT_KEY": VariableKind.KEY,
}
"""The variables of object stores that Safepoint treats differently from a user's other variables."""


def variables_of(*kinds: VariableKind) -> frozenset[str]:
    """The names of the variables of these kinds."""
    return frozenset(name for name, kind in VARIABLES.items() if kind in kinds)


SECRET_KEYS = variables_of(VariableKind.KEY)
"""The variables with the keys of object stores."""
IDENTITY = frozenset(
    name for name, kind in VARIABLES.items() if name.startswith("AWS_") and kind is not VariableKind.PLACE
)
"""The variables that select an S3 server and the keys for it. A data connection replaces all of them."""


def keys_among(variables: Iterable[str]) -> list[str]:
    """The variables that a job's specification must not set, because it is stored: the keys of all object stores, and
    what selects an S3 server and the keys for it. Names in lower case count too: their values may be keys."""
    return sorted(name for name in variables if name.upper() in IDENTITY | SECRET_KEYS)
