"""Reads the fields of a `config.json` with checks. The message for a wrong value names the field."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from safepoint.errors import UsageError

_MOST = 1 << 40
_ALIASES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Transformers 5 has renamed these fields for some model families."""
MOST_LAYERS = 10_000
MOST_EXPERTS = 65_536
EMBEDDINGS = frozenset(
    {
        *("embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "shared", "relative_attention_bias"),
        *("word_embeddings", "position_embeddings", "token_type_embeddings"),
    }
)
"""The names of the modules of class nn.Embedding."""


class Tensor(NamedTuple):
    """A parameter of a model, or a persistent buffer.

    Args:
        name: its name in the model.
        sizes: the sizes of its dimensions.
        num_pieces: the number of tensors that `save_pretrained` writes for this tensor. In memory, the experts of a
            layer are one tensor; in the file, there can be a tensor for each expert.
        is_buffer: whether it is a buffer. A buffer has no gradient and no optimizer state.
        is_tied: whether it is a second name of another weight.
    """

    name: str
    sizes: tuple[int, ...]
    num_pieces: int = 1
    is_buffer: bool = False
    is_tied: bool = False

    @property
    def is_embedding(self) -> bool:
        """Whether it is the weight of an nn.Embedding."""
        return self.name.endswith(".weight") and self.name.split(".")[-2] in EMBEDDINGS


class Fields:
    """The fields of a `config.json`, read with checks.

    Args:
        values: the object in the file.
        defaults: the values of fields that are missing in the file. Transformers may leave out a field that has its
            default value.
        where: the name of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._defaults = defaults
        self._where = where
        self._sets: dict[str, frozenset[int]] = {}

    def count(self, name: str, *, most: int = _MOST, default: int | None = None, least: int = 1) -> int:
        """The whole number in a field.

        Raises:
            UsageError: the field is missing, or is not a whole number in the range.
        """
        value = self._values.get(name)
        value = self._values.get(_ALIASES.get(name, name)) if value is None else value
        value = self._defaults.get(name) if value is None else value
        value = default if value is None else value
        if value is None:
            raise UsageError(
                f"{self._where} has no field {name!r}, which the size of the model depends on; nothing was computed",
                hint=f"add {name!r}, or pass a folder with the model's safetensors files, or --params",
            )
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UsageError(
                f"{self._where} has {name} = {shown(value)}; nothing was computed",
                hint=f"{name!r} must be a whole number from {least} to {most}",
            )
        return value

    def optional(self, name: str) -> int | None:
        """The whole number in a field, or the default of a missing field. None if the field is null, or if the field
        is missing and has no default."""
        value = self._values.get(name, self._defaults.get(name))
        return None if value is None else self.count(name)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A field that is true or false.

        Raises:
            UsageError: the field has another type.
        """
        value = self._values.get(name)
        value = self._defaults.get(name, default) if value is None else value
        if not isinstance(value, bool):
            raise UsageError(
                f"{self._where} has {name} = {shown(value)}; nothing was computed",
                hint=f"{name!r} must be true or false",
            )
        return value

    def share(self, name: str, value: int, other: str, divisor: int) -> int:
        """The quotient of the numbers in two fields.

        Raises:
            UsageError: the quotient is not a whole number, so the two fields contradict each other.
        """
        if value % divisor:
            raise UsageError(
                f"{self._where} has {name} = {value} and {other} = {divisor}, which contradict each other; nothing "
                "was computed",
                hint=f"{name!r} must be a multiple of {other!r}: check both",
            )
        return value // divisor

    def text(self, name: str, default: str) -> str:
        """A field that is a string; `default` if it is missing.

        Raises:
            UsageError: the field has another type.
        """
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise UsageError(
                f"{self._where} has {name.lstrip('_')} = {shown(value)}; nothing was computed",
                hint=f"{name.lstrip('_')!r} must be a string",
            )
        return value

    def numbers(self, name: str) -> frozenset[int]:
        """A field that is a list of whole numbers; empty if it is missing. The list is checked once."""
        if name not in self._sets:
            self._sets[name] = frozenset(self._list(name))
        return self._sets[name]

    def _list(self, name: str) -> list[int]:
        value = cast("list[Any]", self._values.get(name) or [])
        if type(value) is not list or not all(type(one) is int for one in value):
            raise UsageError(
                f"{self._where} has {name} = {shown(value)}; nothing was computed",
                hint=f"{name!r} must be a list of whole numbers",
            )
        return value

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.count("num_hidden_layers", most=MOST_LAYERS)


def shown(value: object) -> str:
    """A value for a message, cut off if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
