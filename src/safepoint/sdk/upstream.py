"""All imports from Kubeflow's SDK. If the SDK is not installed, the error names the package to install."""

import contextlib
import gc
import importlib
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from safepoint.errors import MissingExtraError


@contextlib.contextmanager
def _collector_at_rest() -> Generator[None]:
    """In this context, the garbage collector does not run. This saves a fifth of the time that the
    SDK's 1,700 imports take."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # objects that the caller has frozen must stay frozen
            gc.freeze()  # the two calls move all objects to the oldest generation, and visit none of them
            gc.unfreeze()
        if was_enabled:
            gc.enable()


try:
    with warnings.catch_warnings(), _collector_at_rest():
        # Pydantic 2 warns about Kubeflow's models, which are written in the style of pydantic 1.
        warnings.filterwarnings("ignore", message="Support for class-based `config`")
        from kubeflow import trainer
        from kubeflow.common import constants as common_constants
        from kubeflow.common.types import KubernetesBackendConfig
        from kubeflow.trainer.backends.base import RuntimeBackend
        from kubeflow.trainer.backends.kubernetes import utils as kubernetes_utils
        from kubeflow.trainer.backends.kubernetes.backend import KubernetesBackend
        from kubeflow.trainer.constants import constants
        from kubeflow.trainer.types import types
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"safepoint.sdk needs Kubeflow's SDK, but the module {error.name} is not installed",
        hint="pip install 'safepoint[sdk]'",
    ) from error

if TYPE_CHECKING:
    from kubeflow.trainer import options as upstream_options
    from kubeflow.trainer.options import common as common_options
    from kubeflow.trainer.options import kubernetes as kubernetes_options

__all__ = [
    "KubernetesBackend",
    "KubernetesBackendConfig",
    "RuntimeBackend",
    "common_constants",
    "common_options",
    "constants",
    "kubernetes_options",
    "kubernetes_utils",
    "trainer",
    "types",
    "upstream_options",
]

# Kubeflow's client does not import these modules. Their import takes half as long as the import of Safepoint's SDK.
_OPTIONS = {
    "upstream_options": "kubeflow.trainer.options",
    "common_options": "kubeflow.trainer.options.common",
    "kubernetes_options": "kubeflow.trainer.options.kubernetes",
}


def __getattr__(name: str) -> Any:
    if name not in _OPTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(_OPTIONS[name])
