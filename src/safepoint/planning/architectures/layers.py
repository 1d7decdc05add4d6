"""Linear layers and norms."""

from collections.abc import Iterator

from safepoint.planning.architectures.fields import Tensor


def linear(name: str, out: int, into: int, *, bias: bool = False) -> Iterator[Tensor]:
    """The matrix of a linear layer, and its bias if it has one."""
    yield Tensor(f"{name}.weight", (out, into))
    if bias:
        yield Tensor(f"{name}.bias", (out,))


def norm(name: str, size: int, *, bias: bool = False) -> Iterator[Tensor]:
    """The scale of a norm, and its bias if it has one."""
    yield Tensor(f"{name}.weight", (size,))
    if bias:
        yield Tensor(f"{name}.bias", (size,))
