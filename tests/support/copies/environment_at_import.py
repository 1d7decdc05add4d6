"""Finds out which environment variables packages read while they are imported.

A copy must not be made for a program in which such a variable has another value: the packages would not notice it.
"""

import contextlib
import os
import sys
from collections.abc import Generator, Iterable, Mapping
from typing import Any

_NATIVE = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NUMEXPR_"),
    *("CUDA_", "NVIDIA_", "TORCH_", "PYTORCH_", "ATEN_", "FSSPEC_", "TQDM_"),
)
"""The first letters of variables that Python and libraries in C read, and of those that are looked for by name."""
_NATIVE_OF_RANKS = ("TORCH_ELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""Of these, the ones that the launcher sets for ranks. torch reads them later."""
_OF_ALL = frozenset({"__iter__", "copy", "set_conf_env"})
"""The functions that loop over all variables; the last one is of fsspec."""


class EnvironmentAtImport:
    """The variables of this process that were read since this object was made, and the values they may have."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._allowed: list[dict[str, str]] = []

    @contextlib.contextmanager
    def recorded(self) -> Generator[None]:
        """Record which variables are read in the block. A loop over all variables does not count."""
        environ: Any = os.environ
        original: Any = environ.__class__
        names = self._names

        class Recorded(original):
            def __getitem__(self, key: Any) -> Any:
                if sys._getframe(1).f_code.co_name not in _OF_ALL:
                    names.add(key)
                return original.__getitem__(self, key)

        environ.__class__ = Recorded
        try:
            yield
        finally:
            environ.__class__ = original

    def allow(self, variables: Mapping[str, str]) -> None:
        """The values of these variables are as good as those at the start."""
        self._allowed.append(dict(variables))

    def different(self, variables: Mapping[str, str], *, besides: Iterable[str]) -> str | None:
        """The name of a variable whose value matters and is another one now; None if there is none."""
        names = self._names | {name for name in variables if _is_native(name)}
        names |= {name for allowed in self._allowed for name in allowed if _is_native(name)}
        for name in sorted(names.difference(besides)):
            if all(allowed.get(name) != variables.get(name) for allowed in self._allowed):
                return name
        return None


def _is_native(name: str) -> bool:
    return name.startswith(_NATIVE) and not name.startswith(_NATIVE_OF_RANKS)
