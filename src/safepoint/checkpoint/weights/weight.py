"""A weight as ranges of files."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from safepoint.checkpoint.format.safetensors_layout import KINDS, Shape
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import ReadablePath


class Run(NamedTuple):
    """Bytes of a weight that lie side by side in a file.

    Args:
        begin: the first of them in the weight.
        num_bytes: how many.
        path: of the file.
        offset: where they begin in it.
    """

    begin: int
    num_bytes: int
    path: ReadablePath
    offset: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight somewhere in a checkpoint.

    Args:
        shape: with its name.
        runs: where its bytes are, by `begin`; together they are the whole weight, each byte once.
    """

    shape: Shape
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, name: str, dtype: str, sizes: tuple[int, ...], runs: Iterable[Run]) -> "StoredWeight":
        """Check that nothing of the weight is missing.

        Args:
            name: of the weight.
            dtype: torch's name of the type, without `torch.`.
            sizes: of its dimensions.
            runs: in any order.

        Raises:
            CheckpointError: something is, or the type is not known.
        """
        if type(name) is not str or not name.isprintable() or name == "__metadata__":
            raise CheckpointError(f"a weight cannot be called {name!r}")
        if dtype not in KINDS:
            raise CheckpointError(f"{name} is of type {dtype}, which safetensors does not have")
        shape = Shape(name, KINDS[dtype], sizes)
        ordered = tuple(sorted(run for run in runs if run.num_bytes))
        end = 0
        for run in ordered:
            if run.begin != end or run.num_bytes < 0 or run.offset < 0:
                break
            end += run.num_bytes
        if end != shape.num_bytes:
            raise CheckpointError(f"{end} of {shape.num_bytes} bytes of {name} can be found")
        return cls(shape, ordered)
