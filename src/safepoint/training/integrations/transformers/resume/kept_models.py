"""The models and tensors that a trainer and its callbacks keep beside the trained model, such as a teacher.

A teacher may be updated in each step to follow the trained model. No trainer saves these models, so a resume would
start with the teacher of the first step. This module saves:

- every model, list of tensors and dictionary of tensors in the attributes of a callback. A callback may change them
  in each step. The callbacks of transformers and of Safepoint are left out;
- every other model of the trainer, if its weights have changed since training began. So a frozen reference model is
  not saved.

One rank saves these models and tensors, and all ranks load them.

If the weights of the trained model are sharded, this module saves nothing. A model that a callback refers to is then
refused, and a warning names the tensors of callbacks.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.pickles.module_states import checked_modules
from safepoint.errors import ConflictError, UsageError
from safepoint.training.integrations.transformers.sharding.trainer_strategy import splits_weights
from safepoint.training.state.data_only import load_data

_REFERENCE = "safepoint_reference.pt"
_KEPT = "safepoint_kept_{name}-{digest}.pt"
_KEPT_EARLIER = "safepoint_kept_{name}.pt"
_MOST_LETTERS = 100
_log = logging.getLogger("safepoint")
_NUM_SAMPLES = 64
"""About how many tensors of a model, and elements of each tensor, are compared to see if the model has changed."""


class KeptModels:
    """The models and tensors beside the trained model of one trainer.

    Args:
        trainer: the trainer, which is about to train.

    Raises:
        UsageError: a callback refers to another model, and the weights are sharded.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before: dict[int, torch.Tensor] = {}
        self._has_warned = False
        followed = [name for name, module in self._models() if self._is_followed(module)]
        if followed and splits_weights(trainer):
            raise UsageError(
                f"a callback uses the model {followed[0]} and may change it. A checkpoint of "
                "sharded weights does not contain this model; training was not started",
                hint="train with DDP or ZeRO-2, or keep the callback's model fixed "
                "(sync_ref_model=False, teacher_model_kind='base')",
            )

    def loop_begins(self, folder: Path | None) -> None:
        """Record the present weights of the models, and load the models and tensors that a checkpoint contains.

        Args:
            folder: a verified checkpoint, or None.

        Raises:
            ConflictError: a model or a tensor in the checkpoint does not fit the model or tensor of this run.
        """
        self._before = {id(module): _fingerprint(module) for _, module in self._models()}
        if folder is None or splits_weights(self._trainer):
            return
        for name, kept in self._kept():
            paths = folder / name.file, folder / name.earlier_file
            path = next((one for one in paths if os.path.isfile(one)), None)  # `is_file` raises for too long names
            if path is not None:
                _load(name, kept, load_data(path), folder)

    def write(self, folder: Path) -> None:
        """Write the models and tensors into a checkpoint's folder, if they have to be saved; called on one rank."""
        if splits_weights(self._trainer):
            self._warn_unsaved()
            return
        for name, kept in self._kept():
            if not isinstance(kept, torch.nn.Module):
                torch.save(kept, folder / name.file)
            elif self._is_followed(kept) or not torch.equal(
                self._before.get(id(kept), torch.empty(0)), _fingerprint(kept)
            ):
                torch.save(kept.state_dict(), folder / name.file)

    def _warn_unsaved(self) -> None:
        names = sorted(str(name) for name, _ in self._tensors_of_callbacks())
        if names and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the checkpoints of this run do not contain the tensors in %s, because the weights of the model are "
                "sharded. After a resume, these tensors start again as the script creates them. With DDP or ZeRO-2 "
                "the checkpoints contain them",
                ", ".join(names),
            )

    def _kept(self) -> Iterator[tuple["_Name", Any]]:
        yield from self._models()
        yield from self._tensors_of_callbacks()

    def _models(self) -> Iterator[tuple["_Name", torch.nn.Module]]:
        """The models that share no weight with the trained model. Each is yielded once, with a name for its file."""
        own = _weights_of(self._trainer.model)
        seen: set[int] = set()
        for name, value in self._attributes():
            module = getattr(value, "module", value) if isinstance(value, torch.nn.Module) else value
            if not isinstance(module, torch.nn.Module) or id(module) in seen:
                continue
            seen.add(id(module))
            weights = _weights_of(module)
            if weights and not weights & own:
                yield name, module

    def _tensors_of_callbacks(self) -> Iterator[tuple["_Name", Any]]:
        """The lists and dictionaries of tensors that callbacks hold.

        A list or dictionary that contains a weight of the trained model is left out.
        """
        own = _weights_of(self._trainer.model)
        for name, value in self._attributes_of_callbacks():
            tensors = list(cast("dict[Any, Any]", value).values()) if isinstance(value, dict) else value
            if not isinstance(tensors, list) or not tensors:
                continue
            if all(isinstance(one, torch.Tensor) and id(one) not in own for one in cast("list[Any]", tensors)):
                yield name, value

    def _attributes(self) -> Iterator[tuple["_Name", Any]]:
        for name, value in list(cast("dict[str, Any]", vars(self._trainer)).items()):
            yield _Name("", 1, name), value
        yield from self._attributes_of_callbacks()

    def _attributes_of_callbacks(self) -> Iterator[tuple["_Name", Any]]:
        """The attributes of all callbacks. Callbacks whose classes have the same name are numbered."""
        counts: Counter[str] = Counter()
        for callback in self._trainer.callback_handler.callbacks:
            kind = cast("Any", type(callback))
            if not kind.__module__.startswith(("transformers.", "safepoint.")):
                counts[kind.__name__] += 1
                for name, value in list(getattr(callback, "__dict__", {}).items()):
                    yield _Name(kind.__name__, counts[kind.__name__], name), value

    def _is_followed(self, module: torch.nn.Module) -> bool:
        values = [value for _, value in self._attributes_of_callbacks()]
        return any(one is module or getattr(one, "module", None) is module for one in values)


