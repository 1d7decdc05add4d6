"""Where Safepoint meets the training frameworks: each is hooked when the user's program imports it."""

from safepoint.training.context.session import Session
from safepoint.training.integrations import torch_store, transformers


def install_integrations(session: Session) -> None:
    """Make every known framework answer to `session` from the moment it is imported."""
    torch_store.install(session)
    transformers.install(session)


__all__ = ["install_integrations"]
