"""One rank's snapshots: reserves memory for images, starts the copy of their tensors, announces them to the keeper.

The keeper is the process of each node that writes snapshots to disk. A snapshot is taken at a boundary: the point
between two optimizer steps. An image has the bytes that one file of the snapshot will have on disk. Images lie in
blocks, which are pieces of shared memory.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.snapshot.images.image import Image, Placed
from safepoint.snapshot.images.torch_archive import Archive
from safepoint.snapshot.keeper_client.arena import Arena
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.memory.block import SMALL_BYTES, Block
from safepoint.snapshot.protocol.messages import CancelSnapshot, CheckpointFacts, SnapshotStaged, StagedFile
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Stager, Work

_ALIGNMENT = 64


class Snapshotter:
    """Takes snapshots on this rank.

    Args:
        keeper: the connection to the keeper of this node.
        optimizers: the optimizers of the training. Tensors that change only when an optimizer steps are copied during
            the next forward and backward. If None, all tensors are copied at the boundary.
        slots: see `Arena`.
        on_torn: called with the step of a snapshot whose tensors were changed while they were copied.
    """

    def __init__(
        self,
        keeper: KeeperClient,
        *,
        optimizers: Iterable[torch.optim.Optimizer] | None,
        slots: int | None = None,
        on_torn: Callable[[int], None],
    ) -> None:
        self.keeper = keeper
        self.arena = Arena(keeper, slots=slots)
        self.passing: frozenset[str] = frozenset()
        """The paths of the files with tensors that may have been created for the last snapshot only. Do not keep the
        layouts of these files: the layouts would keep the tensors in memory."""
        self._on_torn = on_torn
        self._stager = Stager(keeper.set_num_copied)
        self._guard = None if optimizers is None else Guard(self._stager.before_step, optimizers)

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Watch these optimizers from now on. Waits first until the last snapshot is copied."""
        self._stager.wait()
        if self._guard is not None:
            self._guard.close()
            self._guard = Guard(self._stager.before_step, optimizers)

    def take(
        self,
        step: int,
        images: Sequence[Image],
        *,
        trigger: Trigger,
        is_requested: bool,
        facts: CheckpointFacts | None,
        number: int,
        more_slots: int = 0,
    ) -> bool:
        """Begin a snapshot.

        Args:
            step: how many optimizer steps are done.
            images: the images of all files that this rank writes.
            trigger: why the snapshot is taken.
            is_requested: whether the keeper is to make a checkpoint of the snapshot.
            facts: about the checkpoint; only the first rank of a node passes them.
            number: the number of the snapshot. It rises with each call, and is the same on all ranks.
            more_slots: see `Arena.take`.

        Returns:
            Whether the snapshot has begun; False while earlier snapshots occupy the memory.

        Raises:
            NoRoomError: there is not enough memory.
            ValueError: the path of an image is not a valid path for a file of a checkpoint.
        """
        self._stager.wait()
        placed = self._place(images, more_slots)
        if placed is None:
            return False

        def end(is_whole: bool) -> None:
            if is_whole:
                self.keeper.send(SnapshotStaged(step=step))
                return
            self._leave_guard()
            # The keeper may be reading the blocks; it reports when they are free.
            self.keeper.send(CancelSnapshot(step=step, number=number))
            self._on_torn(step)

        try:
            files = tuple(
                _staged_file(one.image.path, one.block.number, one.offset, one.image.size_bytes, one.image.archives)
                for one in placed
            )

            def begin() -> None:
                self.keeper.begin_snapshot(
                    step, files, trigger=trigger, is_requested=is_requested, facts=facts, number=number
                )

            self.passing = self._stager.stage(Work(placed=placed, on_begin=begin, on_end=end), self._guard)
        except BaseException:
            self.keeper.mark_free([place.block for place in placed])
            raise
        return True

    def cancel(self, step: int, number: int) -> None:
        """Cancel the last snapshot, because another rank could not take its own."""
        self._stager.wait()
        self.keeper.send(CancelSnapshot(step=step, number=number))

    def _leave_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _place(self, images: Sequence[Image], more_slots: int) -> list[Placed] | None:
        large = [image for image in images if image.size_bytes >= SMALL_BYTES]
        small = [image for image in images if image.size_bytes < SMALL_BYTES]
        offsets: list[int] = []
        end = 0
        for image in small:
            offsets.append(end)
            end = -(-(end + image.size_bytes) // _ALIGNMENT) * _ALIGNMENT
        # The block with the small files gets the length at which its last file ends. If the block has only one file,
        # restarted ranks load the whole block as this file.
        used = [max(offsets[-1] + small[-1].size_bytes, 1)] if small else []
        sizes = [image.size_bytes for image in large] + used
        blocks = self.arena.take(sizes, more_slots=more_slots)
        if blocks is None:
            return None
        try:
            for block, size in zip(blocks, sizes, strict=True):
                block.fit(size)
        except BaseException:
            self.keeper.mark_free(blocks)
            raise
        shared: list[Block] = blocks[len(large) :]
        placed = [Placed(image=image, block=block, offset=0) for image, block in zip(large, blocks, strict=False)]
        return placed + [
            Placed(image=image, block=shared[0], offset=offset) for image, offset in zip(small, offsets, strict=True)
        ]

    @property
    def waited_s(self) -> float:
        """How long optimizers have waited for the last snapshot, in seconds."""
        return self._stager.waited_s

    def wait_staged(self) -> None:
        """Wait until the last snapshot has been copied."""
        self._stager.wait()

    def close(self) -> None:
        """Complete the copy in progress, and end the copying thread. The keeper still writes staged snapshots."""
        self._stager.close()
        self._leave_guard()
        self.arena.close()


@functools.lru_cache(maxsize=1024)  # cached, because each save stages the same few files while training waits
def _staged_file(path: str, block: int, offset: int, size_bytes: int, archives: tuple[Archive, ...]) -> StagedFile:
    return StagedFile(path=path, block=block, offset=offset, size_bytes=size_bytes, archives=archives)