class _Name(NamedTuple):
    """The attribute that holds a model, or a list or dictionary of tensors. Each attribute has a file of its own.

    Args:
        owner: the name of the callback's class; empty for an attribute of the trainer.
        number: the number of the callback among those whose classes have this name, from 1.
        attribute: the name of the attribute.
    """

    owner: str
    number: int
    attribute: str

    def __str__(self) -> str:
        label = self.owner if self.number == 1 else f"{self.owner}-{self.number}"
        return f"{label}.{self.attribute}" if self.owner else self.attribute

    @property
    def file(self) -> str:
        """The name of the file: the name of the attribute, shortened and in ASCII, and a digest of the full name.

        Some file systems refuse other letters or long names, or do not distinguish capital letters from small ones.
        Without the digest, two attributes could get the same file. The file of `ref_model` has a fixed name.
        """
        if (self.owner, self.attribute) == ("", "ref_model"):
            return _REFERENCE
        exact = "\0".join((self.owner, str(self.number), self.attribute))
        digest = digest_bytes(exact.encode("utf-8", "surrogatepass")).rpartition(":")[2]
        return _KEPT.format(name=re.sub(r"\W", "_", str(self), flags=re.ASCII)[:_MOST_LETTERS], digest=digest)

    @property
    def earlier_file(self) -> str:
        """The name of the file in checkpoints of older releases. Several attributes may have the same name there."""
        return _KEPT_EARLIER.format(name=re.sub(r"[^\w-]", "_", str(self)))


def _weights_of(module: torch.nn.Module) -> set[int]:
    return {id(one) for one in module.parameters()}


def _fingerprint(module: torch.nn.Module) -> torch.Tensor:
    """Some elements of the model's tensors. If a later call returns other elements, the model has changed."""
    tensors = [one.detach() for one in module.state_dict(keep_vars=True).values() if isinstance(one, torch.Tensor)]
    chosen = tensors[:: max(1, len(tensors) // _NUM_SAMPLES)]
    parts = [one.flatten()[:: max(1, one.numel() // _NUM_SAMPLES)].to(torch.float64) for one in chosen if one.numel()]
    return torch.cat([part.cpu() for part in parts]) if parts else torch.empty(0)


def _load(name: "_Name", kept: Any, saved: Any, folder: Path) -> None:
    """Set a model's weights, or a callback's tensors in place.

    Raises:
        ConflictError: the saved weights or tensors do not fit.
    """
    try:
        if isinstance(kept, torch.nn.Module):
            with checked_modules(folder):
                kept.load_state_dict(saved)
        else:
            _copy_tensors(kept, saved)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConflictError(
            f"{name} in {folder.name} does not fit {name} in this run: {error}; training was not started",
            hint=f"create {name} as in the run that wrote the checkpoint, or start from the beginning with "
            "--from-scratch",
        ) from error


def _copy_tensors(kept: Any, saved: Any) -> None:
    """Copy the tensors of `saved` into the tensors of `kept`. Both are lists, or both are dictionaries.

    Raises:
        ValueError: the containers or the tensors have other kinds or sizes.
    """
    if type(saved) is not type(kept) or len(saved) != len(kept):
        raise ValueError(f"{len(kept)} tensors are needed")
    keys: list[Any] = list(kept.keys() if hasattr(kept, "keys") else range(len(kept)))
    for key in keys:
        before = f"of shape {tuple(saved[key].shape)}" if isinstance(saved[key], torch.Tensor) else "not a tensor"
        now = f"of shape {tuple(kept[key].shape)}"
        if before != now:
            raise ValueError(f"{key} is {before} in the checkpoint, and {now} in this run")
    with torch.no_grad():
        for key in keys:
            kept[key].copy_(saved[key])
