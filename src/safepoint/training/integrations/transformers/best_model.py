"""The best model at the end of a training, where every node has its own part of each checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.catalog import checkpoint_name, step_of
from safepoint.errors import PeerError, SafepointError
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext


class BestModel:
    """Makes `load_best_model_at_end` work where every node has a part of each checkpoint.

    Args:
        context: this rank.
        trainer: the Trainer that trains.
        peers: all ranks.
        root: the output folder.
        bring: copies the checkpoint of a step to every node; None where all nodes share one folder.
    """

    def __init__(
        self, context: RankContext, trainer: Any, peers: Peers, root: Path, bring: Callable[[int], object] | None
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._peers = peers
        self._root = root
        self._bring = bring
        self.is_apart = bring is not None
        """Whether nodes have parts of it that must be combined."""

    def agree(self) -> None:
        """Give all ranks the first rank's best checkpoint: it decides whether a rank loads one."""
        if self._bring is None:
            return
        state = self._trainer.state
        best = self._peers.from_first(state.best_model_checkpoint)
        step = step_of(Path(best)) if best else None
        state.best_model_checkpoint = best if step is None else str(self._root / checkpoint_name(step))

    def load(self, original: Callable[..., Any]) -> Any:
        """Override `Trainer._load_best_model`: copy the best checkpoint to every node, then load it."""
        step = step_of(Path(self._trainer.state.best_model_checkpoint))
        if step is not None and self._bring is not None:
            try:
                self._bring(step)
            except PeerError:
                raise
            except SafepointError as error:  # the first node may have the whole model; the Trainer checks
                self._context.log.warning("the best checkpoint, step %s, is not on every node: %s", step, error)
        return original()
