"""The Protocol of a bucket: the requests that differ between services. The module `object_store` has
what is the same for all services."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from safepoint.storage.store import Condition, Content, OpenFile, Progress, Sink, StoredObject


class Bucket(Protocol):
    """Requests to one bucket, by full keys: each key begins with the prefix of the location.

    A request that fails in transit is repeated until `deadline_s`, except in `put`. The methods raise the errors that
    the methods of `Store` raise.
    """

    def objects(self, prefix: str, *, deadline_s: float | None) -> Iterator[StoredObject]:
        """The objects whose keys begin with `prefix`, which is empty or ends with `/`; in any order."""
        ...

    def head(self, key: str, *, deadline_s: float | None) -> StoredObject:
        """Size, version and time of an object."""
        ...

    def get(self, key: str, sink: Sink, *, start: int, length: int, deadline_s: float | None) -> None:
        """See `Store.stream`; `length` is positive."""
        ...

    def get_rest(self, key: str, *, start: int, most_bytes: int, deadline_s: float | None) -> bytes | bytearray:
        """All bytes from `start`, of one version of the object. More than `most_bytes` are an error."""
        ...

    def put(self, key: str, data: bytes, condition: Condition | None, *, within_s: float) -> str:
        """Write an object, and return its version. The request is sent once, and takes no longer than `within_s`."""
        ...

    def upload(
        self,
        key: str,
        source: OpenFile | Content,
        *,
        fence: Callable[[], None] | None,
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        """See `Store.upload`; the source has more than `WHOLE_BYTES` bytes."""
        ...

    def delete(self, key: str, *, deadline_s: float | None) -> None:
        """Delete an object. If there is no such object, do nothing or raise ObjectNotFoundError."""
        ...

    def sweep(
        self,
        prefix: str,
        *,
        only: Callable[[str], bool],
        keys: Iterable[str],
        begun_before_s: float | None,
        deadline_s: float | None,
    ) -> int:
        """See `Store.sweep`; all keys are relative to the bucket, not to a location."""
        ...
