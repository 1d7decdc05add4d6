"""Which checkpoints may go. Pure: it looks at names and decides; it deletes nothing.

Never chosen: the newest, and what the caller protects. Only committed checkpoints count and only they are
chosen, so that a damaged or foreign folder neither takes a good one's place nor disappears.
"""

from collections.abc import Collection, Sequence
from pathlib import Path


def select_superseded(
    committed: Sequence[Path], *, keep_newest: int | None, protected: Collection[Path] = ()
) -> list[Path]:
    """Choose what exceeds the limit, oldest first.

    Args:
        committed: the committed checkpoints, newest first.
        keep_newest: how many to keep, the protected ones included as in the Trainer; None keeps all.
        protected: never chosen, such as the best model so far.
    """
    if keep_newest is None:
        return []
    if keep_newest < 1:
        raise ValueError(f"keep_newest {keep_newest} must be at least 1, or None to keep every checkpoint")
    kept = list(committed[:1])
    kept += [path for path in committed[1:] if path in protected]
    for path in committed:
        if len(kept) >= keep_newest:
            break
        if path not in kept:
            kept.append(path)
    return [path for path in reversed(committed) if path not in kept]


__all__ = ["select_superseded"]
