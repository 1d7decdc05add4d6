"""A hand-written loop as the engine sees it: the parts of its state, and this rank's place in the data."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.format.manifest import Manifest, ManifestFacts
from safepoint.errors import ConflictError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers
from safepoint.training.engine.loop import Write
from safepoint.training.engine.run_facts import RunFacts
from safepoint.training.plain.data.position import Feed, Position
from safepoint.training.plain.state.parts import Parts, parameters_of
from safepoint.training.plain.state.torch_load import load_plain
from safepoint.training.state.base_model import check_base
from safepoint.training.state.rng import capture_rng

_RANK_FILE = "rank_{rank}.pt"


class PlainFramework:
    """See `engine.framework.Framework`.

    Args:
        parts: the state.
        data: what is trained on.
        place: this rank.
        newest: how many checkpoints stay; None keeps all.
    """

    def __init__(self, parts: Parts, data: Feed, place: Place, *, newest: int | None = None) -> None:
        self._newest = newest
        self._parts = parts
        self._data = data
        self._place = place
        self._base: Mapping[str, str] | None = None
        self.handed_step: int | None = None
        self.step = 0
        """Optimizer steps done."""
        self.batches_per_step = 1
        """Batches of this rank between two of them."""

    @property
    def strategy(self) -> str:
        """How the ranks share the model."""
        return self._parts.strategy

    @property
    def zero_stage(self) -> int | None:
        """Of DeepSpeed's ZeRO; None without it."""
        return self._parts.zero_stage

    @property
    def share(self) -> float:
        """How much of model and optimizer this rank writes."""
        return self._parts.share

    def parameters(self) -> Iterable[torch.Tensor]:
        """Of all modules; where there are adapters, only what is trained, because not much else is saved."""
        every = parameters_of(self._parts.modules())
        return every if self._base is None else [one for one in every if one.requires_grad]

    def moments_per_parameter(self) -> int:
        """Two, as the usual optimizers have."""
        return 2

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that step."""
        return self._parts.optimizers()

    def manifest_facts(self, run: RunFacts) -> ManifestFacts:
        """With the place in the data."""
        data, world_size, accumulation = self._data, self._place.world_size, self.batches_per_step
        in_epoch = data.num_batches
        samples = data.batch_size * world_size
        return ManifestFacts(
            run_id=run.run_id,
            attempt=run.attempt,
            step=self.step,
            epoch=data.epoch + (data.batches / in_epoch if in_epoch else 0.0),
            world_size=world_size,
            global_batch=samples * accumulation,
            gradient_accumulation=accumulation,
            samples_seen=(data.epoch * (in_epoch or 0) + data.batches) * samples,
            strategy=self.strategy,
            zero_stage=self.zero_stage,
            libraries=run.libraries,
            base=self._base,
        )

    def retention(self) -> tuple[int | None, set[int]]:
        """The option `--save-total-limit`, and nothing besides."""
        return self._newest, set()

    def write_again(self) -> Write:
        """Everything, as it is now."""

        def write(_: Path, folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            self._parts.write(folder)
            position = self._data.position()
            place = {field.name: getattr(position, field.name) for field in dataclasses.fields(position)}
            mine = {"rng": capture_rng(), "position": place}
            torch.save(mine, folder / _RANK_FILE.format(rank=self._place.rank))

        return write

    def write_final(self, folder: Path) -> None:
        """The models alone."""
        folder.mkdir(parents=True, exist_ok=True)
        self._parts.write_final(folder)

    def find_base(self, peers: Peers) -> None:
        """Look what lies below the adapters that are trained, if there are any; all ranks call it."""
        self._base = self._parts.base(peers)

    def place_in(self, folder: Path, *, ranks_before: int) -> tuple[Position, dict[str, Any]]:
        """Where this rank was in its data when a checkpoint was written; nothing is changed.

        Args:
            folder: a verified checkpoint.
            ranks_before: how many ranks wrote it.

        Returns:
            The place, and its random number states.

        Raises:
            ConflictError: a loop of another kind has written it.
        """
        path = folder / _RANK_FILE.format(rank=self._place.rank % ranks_before)
        if not path.is_file():
            raise ConflictError(
                f"{folder.name} was not written by a session: it has no {path.name}; training was not started",
                hint="give the session an output folder of its own, or begin anew with --from-scratch",
            )
        mine = load_plain(path)
        return Position(**mine["position"]), mine["rng"]

    def load(self, folder: Path, manifest: Manifest) -> None:
        """Load the parts that `write_again` has written into a verified checkpoint.

        Raises:
            UsageError: the checkpoint has no such part.
            ConflictError: its adapters belong to another base, or one of both has none.
        """
        check_base(manifest.base, self._base, manifest.step)
        self._parts.load(folder)
