"""Ranks of one process that copy snapshots together, on processors or on one device."""

import ctypes
import socket
import time

import torch

from safepoint.snapshot.images.image import Image
from safepoint.snapshot.images.torch_image import TorchImages
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.protocol.channel import Channel
from safepoint.snapshot.replicas.team import Ending, Team
from safepoint.snapshot.replicas.team_helper import Helper
from safepoint.snapshot.replicas.team_lead import Lead
from safepoint.snapshot.staging.device_copy import words_of
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Placed, Stager, Work

TIMEOUT_S = 60
WIDTH = 256 << 10
ALL_BYTES = 5 * 4 * WIDTH
"""Of two parameters, their moments and a buffer."""


class Rank:
    """Two large parameters and a buffer; a team; and the means to stage snapshots with it."""

    def __init__(self, team: Team, device: str) -> None:
        self.team = team
        numbers = torch.arange(WIDTH, device=device)
        self.parameters = [torch.nn.Parameter(numbers * (number + 1.0)) for number in range(2)]
        self.buffer = torch.full((WIDTH,), 7.0, device=device)
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0, momentum=0.9)
        self.marks: list[tuple[int, int]] = []
        self.stager = Stager(lambda block, mark: self.marks.append((block.number, mark)))
        self.guard: Guard | None = None
        self.images = TorchImages("state.pt")
        self.endings: list[Ending] = []
        self.work: Work | None = None
        self.step()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def image(self) -> Image:
        moments = [self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.parameters]
        parameters = [parameter.detach() for parameter in self.parameters]
        return self.images.compose({"parameters": parameters, "moments": moments, "buffer": self.buffer})

    def stage(self, number: int, placed: list[Placed]) -> None:
        try:
            arranged = self.team.arrange(number, placed, self.guard)

            def end(is_whole: bool) -> None:
                self.endings.append(self.team.ended(number, self.stager.sums if is_whole else None))

            work = Work(**arranged._asdict(), on_begin=lambda: None, on_end=end)
            self.stager.stage(work, self.guard)
            self.work = work
            self.team.begun(number)
        finally:
            self.team.settle(number)

    def copied(self) -> int:
        """How many bytes the last snapshot has copied from here."""
        assert self.work is not None
        placed = [*self.work.placed, *self.work.windows]
        return sum(piece.num_bytes for one in placed for piece in one.image.pieces)

    def close(self) -> None:
        if self.guard is not None:
            self.guard.close()
        self.stager.close()
        self.team.close()


class Node:
    """A lead, its helpers, and a block of the lead's."""

    def __init__(self, num_helpers: int, device: str = "cpu") -> None:
        pairs = [socket.socketpair() for _ in range(num_helpers)]
        self.lead = Rank(Lead({n + 1: Channel(pair[0]) for n, pair in enumerate(pairs)}, least_bytes=0), device)
        self.helpers = [Rank(Helper(Channel(pair[1]), timeout_s=TIMEOUT_S), device) for pair in pairs]
        ranks = [self.lead, *self.helpers]
        for rank in ranks:  # every guard of this process hears of every step
            others = [other.optimizer for other in ranks if other is not rank]
            rank.guard = Guard(rank.stager.before_step, [rank.optimizer, *others])
        self.block = Block.allocate(1, self.lead.image().size_bytes)
        self.number = 0
        self.expected: dict[int, bytes] = {}

    def begin(self, *, block: Block | None = None) -> None:
        """Begin a snapshot on all ranks."""
        self.number += 1
        block, image = block or self.block, self.lead.image()
        ctypes.memset(block.address, 0xEE, image.size_bytes)
        self.expected = {
            piece.offset: words_of(piece.owner, piece.address, piece.num_bytes).cpu().numpy().tobytes()
            for piece in image.pieces
        }
        self.lead.stage(self.number, [Placed(image=image, block=block, offset=0)])
        for helper in self.helpers:
            helper.stage(self.number, [])

    def wait(self) -> list[Ending]:
        """What became of it, on all ranks."""
        for rank in (*self.helpers, self.lead):
            rank.stager.wait()
        return [rank.endings.pop() for rank in (self.lead, *self.helpers)]

    def take(self, *, block: Block | None = None) -> Ending:
        self.begin(block=block)
        return self.wait()[0]

    def rehearsed(self) -> None:
        """Take one, and wait until the helpers could copy the next."""
        self.take()
        deadline_s = time.monotonic() + TIMEOUT_S
        lead = self.lead.team
        assert isinstance(lead, Lead)
        while lead._rehearsal is not None and not lead._has_answers(lead._rehearsal.number):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def is_right(self, block: Block | None = None) -> bool:
        block = block or self.block
        return all(bytes(block.view(offset, len(data))) == data for offset, data in self.expected.items())

    def close(self) -> None:
        for helper in self.helpers:
            helper.close()
        self.lead.close()
