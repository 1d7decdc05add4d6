"""The settings with which a model generates text. An evaluation may change them.

In its first evaluation that generates text, `Seq2SeqTrainer` sets missing values of `model.generation_config`. Later
evaluations pad to the length in these settings. A resumed run makes its model again, without these changes.
"""

from typing import Any, cast

_PLAIN = (bool, int, float, str, type(None))
_FROM_MODEL = "_from_model_config"
"""The name of a setting that is False after the first evaluation that generates text."""


def generation_settings(model: Any) -> dict[str, Any]:
    """The plain values in the `generation_config` of a model; empty if the model has no such settings."""
    own = _settings_of(model)
    return {name: _copied(value) for name, value in own.items() if _is_plain(value)}


def restore_generation_settings(model: Any, saved: Any) -> None:
    """Set the values that `generation_settings` has returned.

    Another person may have written the file. So two kinds of entries are ignored: names that the model's settings do
    not have, and values that are not plain.
    """
    own = _settings_of(model)
    for name, value in (cast("dict[Any, Any]", saved) if isinstance(saved, dict) else {}).items():
        if name in own and _is_plain(own[name]) and _is_plain(value):
            own[name] = _copied(value)


def load_generation_settings(model: Any, saved: Any) -> None:
    """Set those values of a checkpoint that an evaluation may have set: the defaults of missing values.

    All other values stay as the script has set them, because another person may have written the checkpoint. If it
    had a million beams, an evaluation would fill the memory. If it had invalid settings, transformers would not save
    the model any more.
    """
    before = generation_settings(model)
    config: Any = getattr(model, "generation_config", None)
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict[str, Any])()
    values = cast("dict[Any, Any]", saved) if isinstance(saved, dict) else {}
    completed = {
        name: default
        for name, default in defaults.items()
        if name in before and before[name] is None and type(values.get(name)) is type(default)
    }
    restore_generation_settings(model, {name: one for name, one in completed.items() if values[name] == one})
    if values.get(_FROM_MODEL) is False:
        restore_generation_settings(model, {_FROM_MODEL: False})


def _settings_of(model: Any) -> dict[str, Any]:
    settings: Any = getattr(model, "generation_config", None)
    return {} if settings is None else cast("dict[str, Any]", vars(settings))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, cast("list[Any]", value)))
    return type(value) in _PLAIN


def _copied(value: Any) -> Any:
    return [_copied(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value
