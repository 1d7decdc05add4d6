"""Holdfast keeps model training alive.

A job that is preempted, drained or killed loses nothing that could have been saved, and comes back by
itself. `holdfast run SCRIPT` is the whole interface for an unchanged Hugging Face Trainer script; the
packages below are described in docs/architecture.md.
"""

from holdfast._version import __version__

__all__ = ["__version__"]
