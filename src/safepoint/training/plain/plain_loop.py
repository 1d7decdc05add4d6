"""Gives the engine (the code that all training loops share) access to a loop that calls `step`.

The engine needs the parts of the loop's state, and the loop's position in the data.

A part is an object of the loop that has a state, such as the model or the optimizer.
"""

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.format.manifest import MAX_SAMPLES, Manifest, ManifestFacts
from safepoint.checkpoint.pickles.loading import states_of
from safepoint.errors import ConflictError
from safepoint.foundation.environment import Place
from safepoint.training.collective.collective_wait import on_all_ranks
from safepoint.training.collective.peers import Peers
from safepoint.training.plain.data.position import DataSource, Position, Shared, excess_of
from safepoint.training.plain.state.parts import Parts, parameters_of
from safepoint.training.start.claim import Attempt
from safepoint.training.start.copies import ResumePoint
from safepoint.training.state.base_model import check_base
from safepoint.training.state.plain_values import load_plain
from safepoint.training.state.rng import capture_rng

_RANK_FILE = "rank_{rank}.pt"


class PlainLoop:
    """See `engine.loop.TrainingLoop`.

    Args:
        parts: the parts of the state.
        data: the data that the loop trains on.
        place: the position of this rank among the ranks.
        keep_newest: number of checkpoints to keep; None keeps all.
    """

    has_callbacks = False

    def __init__(self, parts: Parts, data: DataSource, place: Place, *, keep_newest: int | None = None) -> None:
        self._parts = parts
        self._data = data
        self._place = place
        self._keep_newest = keep_newest
        self._base: Mapping[str, str] | None = None
        self.strategy = parts.strategy
        self.zero_stage = parts.zero_stage
        self.written_fraction = parts.written_fraction
        self.step_being_saved: int | None = None
        self.step = 0
        """Optimizer steps done."""
        self.batches_per_step = 1
        """Batches of this rank in one optimizer step."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters of all modules. If the base model of adapters is not saved, only trainable parameters."""
        every = parameters_of(self._parts.modules())
        return every if self._base is None else [one for one in every if one.requires_grad]

    def moments_per_parameter(self) -> int:
        """Two, the number for Adam. The actual optimizer is not examined."""
        return 2

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """See `TrainingLoop`."""
        return self._parts.optimizers()

    def manifest_facts(self, attempt: Attempt) -> ManifestFacts:
        """See `TrainingLoop`. The facts include the epoch and the number of samples."""
        data, world_size, accumulation = self._data.progress(), self._place.world_size, self.batches_per_step
        samples = data.batch_size * world_size
        return ManifestFacts(
            run_id=attempt.run_id,
            attempt=attempt.attempt,
            step=self.step,
            epoch=data.epochs_done,
            world_size=world_size,
            global_batch=samples * accumulation,
            gradient_accumulation=accumulation,
            samples_seen=min((data.epoch * (data.num_batches or 0) + data.batches) * samples, MAX_SAMPLES),
            strategy=self.strategy,
            zero_stage=self.zero_stage,
            base=self._base,
        )

    def retention(self) -> tuple[int | None, set[int]]:
        """How many checkpoints to keep (None for all), and the protected steps, which are always an empty set."""
        return self._keep_newest, set()

    def write(self, parent: Path, folder: Path) -> None:
        """See `TrainingLoop`. Writes all parts, this rank's position in the data and its random number states."""
        folder.mkdir(parents=True, exist_ok=True)
        self._parts.write(folder)
        mine = {"rng": capture_rng(), "position": self._data.position().as_dict(), "step": self.step}
        torch.save(mine, folder / _RANK_FILE.format(rank=self._place.rank))

    def write_final(self, folder: Path) -> None:
        """Write only the models, without the optimizers."""
        folder.mkdir(parents=True, exist_ok=True)
        self._parts.write_final(folder)

    def find_base_model(self, peers: Peers) -> None:
        """Find the base model of the adapters, if adapters are trained. All ranks call this method."""
        self._base = self._parts.base(peers)

    def contradiction_in(self, point: ResumePoint, peers: Peers) -> str:
        """Why the ranks cannot continue together from a checkpoint: their files contradict each other.

        All ranks call this method, and it returns the same on every rank.

        Args:
            point: a verified checkpoint.
            peers: all ranks.

        Returns:
            The reason; empty if the files contain no contradiction, or another kind of training loop wrote them.

        Raises:
            CheckpointError: the file of a rank is invalid.
        """
        path, manifest = self._rank_file(point.path, point.manifest.world_size), point.manifest

        def read() -> tuple[int, int, Shared, str] | None:
            if not path.is_file():
                return None
            with states_of(path):
                mine = load_plain(path)
                position = Position(**mine["position"])
                step, shared = int(mine.get("step", manifest.step)), self._data.shared(position)
                fault = excess_of(self._data.positions(position), manifest)
            if not fault and self._place.is_first:
                fault = self._parts.contradiction_in(point.path, manifest, position)
            return step, position.epoch, shared, fault

        found = on_all_ranks(peers, read)
        places: dict[Hashable, tuple[int, Hashable]] = {}
        for rank, one in enumerate(found):
            if one is None:
                continue
            step, epoch, (pace, place), fault = one
            if step != manifest.step:
                return f"the file of rank {rank} is of step {step}, and the manifest says step {manifest.step}"
            if epoch > manifest.epoch + 1:  # the training would end at once, as if it were complete
                return f"rank {rank} has a position in epoch {epoch}, and the manifest says epoch {manifest.epoch:g}"
            if fault:
                return fault
            other, other_place = places.setdefault(pace, (rank, place))
            if other_place != place:
                return f"the files of the ranks {other} and {rank} have different positions in the data"
        return ""

    def _rank_file(self, folder: Path, ranks_before: int) -> Path:
        return folder / _RANK_FILE.format(rank=self._place.rank % ranks_before)

    def position_in(self, folder: Path, *, ranks_before: int) -> tuple[Position, dict[str, Any]]:
        """Read this rank's position in its data from a checkpoint.

        Args:
            folder: a verified checkpoint.
            ranks_before: how many ranks wrote the checkpoint.

        Returns:
            The position, and the random number states that belong to it.

        Raises:
            CheckpointError: the file with the position is invalid.
            ConflictError: another kind of training loop wrote the checkpoint.
        """
        path = self._rank_file(folder, ranks_before)
        if not path.is_file():
            raise ConflictError(
                f"{folder.name} was not written by a session: it has no {path.name}; training was not started",
                hint="give the session its own output folder, or start from the beginning with --from-scratch",
            )
        with states_of(path):
            mine = load_plain(path)
            return Position(**mine["position"]), mine["rng"]

    def load(self, folder: Path, manifest: Manifest) -> None:
        """Load the parts from a verified checkpoint.

        Raises:
            ConflictError: the checkpoint has other parts, a part does not fit, or adapters have another base model.
        """
        check_base(manifest.base, self._base, manifest.step)
        self._parts.load(folder)
