"""The cost of a save and its commit by the number of ranks: bytes, requests, marks and the vote.

docs/adr/0008 describes the protocol. Each node uploads the files of its ranks to one object store, writes a mark
when it begins and a mark with the manifest of the whole checkpoint, and lists the marks; the last node commits. So
the numbers of requests and files grow with the number of ranks. The bytes of all marks grow with the square of this
number.
"""

import math
from dataclasses import dataclass, fields

_PART_BYTES = 64 << 20
"""A file has a digest for each part of this size, and large files are uploaded in parts of this size."""
_ENTRY_BYTES = 220
_DIGEST_BYTES = 37
"""The bytes that a manifest has for each file (`_ENTRY_BYTES`), and for each part of a file (`_DIGEST_BYTES`)."""
_LISTED = 1000
"""The number of keys in one answer of S3 to a list request."""
_VOTE_S = 201e-6
_HOP_S = 227e-6
"""The seconds that the vote of two ranks adds to a step (`_VOTE_S`), and the shortest time in seconds that a bare
all-reduce of two ranks took (`_HOP_S`); docs/benchmarks.md, Vote, 2026-11-21."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The machines of a job, and the store to which the job saves.

    Args:
        ranks_per_machine: ranks on each machine.
        state_bytes: how many bytes each rank writes in a save.
        machine_bytes_per_s: how fast a machine writes to the store, and reads from it.
        store_bytes_per_s: how fast the store receives bytes from all machines together.
        store_requests_per_s: writing requests that the store answers per second; AWS states 3,500 for each
            partitioned prefix of S3. None if there is no limit, as in a file system.
        step_s: seconds that a step takes.
        ranks_restart_s: seconds from the end of the processes until training works again on the same machines,
            without the time to load the state.
        machine_restart_s: seconds from the loss of a machine until training works again, without the time to load
            the state.

    Raises:
        ValueError: a value is out of range.
    """

    ranks_per_machine: int = 8
    state_bytes: float = 4e9
    machine_bytes_per_s: float = 2e9
    store_bytes_per_s: float = 2e12
    store_requests_per_s: float | None = None
    step_s: float = 5.0
    ranks_restart_s: float = 60.0
    machine_restart_s: float = 300.0

    def __post_init__(self) -> None:
        above_0 = ("ranks_per_machine", "machine_bytes_per_s", "store_bytes_per_s", "store_requests_per_s")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name in above_0):
                least = "above 0" if field.name in above_0 else "not below 0"
                raise ValueError(f"{field.name} is {value!r}, and must be a finite number, {least}")

    def machines(self, num_ranks: int) -> int:
        """The number of machines that the ranks need."""
        return math.ceil(num_ranks / self.ranks_per_machine)

    def transfer_s(self, num_ranks: int) -> float:
        """Seconds to move the whole state to the store, or from it. The machines and the store have
        different speeds; the slower speed decides."""
        ranks = min(num_ranks, self.ranks_per_machine)
        of_machine_s = ranks * self.state_bytes / self.machine_bytes_per_s
        return max(of_machine_s, num_ranks * self.state_bytes / self.store_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCost:
    """The cost of one save of all ranks.

    Args:
        vote_s: the seconds that the vote adds to each step.
        transfer_s: the time until the bytes are in the store, in seconds.
        num_requests: the number of requests of the save.
        file_requests: the requests that upload the files themselves. Any other program would need them, too.
        requests_s: how long the store takes to answer all requests, at its limit.
        files_s: the time until the files are in the store, limited by their bytes or by their requests.
        manifest_bytes: the size of the manifest.
        marks_bytes: the size of the marks of all machines.
        marks_s: the time until the marks are in the store.
    """

    vote_s: float
    transfer_s: float
    num_requests: int
    file_requests: int
    requests_s: float
    files_s: float
    manifest_bytes: int
    marks_bytes: int
    marks_s: float

    @property
    def durable_s(self) -> float:
        """Seconds from the first byte until the checkpoint counts. Requests and bytes are sent at the same time."""
        return max(self.transfer_s, self.requests_s) + self.marks_s


def commit_cost(platform: Platform, num_ranks: int) -> CommitCost:
    """The cost of one save of this many ranks. Each rank writes one file.

    A file of several parts takes one request for each part of 64 MiB, and two more; a smaller file takes one request.
    Each machine reads the claim, writes two marks, and lists all marks, 1,000 in a request. The vote is a tree of
    pairs; one rank does not vote.

    Raises:
        ValueError: `num_ranks` is below 1.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks!r}, and must be at least 1")
    machines = platform.machines(num_ranks)
    parts = max(1, math.ceil(platform.state_bytes / _PART_BYTES))
    manifest_bytes = num_ranks * (_ENTRY_BYTES + parts * _DIGEST_BYTES)
    files = num_ranks * (parts + 2 if parts > 1 else 1)
    requests = files + machines * (3 + math.ceil(machines / _LISTED)) + 2
    marks_bytes = machines * manifest_bytes
    marks_s = max(manifest_bytes / platform.machine_bytes_per_s, marks_bytes / platform.store_bytes_per_s)
    limit = platform.store_requests_per_s or math.inf
    transfer_s = platform.transfer_s(num_ranks)
    return CommitCost(
        vote_s=0.0 if num_ranks == 1 else _VOTE_S + _HOP_S * (math.ceil(math.log2(num_ranks)) - 1),
        transfer_s=transfer_s,
        num_requests=requests,
        file_requests=files,
        requests_s=requests / limit,
        files_s=max(transfer_s, files / limit),
        manifest_bytes=manifest_bytes,
        marks_bytes=marks_bytes,
        marks_s=marks_s,
    )
