"""Converts Kubeflow's initializers into the fields of a TrainJob, and keeps their secrets out of the TrainJob."""

from typing import Any

from safepoint.sdk.upstream import kubernetes_utils, types

_SECRET_VARIABLES = frozenset({"ACCESS_TOKEN", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"})


def initializer_of(given: types.Initializer | None) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The field `initializer` of a TrainJob, and the secrets that it needs.

    Args:
        given: Kubeflow's initializer, or None.

    Returns:
        Two dicts: the parts of the field `initializer`, and the variables with secrets. The keys of both dicts are
        `dataset` and `model`. A key is missing if there is no such part, or if the part has no secrets.

    Raises:
        ValueError: the initializer of the dataset or of the model is not an object of one of Kubeflow's classes.
    """
    upstream: Any = kubernetes_utils  # Any, because the module declares no types
    found: dict[str, Any] = {}
    if given is not None and given.dataset:
        found["dataset"] = upstream.get_dataset_initializer(given.dataset).to_dict()
    if given is not None and given.model:
        found["model"] = upstream.get_model_initializer(given.model).to_dict()
    secrets: dict[str, dict[str, str]] = {}
    for what, part in found.items():
        entries: list[dict[str, str]] = part.pop("env", None) or []
        secret = {entry["name"]: entry["value"] for entry in entries if entry["name"] in _SECRET_VARIABLES}
        plain = [entry for entry in entries if entry["name"] not in secret]
        if plain:
            part["env"] = plain
        if secret:
            secrets[what] = secret
    return found, secrets
