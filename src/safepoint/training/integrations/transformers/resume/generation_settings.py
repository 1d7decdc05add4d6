"""The settings with which a model generates text. An evaluation may change them.

In its first evaluation that generates, `Seq2SeqTrainer` sets missing values of `model.generation_config`. Later
evaluations pad to the length that is set there. A resumed run makes its model again, without these changes.
"""

from typing import Any, cast

_PLAIN = (bool, int, float, str, type(None))


def generation_settings(model: Any) -> dict[str, Any]:
    """The plain values in the `generation_config` of a model; empty if the model has no such settings."""
    own = _settings_of(model)
    return {name: _copied(value) for name, value in own.items() if _is_plain(value)}


def restore_generation_settings(model: Any, saved: Any) -> None:
    """Set the values that `generation_settings` has returned.

    Names that the model's settings do not have, and values that are not plain, are ignored: someone else may have
    written the file.
    """
    own = _settings_of(model)
    for name, value in (cast("dict[Any, Any]", saved) if isinstance(saved, dict) else {}).items():
        if name in own and _is_plain(own[name]) and _is_plain(value):
            own[name] = _copied(value)


def load_generation_settings(model: Any, saved: Any) -> None:
    """Check the values from a checkpoint, and set them as `restore_generation_settings` does.

    transformers refuses to save a model with invalid settings. With such settings, no later save would succeed.

    Raises:
        ValueError: transformers would not save these settings; the model keeps its earlier settings.
    """
    before = generation_settings(model)
    restore_generation_settings(model, saved)
    if generation_settings(model) == before:
        return
    try:
        model.generation_config.validate(strict=True)
    except Exception as error:  # a setting of another type may cause any error
        restore_generation_settings(model, before)
        raise ValueError(f"its settings for generating are invalid: {error}") from error


def _settings_of(model: Any) -> dict[str, Any]:
    settings: Any = getattr(model, "generation_config", None)
    return {} if settings is None else cast("dict[str, Any]", vars(settings))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, cast("list[Any]", value)))
    return type(value) in _PLAIN


def _copied(value: Any) -> Any:
    return [_copied(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value
