"""The memory into which snapshots are staged (copied from the tensors).

This memory, the *arena*, consists of blocks: pieces of shared memory, which are allocated once and reused. A block
holds the images of one or several files. An image is the content that the file will have on disk.
"""

import operator
import threading
from collections.abc import Callable, Sequence

from safepoint.foundation.units import format_bytes
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.memory import host_memory
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from safepoint.snapshot.memory.host_memory import Room
from safepoint.snapshot.protocol.messages import BlockPopulated, ReturnBlock
from safepoint.snapshot.staging.device_copy import pin

_SMALL_STATE_BYTES = 256 << 20
"""If three snapshots together are at most this large, the arena has slots for three snapshots. If not, it has one
slot."""
_MAX_SLOTS = 3
_SLACK_BYTES = 16 << 20


class NoRoomError(Exception):
    """There is not enough memory for a snapshot; the message says how much memory the snapshot needs."""


class Arena:
    """One rank's blocks.

    Args:
        keeper: the connection to the keeper, the process that writes snapshots to disk. The keeper maps the blocks,
            and reports which are free.
        slots: how many snapshots may be in memory; None for a number that depends on the size of the state.
        look: returns how much memory may still be allocated, or None if that is not known.
    """

    def __init__(
        self, keeper: KeeperClient, *, slots: int | None = None, look: Callable[[], Room | None] = host_memory.look
    ) -> None:
        self._keeper = keeper
        self._slots = slots
        self.most_bytes: int | None = None
        """How much memory all blocks together may take; None for no limit."""
        self._look = look
        self._blocks: list[Block] = []
        self._populating: threading.Thread | None = None
        self._is_pinning = False

    @property
    def num_bytes(self) -> int:
        """The size of all blocks together."""
        return sum(block.capacity_bytes for block in self._blocks)

    def slots_for(self, snapshot_bytes: int) -> int:
        """How many snapshots of this size may be in memory."""
        if self._slots is not None:
            return self._slots
        return _MAX_SLOTS if _MAX_SLOTS * snapshot_bytes <= _SMALL_STATE_BYTES else 1

    def prepare(self, sizes: Sequence[int], *, still_to_come: int = 0, device: int | None = None) -> None:
        """Allocate blocks for images of about these sizes. A thread then allocates the pages of the blocks.

        Args:
            sizes: the size of each image, in bytes.
            still_to_come: bytes that the training itself is going to allocate.
            device: the CUDA device that will write to the blocks, if any; their pages are locked for this device.

        Raises:
            NoRoomError: there is not enough memory; nothing was allocated.
        """
        self._check_bound(sizes)
        self._check_room(sum(sizes) + still_to_come)
        blocks = [self._allocate(size) for size in sizes if size > 0]

        def populate() -> None:
            for block in blocks:
                if block.populate(self._has_room):
                    self._keeper.send(BlockPopulated(number=block.number))
                    if device is not None:
                        pin(block, device)

        self._is_pinning = device is not None
        self._populating = threading.Thread(target=populate, name="safepoint-arena", daemon=True)
        self._populating.start()

    def wait_prepared(self) -> None:
        """Wait for the thread that `prepare` has started."""
        if self._populating is not None:
            self._populating.join()

    def _has_room(self, num_bytes: int) -> bool:
        room = self._look()
        return room is None or room.has(num_bytes)

    def _check_bound(self, sizes: Sequence[int]) -> None:
        needed_bytes = _needed_bytes(sizes)
        if self.most_bytes is not None and needed_bytes > self.most_bytes:
            raise NoRoomError(
                f"a snapshot needs {format_bytes(needed_bytes)} of host memory, and this rank's share of "
                f"--snapshot-memory is {format_bytes(self.most_bytes)}"
            )

    def _check_room(self, num_bytes: int) -> None:
        room = self._look()
        if room is not None and not room.has(num_bytes):
            raise NoRoomError(
                f"a snapshot needs {format_bytes(num_bytes)} of host memory; {format_bytes(room.available_bytes)} of "
                f"{format_bytes(room.limit_bytes)} are available ({room.limited_by}), "
                f"and Safepoint must leave {format_bytes(room.spare_bytes)} free"
            )

    def _allocate(self, size_bytes: int) -> Block:
        try:
            block = Block.allocate(self._keeper.new_block_number(), size_bytes)
        except OSError as error:
            raise NoRoomError(f"{format_bytes(size_bytes)} of shared memory cannot be allocated: {error}") from error
        self._blocks.append(block)
        self._keeper.lend(block)
        self._keeper.mark_free([block])
        return block

    def could_take(self, sizes: Sequence[int], *, more_slots: int = 0) -> bool:
        """False if `take` would return None for images of these sizes. True if `take` would return blocks, or raise
        an error."""
        if self.most_bytes is not None and _needed_bytes(sizes) > self.most_bytes:
            return True  # `take` would raise an error, because a wait cannot free enough memory
        free = sum(block.capacity_bytes for block in self._blocks if self._keeper.is_free(block))
        return free >= sum(sizes) or self.num_bytes - free + sum(sizes) <= self._allowed(sizes, more_slots)

    def _allowed(self, sizes: Sequence[int], more_slots: int) -> int:
        slots = self.slots_for(sum(sizes)) + more_slots
        allowed = slots * _needed_bytes(sizes) + _SLACK_BYTES
        return allowed if self.most_bytes is None else min(allowed, self.most_bytes)

    def take(self, sizes: Sequence[int], *, more_slots: int = 0) -> list[Block] | None:
        """Blocks for images of these sizes, in the same order.

        Args:
            sizes: the size of each image, in bytes.
            more_slots: how many snapshots memory may hold beyond the usual number, because this snapshot cannot wait.

        Returns:
            The blocks, which are no longer free; None while too many blocks are in use.

        Raises:
            NoRoomError: there is not enough memory.
        """
        if self._is_pinning:
            # Until the thread has locked all pages, no block may be written or shortened (`Block.fit`).
            self.wait_prepared()
        self._check_bound(sizes)
        allowed = self._allowed(sizes, more_slots)
        free = sorted(
            (block for block in self._blocks if self._keeper.is_free(block)),
            key=operator.attrgetter("capacity_bytes"),
        )
        taken: dict[int, Block] = {}
        lacking: list[int] = []
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            size = sizes[index]
            fitting = next((b for b in free if size <= b.capacity_bytes <= 2 * size + _SLACK_BYTES), None)
            if fitting is None:
                lacking.append(index)
            else:
                free.remove(fitting)
                taken[index] = fitting
        needed = sum(sizes[index] for index in lacking)
        while free and self.num_bytes + needed > allowed:
            self._give_back(free.pop(0))
        if self.num_bytes + needed > allowed and len(taken) == len(self._blocks):
            # No block is busy, so waiting would not help. The blocks that were chosen take so much of the allowed
            # memory that the other images do not fit. So all of them are replaced by blocks of the right sizes.
            for block in taken.values():
                self._give_back(block)
            taken.clear()
            lacking = list(range(len(sizes)))
            needed = sum(sizes)
        if lacking and self.num_bytes + needed > allowed:
            return None
        if lacking:
            self._check_room(needed)
            for index in lacking:
                taken[index] = self._allocate(sizes[index])
        blocks = [taken[index] for index in range(len(sizes))]
        self._keeper.overwrite(blocks)
        return blocks

    def _give_back(self, block: Block) -> None:
        self._blocks.remove(block)
        self._keeper.overwrite([block])
        # This process unmaps the block when the last reference to it is gone.
        self._keeper.send(ReturnBlock(number=block.number))

    def close(self) -> None:
        """Release all blocks. The keeper keeps the blocks that it still needs."""
        self.wait_prepared()
        self._blocks.clear()


def _needed_bytes(sizes: Sequence[int]) -> int:
    """The bytes that blocks for images of these sizes need, rounded up to whole pages."""
    return sum(sizes) + PAGE_BYTES * len(sizes)
